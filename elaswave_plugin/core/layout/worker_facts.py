"""The facts that a worker tells all others when the view changes, and what it has sealed.

They come with the commit. The agents hand them on as JSON, and read of it only the step
(`step_told`): nothing heavy is imported here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from elaswave_plugin.core.layout.device_groups import CommunicatorFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedShard:
    """One verified-by-checksum snapshot of one shard, and the holder of its bytes.

    The same record is written into the snapshot's own memory, told to the agents, handed to all
    trainers with a commit and planned with.

    ``buffer``: which of its owner's two memories it is in; ``units``: the parts of the model that
    its shard group had, in the order of its buckets; ``ranks``: the slots that shared the state, by
    ``shard``; sizes in bytes, all of them together ``length``. The memory itself does not
    name its holder.
    """

    owner: int
    buffer: int
    step: int
    epoch: int
    shard_group: tuple[int, int]
    units: tuple[int, ...]
    ranks: tuple[int, ...]
    shard: int
    length: int
    payload_bytes: int
    capsule_bytes: int
    table_digest: int
    holder: int = -1
    holder_address: str = ""
    is_copy: bool = False

    def __str__(self) -> str:
        kind = "copy of shard" if self.is_copy else "shard"
        return f"{kind} {self.shard}/{len(self.ranks)} of step {self.step} at w{self.holder}"

    @property
    def age(self) -> tuple[int, int]:
        """Rises with every seal of a buffer, although a roll-back lowers the step."""
        return self.epoch, self.step


@dataclass(frozen=True, slots=True)
class SlowReport:
    """One worker's report of another that is slow, as `core.planner.slow.Slow`."""

    slot: int
    ratio: float
    peers: tuple[int, ...]
    steps: int


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """One worker's report that it ran out of memory, as ``words`` say.

    It may have ``most`` times its share of the launch (in a pipeline: what the first stage held),
    in views of at most ``width`` workers.
    """

    most: float
    width: int
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """One worker's facts, once it has stopped; what is empty it has not, or does not know yet.

    For the links and groups: ``address`` of its links, and the ``communicators`` of a device that
    it holds. For the state: the ``step`` before which it stands; ``live``: (step, epoch) of the
    seal at which its model and optimizer still are; ``unreadable``: snapshots that it found
    damaged. For the deal: ``placement`` as `Placement.state` in the view of ``placed_epoch``;
    ``times``: as `PassTimes.medians`; ``slow``: as `SlowWatch.reports`;
    ``slow_views``: as `Payback.asked`; ``cuts_wanted``: layers that it was asked for;
    ``seal_interval``: steps from one seal to the next that it wants; ``out_of_memory``: that it may
    not have more; ``told_to_leave``: it is to go. At the launch: the ``run_id`` and ``launch_id``
    that it proposes, and the settings that it was ``given``.
    """

    address: str
    communicators: Mapping[str, CommunicatorFacts] = field(default_factory=dict)
    step: int = 0
    live: tuple[int, int] | None = None
    unreadable: tuple[SealedShard, ...] = ()
    placed_epoch: int = 0
    placement: Mapping[str, Any] = field(default_factory=dict)
    times: Mapping[str, Sequence[float]] = field(default_factory=dict)
    slow: tuple[SlowReport, ...] = ()
    slow_views: tuple[int, int, bool] | None = None
    seal_interval: int = 1
    cuts_wanted: tuple[int, ...] | None = None
    out_of_memory: OutOfMemory | None = None
    told_to_leave: bool = False
    run_id: str = ""
    launch_id: str = ""
    given: Mapping[str, Any] = field(default_factory=dict)


def step_told(record: Mapping[str, Any]) -> int:
    """The step before which the worker stands whose facts these are, as JSON."""
    return int(record.get("step", 0))
