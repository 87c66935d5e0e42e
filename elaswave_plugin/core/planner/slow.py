"""The detection of slow workers, by their pace against others with the same layers.

A pace is seconds per layer and token, of the fastest of as many forward passes of a step as each of
them has: so that neither a processor that others use for a moment, nor having less to do makes a
worker slow. Where lengths vary, a pace is judged by the curve through those of the last steps
(`length_curve.py`), and a pace that its length may explain is neither named nor taken back.

On a busy machine the pace of a step may be ten times that of the next. So a worker is named on 8 to
32 steps, of which three in four show it as that slow; the fewer they are, the more they have to
show: by the spread of the others' ratios, to the power of 8 over their number.

>>> watch = SlowWatch()
>>> for step in range(8):
...     changed = watch.step({0: 1e-6, 1: 1.6e-6, 2: 1e-6}, [(0, 1, 2)])
>>> print(watch.slow[1])
takes 1.60x as long for a layer as workers 0, 2, which have the same ones, in 8 steps
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, median_high, median_low
from typing import NamedTuple

from elaswave_plugin.core.layout.worker_facts import SlowReport
from elaswave_plugin.core.planner.length_curve import LengthHistory

SLOW = 1.3
LEVEL = 1.15
SHORTEST, LONGEST = 8, 32
"""Steps of evidence; the longest also to take it back, or to name another ratio."""
AGAIN = 1.5
"""By this factor slower or faster than when it was named, a worker is named again."""
DIGITS = 2
_LONGER = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Slow:
    """A slow worker: its pace over the median of its ``peers``, in three of four ``steps``."""

    ratio: float
    peers: tuple[int, ...]
    steps: int = SHORTEST

    @property
    def slowness(self) -> float:
        """The ratio that plans are made with: noise must not change them."""
        return float(f"{self.ratio:.{DIGITS}g}")

    def __str__(self) -> str:
        several = "s" if len(self.peers) > 1 else ""
        have = "have" if several else "has"
        return (
            f"takes {self.ratio:.2f}x as long for a layer as worker{several}"
            f" {', '.join(map(str, self.peers))}, which {have} the same ones, in {self.steps} steps"
        )


class _Ratio(NamedTuple):
    """A worker's pace over that of its peers in one step: at least, and at most."""

    least: float
    most: float


class SlowWatch:
    """The slow workers of a job by slot; alike on all that have seen the same steps.

    Of those with the same layers at most half are slow, since the others are what they are
    measured by.
    """

    def __init__(self) -> None:
        self.slow: dict[int, Slow] = {}
        # By slot, of the last steps.
        self._ratios: dict[int, deque[_Ratio]] = {}
        # By role, its slots.
        self._lengths: dict[tuple[int, ...], LengthHistory] = {}

    @property
    def slowness(self) -> dict[int, float]:
        """The factor by which each slow worker takes longer."""
        return slowness_of(self.reports())

    def reports(self) -> tuple[SlowReport, ...]:
        """List the slow workers."""
        return tuple(
            SlowReport(slot, one.ratio, one.peers, one.steps)
            for slot, one in sorted(self.slow.items())
        )

    def restart(self, reports: Sequence[SlowReport]) -> None:
        """The members have changed: begin with what one of them has `reports`, and new evidence."""
        self.slow = {
            one.slot: Slow(ratio=one.ratio, peers=one.peers, steps=one.steps) for one in reports
        }
        self._ratios.clear()
        self._lengths.clear()

    def interrupt(self) -> None:
        """Drop the evidence, as a step was interrupted."""
        self._ratios.clear()

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
            for slot, (level, doubt) in levels.items():
                others = [levels[one] for one in known if one != slot]
                ratio = _Ratio(
                    least=level / doubt / median(one.level * one.doubt for one in others),
                    most=level * doubt / median(one.level / one.doubt for one in others),
                )
                self._ratios.setdefault(slot, deque(maxlen=LONGEST)).append(ratio)
            for slot in known:
                self._judge(slot, tuple(sorted(known.keys() - {slot})))
        return before != self.slow

    def _judge(self, slot: int, peers: tuple[int, ...]) -> None:
        named, row = self.slow.get(slot), self._ratios[slot]
        found = named
        if named is None:
            # Only a step that shows it can be the last one that it takes.
            if row[-1].least >= SLOW and 2 * len(self.slow.keys() & {*peers}) < len(peers):
                found = self._found_slow(slot, peers)
        elif len(row) == LONGEST:
            ratio = median_low(one.least for one in row)
            if median_high(one.most for one in row) < LEVEL:
                found = None
            elif ratio >= named.ratio * AGAIN or LEVEL <= ratio <= named.ratio / AGAIN:
                found = Slow(ratio=ratio, peers=peers, steps=LONGEST)
        if found is not named:
            # What spoke for it says nothing of what comes next.
            row.clear()
            self.slow = {one: how for one, how in {**self.slow, slot: found}.items() if how}

    def _found_slow(self, slot: int, peers: tuple[int, ...]) -> Slow | None:
        """As slow as most steps show it, where they are enough."""
        row = [*self._ratios[slot]]
        for steps in range(SHORTEST, len(row) + 1, _LONGER):
            ratio = sorted(one.least for one in row[-steps:])[steps // 4 - 1]
            if ratio >= SLOW * self._spread(peers, steps) ** (SHORTEST / steps):
                return Slow(ratio=ratio, peers=peers, steps=steps)
        return None

    def _spread(self, peers: tuple[int, ...], steps: int) -> float:
        """Upper over lower quartile of the last ratios of these, around each one's own median."""
        rows = [[one.least for one in self._ratios[slot]][-steps:] for slot in peers]
        around = sorted(ratio / median(row) for row in rows for ratio in row)
        quarter = len(around) // 4
        return around[-quarter - 1] / around[quarter] if around else 1.0


def slowness_of(reports: Iterable[SlowReport]) -> dict[int, float]:
    """Return the factor by which each worker takes longer that `SlowWatch.reports` told."""
    return {one.slot: Slow(ratio=one.ratio, peers=one.peers).slowness for one in reports}


def reason_of_view(slow: Mapping[int, Slow]) -> str:
    """Say why the work of a job is dealt again."""
    if not slow:
        return "no worker is slow any more: none gets less to do"
    names = ", ".join(f"{slot} ({slow[slot].slowness:g}x)" for slot in sorted(slow))
    return f"less work for what is slow: worker {names}"
