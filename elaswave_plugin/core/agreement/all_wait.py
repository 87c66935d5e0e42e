"""The workers for which all others wait, and since when: reported before anything counts as a hang.

>>> waits = Sample(slot=1, incarnation=0, epoch=1, step=0, phase="between steps", operations=1,
...                stalled_s=11.0, limit_s=600.0, waits_for=0)
>>> found = all_wait((0, 1), {1: waits})
>>> found.late, found.waited_s
((0,), 11.0)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from elaswave_plugin.core.agreement.hang import FACTOR, UNKNOWN_LIMIT_S, Sample, who_waits

FIRST_S = 10.0
"""Seconds before the first report; each further one comes after three times the last wait."""
AGAIN = 3.0
STEADY_S = 2.0
"""Seconds for which the same workers must be late: when all go on, some seem to wait longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllWait:
    """A wait of all other workers for the slots ``late``; the last of them has waited ``waited_s``.

    ``usual_s``: seconds that the phase of the late ones usually takes; 0 if not known.
    """

    late: tuple[int, ...]
    waited_s: float
    usual_s: float = 0.0


def all_wait(members: Iterable[int], samples: Mapping[int, Sample]) -> AllWait | None:
    """Find the workers for which all others wait; None if another one is at work.

    `samples` are of the members that stand still; the others have just made progress, or have not
    attached yet. A phase of known duration may take that long first.
    """
    members = set(members)
    waiting = who_waits(sorted(members), samples)
    late = tuple(sorted(waiting))
    waiters = {slot for one in waiting.values() for slot in one.slots} - {*late}
    if not waiters or waiters | {*late} != members:
        return None
    waited_s = min(samples[slot].stalled_s for slot in waiters)
    limits = [samples[slot].limit_s for slot in late if slot in samples]
    usual_s = max((limit / FACTOR for limit in limits if limit < UNKNOWN_LIMIT_S), default=0.0)
    return AllWait(late=late, waited_s=waited_s, usual_s=usual_s)


class Said:
    """The memory of what was reported, so that it is repeated at longer and longer intervals."""

    def __init__(self) -> None:
        self._late: tuple[int, ...] = ()
        self._due_s = 0.0
        self._since_s: dict[int, float] = {}

    def is_due(self, found: AllWait | None, now_s: float) -> bool:
        """Return whether to report now: others are late, or three times as long as last time."""
        late = () if found is None else found.late
        self._since_s = {slot: self._since_s.get(slot, now_s) for slot in late}
        if found is None or found.waited_s < max(FIRST_S, found.usual_s):
            return False
        if max(self._since_s.values()) > now_s - STEADY_S:
            return False
        if late == self._late and found.waited_s < self._due_s:
            return False
        self._late, self._due_s = late, AGAIN * found.waited_s
        return True
