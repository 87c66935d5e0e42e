"""Which workers are slow: by their pace against that of the others with the same layers.

A pace is seconds per layer and token, of the fastest of as many forward passes of a step as each of
them has: so that neither a processor that others use for a moment, nor having less to do makes a
worker slow. Where lengths vary, a pace is judged by the curve through those of the last steps
(`length_curve.py`), and who may owe it to its length is neither named nor taken back.

>>> watch = SlowWatch()
>>> for step in range(4):
...     changed = watch.step({0: 1e-6, 1: 1.6e-6, 2: 1e-6}, [(0, 1, 2)])
>>> print(watch.slow[1])
takes 1.60x as long for a layer as workers 0, 2, which have the same ones, in 4 steps in a row
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from elaswave_plugin.core.length_curve import LengthHistory
from elaswave_plugin.core.worker_facts import SlowTold

SLOW = 1.3
LEVEL = 1.15
STEPS_TO_NAME = 4
"""In a row, also to take it back: the pace of a step is known in the next one, the fifth."""
AGAIN = 1.5
"""So much slower or faster than when it was named, a worker is named anew."""
MOST_STEPS = 256
"""In a row, to take it back from a worker that was named again and again."""
DIGITS = 2
KEEP, NAME, TAKE_BACK = "keep", "name", "take back"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slow:
    """A slow worker: its pace over the median of its ``peers``, the least of a row of steps."""

    ratio: float
    peers: tuple[int, ...]

    @property
    def slowness(self) -> float:
        """The ratio that plans are made with: noise must not change them."""
        return float(f"{self.ratio:.{DIGITS}g}")

    def __str__(self) -> str:
        several = "s" if len(self.peers) > 1 else ""
        have = "have" if several else "has"
        return (
            f"takes {self.ratio:.2f}x as long for a layer as worker{several}"
            f" {', '.join(map(str, self.peers))}, which {have} the same ones, in {STEPS_TO_NAME}"
            " steps in a row"
        )


class SlowWatch:
    """The slow workers of a job by slot; alike on all that have seen the same steps.

    One that is much slower or faster than when it was named is named anew. Each time that one was
    named it takes twice as many level steps to take it back, so that nothing flaps.
    """

    def __init__(self) -> None:
        self.slow: dict[int, Slow] = {}
        self._times_named: dict[int, int] = {}
        # By slot, what the last steps in a row speak for, and their ratios.
        self._row: dict[int, tuple[str, list[float]]] = {}
        # By role, its slots.
        self._lengths: dict[tuple[int, ...], LengthHistory] = {}

    @property
    def slowness(self) -> dict[int, float]:
        """How many times as long each slow one takes."""
        return slowness_told(self.told())

    def told(self) -> tuple[SlowTold, ...]:
        """Who is slow or was."""
        return tuple(
            SlowTold(slot, one.ratio if one else 0.0, one.peers if one else (), times)
            for slot, times in sorted(self._times_named.items())
            for one in (self.slow.get(slot),)
        )

    def restart(self, told: Sequence[SlowTold]) -> None:
        """The members have changed: begin with what one of them has `told`; rows start anew."""
        self.slow = _slow_told(told)
        self._times_named = {one.slot: one.times_named for one in told}
        self._row.clear()
        self._lengths.clear()

    def interrupt(self) -> None:
        """A step was interrupted: rows start anew."""
        self._row.clear()

    def step(
        self,
        paces: Mapping[int, float],
        roles: Iterable[Sequence[int]],
        tokens: Mapping[int, int] | None = None,
    ) -> bool:
        """Judge a step; whether others are slow now, or some as much as they were not.

        ``paces``: by slot, without those that are not known. ``roles``: slots with the same layers.
        ``tokens``: of a sample in the pass that a pace is of, where they matter.
        """
        before, tokens = dict(self.slow), tokens or {}
        for role in roles:
            known = {slot: (paces[slot], tokens.get(slot, 0)) for slot in role if slot in paces}
            if len(known) < 2:
                continue
            levels = self._lengths.setdefault(tuple(role), LengthHistory()).levels(known)
            for slot in known:
                peers = tuple(sorted(known.keys() - {slot}))
                level, doubt = levels[slot]
                least = (
                    level / doubt / median(levels[one].level * levels[one].doubt for one in peers)
                )
                most = (
                    level * doubt / median(levels[one].level / levels[one].doubt for one in peers)
                )
                self._judge(slot, least, most, peers)
        return before != self.slow

    def _judge(self, slot: int, least: float, most: float, peers: tuple[int, ...]) -> None:
        finding, (before, row) = self._finding(slot, least, most), self._row.get(slot, (KEEP, []))
        row = [*row, least] if finding == before else [least]
        self._row[slot] = finding, row
        if finding == NAME and len(row) >= STEPS_TO_NAME:
            self._times_named[slot] = self._times_named.get(slot, 0) + (slot not in self.slow)
            self.slow[slot] = Slow(ratio=min(row), peers=peers)
        elif finding == TAKE_BACK and len(row) >= self._steps_to_take_back(slot):
            del self.slow[slot]
        else:
            return
        del self._row[slot]

    def _finding(self, slot: int, least: float, most: float) -> str:
        """What a step speaks for, in which the ratio is between these two."""
        named = self.slow.get(slot)
        if named is None:
            return NAME if least >= SLOW else KEEP
        if most < LEVEL:
            return TAKE_BACK
        is_faster = least >= LEVEL and most <= named.ratio / AGAIN
        return NAME if is_faster or least >= named.ratio * AGAIN else KEEP

    def _steps_to_take_back(self, slot: int) -> int:
        return min(MOST_STEPS, STEPS_TO_NAME << self._times_named.get(slot, 1) - 1)


def slowness_told(told: Iterable[SlowTold]) -> dict[int, float]:
    """How many times as long each of those takes that `SlowWatch.told` told."""
    return {slot: one.slowness for slot, one in _slow_told(told).items()}


def reason_of_view(slow: Mapping[int, Slow]) -> str:
    """Why the work of a job is dealt anew."""
    if not slow:
        return "no worker is slow any more: none gets less to do"
    names = ", ".join(f"{slot} ({slow[slot].slowness:g}x)" for slot in sorted(slow))
    return f"less work for what is slow: worker {names}"


def _slow_told(told: Iterable[SlowTold]) -> dict[int, Slow]:
    return {one.slot: Slow(ratio=one.ratio, peers=one.peers) for one in told if one.ratio}
