"""What a worker tells all others when the view changes: its facts, which come with the commit.

The supervisors hand them on as JSON, and read of it only the step (`step_told`): nothing heavy is
imported here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from elaswave_plugin.core.communicators import CommunicatorFacts


class SlowTold(NamedTuple):
    """What one worker tells of another that is slow: as `core.slow.Slow`."""

    slot: int
    ratio: float
    peers: tuple[int, ...]
    steps: int

    @classmethod
    def from_json(cls, record: Sequence[Any]) -> SlowTold:
        """What the list says that JSON makes of it."""
        slot, ratio, peers, steps = record
        return cls(slot, ratio, tuple(peers), steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """One worker's facts, once it has stopped; what is empty it has not, or does not know yet.

    For the links and groups: ``address`` of its links, and the ``communicators`` of a device that
    it holds. For the state: the ``step`` before which it stands; ``live``: (step, epoch) of the
    seal at which its model and optimizer still are; ``unreadable``: (holder, owner, step) of
    snapshots that it found damaged. For who does what: ``seating`` as `Seating.told` in the view
    of ``seated_epoch``; ``times``: as `PassTimes.medians`; ``slow``: as `SlowWatch.told`;
    ``slow_views``: as `Payback.asked`; ``cuts_wanted``: layers that somebody has asked it for;
    ``told_to_leave``: it is to go. At the launch: the ``run_id`` that it proposes, and the settings
    that it was ``given``.
    """

    address: str
    communicators: Mapping[str, CommunicatorFacts] = field(default_factory=dict)
    step: int = 0
    live: tuple[int, int] | None = None
    unreadable: tuple[tuple[int, int, int], ...] = ()
    seated_epoch: int = 0
    seating: Mapping[str, Any] = field(default_factory=dict)
    times: Mapping[str, Sequence[float]] = field(default_factory=dict)
    slow: tuple[SlowTold, ...] = ()
    slow_views: tuple[int, int] | None = None
    cuts_wanted: tuple[int, ...] | None = None
    told_to_leave: bool = False
    run_id: str = ""
    given: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """A dict that JSON can carry; what is empty is left out."""
        told = {one.name: getattr(self, one.name) for one in fields(self)}
        told["communicators"] = {name: one.to_json() for name, one in self.communicators.items()}
        return {name: what for name, what in told.items() if what}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> WorkerFacts:
        """The facts that `to_json` described; raises TypeError for others."""
        told = dict(record)
        for name in ("live", "slow_views", "cuts_wanted"):
            if name in told:
                told[name] = tuple(told[name])
        held = told.get("communicators", {}).items()
        told["communicators"] = {name: CommunicatorFacts.from_json(one) for name, one in held}
        told["unreadable"] = tuple(map(tuple, told.get("unreadable", ())))
        told["slow"] = tuple(map(SlowTold.from_json, told.get("slow", ())))
        return cls(**told)


def step_told(record: Mapping[str, Any]) -> int:
    """The step before which the worker stands that `WorkerFacts.to_json` described."""
    return int(record.get("step", 0))
