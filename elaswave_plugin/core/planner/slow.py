"""The detection of slow workers, by their pace against others with the same layers.

A pace is seconds per layer and token, of the fastest of as many forward passes of a step as each of
them has: so that neither a processor that others use for a moment, nor having less to do makes a
worker slow. Where lengths vary, a pace is judged by the curve through those of the last steps
(`LengthHistory`), and a pace that its length may explain is neither named nor taken back.

On a busy machine the pace of a step may be ten times that of the next. So a worker is named on 8 to
32 steps, of which three in four show it as that slow; the fewer they are, the more they have to
show: by the spread of the others' ratios, to the power of 8 over their number.

>>> watch = SlowWatch()
>>> for step in range(8):
...     changed = watch.step({0: 1e-6, 1: 1.6e-6, 2: 1e-6}, [(0, 1, 2)])
>>> print(watch.slow[1])
takes 1.60x as long for a layer as workers 0, 2, which have the same ones, in 8 steps
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from statistics import median, median_high, median_low
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from elaswave_plugin.core.layout.worker_facts import SlowReport

STEPS_REMEMBERED = 32
_LEVEL_DIGITS = 6
"""Significant digits: processors may differ in the last bits of a sum."""
_ROUNDS = 4
_POWERS = 3
_Floats = npt.NDArray[np.float64]


class Level(NamedTuple):
    """A pace relative to the curve, and the factor by which lengths alone may falsify it."""

    level: float
    doubt: float = 1.0


class _Pass(NamedTuple):
    slot: int
    tokens: int
    seconds: float


class LengthHistory:
    """The passes of one role's last steps, judged by a curve: seconds by tokens.

    A pass of n tokens takes c0 + c1 n + c2 n^2 seconds: a fixed part, a part linear in tokens, and
    attention; none of these is negative. The curve is fitted to the passes of the last steps by
    relative errors, with a factor for each worker, so that a slow one does not bend it. Equal on
    all workers that have seen the same steps.

    >>> history = LengthHistory()
    >>> paces = {0: (3e-6, 1000), 1: (4e-6, 2000)}
    >>> history.levels(paces)[1].level  # two passes do not tell which is long, which is slow
    1.0
    >>> for first, second in ((2000, 1000), (1000, 1000), (2000, 2000)):
    ...     took = {0: (2e-6 + first * 1e-9, first), 1: (4e-6 + second * 2e-9, second)}
    ...     levels = history.levels(took)
    >>> round(levels[1].level / levels[0].level, 2)
    2.0
    """

    def __init__(self) -> None:
        self._steps: deque[list[_Pass]] = deque(maxlen=STEPS_REMEMBERED)

    def levels(self, paces: Mapping[int, tuple[float, int]]) -> dict[int, Level]:
        """Remember a step and judge it.

        ``paces``: by slot, seconds per token of a pass, and its tokens; 0 tokens: lengths do not
        matter. At another length a pace is known up to the ratio of the two lengths, which is the
        doubt: a pass takes at least as long as a shorter one, and at most longer by the square.
        """
        now = [_Pass(slot, n, pace * n) for slot, (pace, n) in sorted(paces.items())]
        self._steps.append(now)
        every = [*chain.from_iterable(self._steps)]
        lengths = {one.tokens for one in every}
        if len(lengths) < 2 or 0 in lengths:
            return {slot: Level(pace) for slot, (pace, _) in paces.items()}
        curve = _Curve(every)
        return {
            one.slot: Level(
                level=float(f"{one.seconds / curve.seconds(one.tokens):.{_LEVEL_DIGITS}g}"),
                doubt=min(
                    _unlikeness(one.tokens, other.tokens) for other in every if other is not one
                ),
            )
            for one in now
        }


class _Curve:
    """Seconds by tokens."""

    def __init__(self, passes: Sequence[_Pass]) -> None:
        slots = np.array([one.slot for one in passes])
        tokens = np.array([one.tokens for one in passes], dtype=np.float64)
        seconds = np.array([one.seconds for one in passes])
        self._longest = float(np.max(tokens))
        factors = np.ones(len(passes))
        for _ in range(_ROUNDS):
            self._terms = _fitted(tokens / self._longest, seconds / factors)
            ratios = seconds / self.seconds(tokens)
            for slot in np.unique(slots):
                factors[slots == slot] = float(np.median(ratios[slots == slot]))

    def seconds(self, tokens: _Floats | int) -> _Floats:
        """Return the seconds of a worker with the factor 1."""
        length = np.asarray(tokens, dtype=np.float64) / self._longest
        fixed, linear, square = self._terms
        return np.asarray(fixed + length * (linear + length * square), dtype=np.float64)


def _fitted(lengths: _Floats, seconds: _Floats) -> _Floats:
    """Return the non-negative terms of the least relative squares; some may be 0."""
    rows = np.stack([lengths**power for power in range(_POWERS)], axis=1) / seconds[:, None]
    products, sums = rows.T @ rows, rows.sum(axis=0)
    best, least = np.zeros(_POWERS), np.inf
    for count in range(1, _POWERS + 1):
        for kept in map(list, combinations(range(_POWERS), count)):
            terms = np.zeros(_POWERS)
            terms[kept] = np.linalg.lstsq(products[np.ix_(kept, kept)], sums[kept], rcond=None)[0]
            error = float(terms @ products @ terms - 2 * terms @ sums)
            # Prefer fewer terms if more of them explain nothing.
            if np.min(terms) >= 0 and error < least - 1e-9:
                best, least = terms, error
    return best


def _unlikeness(tokens: int, others: int) -> float:
    """The ratio of two lengths, the greater over the smaller."""
    return max(tokens / others, others / tokens)


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
