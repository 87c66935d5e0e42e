"""The times of passes by length: a curve through the reports of all workers of a role.

A pass of n tokens takes c0 + c1 n + c2 n^2 seconds: a fixed part, a part linear in tokens, and
attention; none of these is negative. The curve is fitted to the passes of the last steps by
relative errors, with a factor for each worker, so that a slow one does not bend it.

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

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import chain, combinations
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

STEPS_REMEMBERED = 32
DIGITS = 6
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
    """The passes of one role's last steps; equal on all workers that have seen the same steps."""

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
                level=float(f"{one.seconds / curve.seconds(one.tokens):.{DIGITS}g}"),
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
