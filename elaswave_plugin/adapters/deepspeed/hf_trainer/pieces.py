"""The micro-batches and passes that shares of a generation are cut into, of any size."""

from collections.abc import Sequence
from itertools import accumulate, pairwise


def sizes(start: int, stop: int, pieces: int) -> list[int]:
    """Return how many of the samples [start, stop) of all workers each of ``pieces`` gets.

    They are dealt out one by one, so that a piece of all workers is as large as any other.

    >>> [sizes(start, stop, 2) for start, stop in ((0, 3), (3, 6), (6, 8))]
    [[2, 1], [1, 2], [1, 1]]
    """
    return [len(range(start + (piece - start) % pieces, stop, pieces)) for piece in range(pieces)]


def intervals(counts: Sequence[int]) -> list[tuple[int, int]]:
    """Return where each piece, of a number of samples, begins and ends in a worker's share.

    >>> intervals([1, 2])
    [(0, 1), (1, 3)]
    """
    return [*pairwise(accumulate(counts, initial=0))]


def weight(piece: int, start: int, stop: int, *, pieces: int) -> float:
    """Return the samples of a piece by the mean of all pieces of a share.

    >>> weight(0, 0, 5, pieces=2), weight(1, 0, 5, pieces=2)
    (1.2, 0.8)
    """
    return sizes(start, stop, pieces)[piece] * pieces / (stop - start)


def batch_size(mine: int, everyone: Sequence[int], *, passes: int) -> int:
    """Return the samples of a pass, so that all workers make as many, and at most ``passes``.

    >>> [batch_size(mine, (6, 5, 5), passes=4) for mine in (6, 5)]
    [2, 2]
    >>> [batch_size(mine, (5, 4), passes=4) for mine in (5, 4)]
    [3, 2]
    """

    def made(size: int, most: int) -> int:
        return -(-size // -(-size // most))

    alike = (
        most for most in range(passes, 0, -1) if len({made(one, most) for one in everyone}) == 1
    )
    return -(-mine // next(alike))
