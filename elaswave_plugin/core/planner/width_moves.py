"""The live workers that change stage: from the widest stage to the narrowest, until all are level.

Where losses are concentrated in one stage no move of layers helps enough; a worker that changes
stage does. Every prefix of the moves is a candidate with layers of its own.

>>> for moves, widths in width_candidates((3, 12, 12, 12)):
...     print(len(moves), *widths)
0 3 12 12 12
2 5 12 11 11
4 7 11 11 10
6 9 10 10 10
"""

from collections.abc import Sequence
from typing import NamedTuple

MOST_CANDIDATES = 4


class WidthMove(NamedTuple):
    """One replica leaves stage ``source`` and works for stage ``target``."""

    source: int
    target: int


def width_moves(widths: Sequence[int]) -> tuple[WidthMove, ...]:
    """One worker at a time from the widest to the narrowest stage until they differ by at most 1.

    Ties go to the lowest target and the highest source, so moves stay far from each other.
    """
    now = list(widths)
    moves = []
    while max(now) - min(now) > 1:
        source = len(now) - 1 - now[::-1].index(max(now))
        target = now.index(min(now))
        now[source] -= 1
        now[target] += 1
        moves.append(WidthMove(source, target))
    return tuple(moves)


def width_candidates(
    widths: Sequence[int], *, most: int = MOST_CANDIDATES
) -> tuple[tuple[tuple[WidthMove, ...], tuple[int, ...]], ...]:
    """(moves, widths after them) for at most ``most`` prefixes, none and all included."""
    moves = width_moves(widths)
    steps = min(most - 1, len(moves))
    counts = [round(index * len(moves) / steps) for index in range(1, steps + 1)]
    found = []
    for count in (0, *counts):
        now = list(widths)
        for source, target in moves[:count]:
            now[source] -= 1
            now[target] += 1
        found.append((moves[:count], tuple(now)))
    return tuple(found)
