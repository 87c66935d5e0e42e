"""Equal pieces of work for workers of unequal speed, so that the last of them is done early.

Each piece goes to whoever would be done with it first, which is optimal for equal pieces. Nobody is
left without: a worker with nothing to do shows no pace, and would stay slow for ever.

>>> fair_counts(8, [1.0, 1.0])
[4, 4]
>>> fair_counts(8, [1.0, 3.0])
[6, 2]
>>> slowest_seconds(8, [1.0, 3.0]), round(fair_width([1.0, 3.0]), 2)
(6.0, 1.33)
"""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush


class FairDeal:
    """Deals pieces one by one; ``slowness``: seconds of a piece by worker, 1 is usual."""

    def __init__(self, slowness: Sequence[float]) -> None:
        self._slowness = slowness
        # Those without any come first; then by when they would be done, then in their order.
        self._next = [(False, seconds, index, 1) for index, seconds in enumerate(slowness)]
        heapify(self._next)

    def take(self) -> int:
        """The worker that gets the next piece, by its position."""
        _, _, index, count = heappop(self._next)
        heappush(self._next, (True, (count + 1) * self._slowness[index], index, count + 1))
        return index


def fair_counts(total: int, slowness: Sequence[float]) -> list[int]:
    """How many of ``total`` pieces each worker gets."""
    deal, counts = FairDeal(slowness), [0] * len(slowness)
    for _ in range(total):
        counts[deal.take()] += 1
    return counts


def slowest_seconds(total: int, slowness: Sequence[float]) -> float:
    """When the last worker is done with its share of ``total``, in pieces of a usual worker."""
    counts = fair_counts(total, slowness)
    return max(count * each for count, each in zip(counts, slowness, strict=True))


def fair_width(slowness: Sequence[float]) -> float:
    """As many usual workers would be as fast, were pieces as small as one likes."""
    return sum(1 / each for each in slowness)
