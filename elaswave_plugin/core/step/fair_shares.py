"""Equal pieces of work for workers of unequal speed, so that the last of them is done early.

Each piece goes to the worker that would finish it first, which is optimal for equal pieces. Every
worker gets a piece: a worker with nothing to do shows no pace, and would count as slow forever.

>>> fair_counts(8, [1.0, 1.0])
[4, 4]
>>> fair_counts(8, [1.0, 3.0])
[6, 2]
>>> fair_counts(8, [1.0, 1.0, 1.0], most=[2, 8, 8])
[2, 3, 3]
>>> slowest_seconds(8, [1.0, 3.0]), round(fair_width([1.0, 3.0]), 2)
(6.0, 1.33)
"""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush


class FairDeal:
    """A deal of pieces one by one; ``slowness``: seconds of a piece by worker, 1 is usual.

    ``most``: pieces that each may have, from 1 on.
    """

    def __init__(self, slowness: Sequence[float], most: Sequence[int] = ()) -> None:
        self._slowness, self._most = slowness, most
        # Workers without any piece come first; then by the time of completion, then by index.
        self._next = [(False, seconds, index, 1) for index, seconds in enumerate(slowness)]
        heapify(self._next)

    def take(self) -> int:
        """Give the next piece to a worker; return its position."""
        _, _, index, count = heappop(self._next)
        if not self._most or count < self._most[index]:
            heappush(self._next, (True, (count + 1) * self._slowness[index], index, count + 1))
        return index


def fair_counts(total: int, slowness: Sequence[float], most: Sequence[int] = ()) -> list[int]:
    """Return the number of ``total`` pieces that each worker gets.

    ``most``: what each may have; all of them together at least ``total``.
    """
    deal, counts = FairDeal(slowness, most), [0] * len(slowness)
    for _ in range(total):
        counts[deal.take()] += 1
    return counts


def slowest_seconds(total: int, slowness: Sequence[float]) -> float:
    """Return when the last worker has done its share of ``total``, in pieces of a usual worker."""
    counts = fair_counts(total, slowness)
    return max(count * each for count, each in zip(counts, slowness, strict=True))


def fair_width(slowness: Sequence[float]) -> float:
    """Return how many usual workers would be as fast, if pieces were arbitrarily small."""
    return sum(1 / each for each in slowness)
