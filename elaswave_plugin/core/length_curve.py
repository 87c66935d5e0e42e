"""How long passes of other lengths would take: a curve through what all workers of a role told.

A pass of n tokens takes c0 + c1 n + c2 n^2 seconds: what it takes in any case, what is linear in
tokens, attention; none of these is negative. Fitted to the passes of the last steps, by relative
errors, each worker's by a factor of its own, so that a slow one does not bend the curve.

>>> history = LengthHistory()
>>> paces = {0: (3e-6, 1000), 1: (4e-6, 2000)}
>>> history.levels(paces)[1].level  # of two passes nobody can tell which is long, which is slow
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
    """A pace against that of the curve, and by what factor lengths alone may make this wrong."""

    level: float
    doubt: float = 1.0


class _Pass(NamedTuple):
    slot: int
    tokens: int
    seconds: float


class LengthHistory:
    """The passes of one role's last steps; alike on all that have seen the same steps."""

    def __init__(self) -> None:
        self._steps: deque[list[_Pass]] = deque(maxlen=STEPS_REMEMBERED)

    def levels(self, paces: Mapping[int, tuple[float, int]]) -> dict[int, Level]:
        """Remember a step and judge it.

        ``paces``: by slot, seconds per token of a pass, and its tokens; 0 tokens: no matter. At
        another length a pace is known but for the ratio of the two, since a pass takes no less time
        than a shorter one and no more than by the square of their lengths: that is the doubt.
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
        self._longest = float(tokens.max())
        factors = np.ones(len(passes))
        for _ in range(_ROUNDS):
            self._terms = _fitted(tokens / self._longest, seconds / factors)
            ratios = seconds / self.seconds(tokens)
            for slot in np.unique(slots):
                factors[slots == slot] = float(np.median(ratios[slots == slot]))

    def seconds(self, tokens: _Floats | int) -> _Floats:
        """Of a worker whose factor is 1."""
        length = np.asarray(tokens, dtype=np.float64) / self._longest
        fixed, linear, square = self._terms
        return np.asarray(fixed + length * (linear + length * square), dtype=np.float64)


def _fitted(lengths: _Floats, seconds: _Floats) -> _Floats:
    """The terms, none negative, of the least relative squares, whichever of them are 0."""
    rows = np.stack([lengths**power for power in range(_POWERS)], axis=1) / seconds[:, None]
    products, sums = rows.T @ rows, rows.sum(axis=0)
    best, least = np.zeros(_POWERS), np.inf
    for count in range(1, _POWERS + 1):
        for kept in map(list, combinations(range(_POWERS), count)):
            terms = np.zeros(_POWERS)
            terms[kept] = np.linalg.lstsq(products[np.ix_(kept, kept)], sums[kept], rcond=None)[0]
            error = float(terms @ products @ terms - 2 * terms @ sums)
            # Fewer terms where more of them explain nothing.
            if terms.min() >= 0 and error < least - 1e-9:
                best, least = terms, error
    return best


def _unlikeness(tokens: int, others: int) -> float:
    """The ratio of two lengths, the greater over the smaller."""
    return max(tokens / others, others / tokens)
