"""Binomial trees over the ranks of a group: few connections a worker, few messages in all.

Relative to the root, the parent of rank r is r without its lowest bit, and the subtree of r holds
the ranks from r up to r plus that bit.
"""

from collections.abc import Iterator

from elaswave_plugin.communicator.links.operation import Operation, Steps

TREE_ABOVE = 8
"""Groups with more members than this use a tree for small data, and for broadcasts."""

_UP, _DOWN = 10, 11
# Numbers of the parts of an operation, apart from those in `algorithms.py`.


def equal_parts(view: memoryview, count: int) -> list[memoryview]:
    """Cut into `count` parts of equal length."""
    length = len(view) // count
    return [view[i * length : (i + 1) * length] for i in range(count)]


def gather_up(op: Operation, everything: memoryview, data: memoryview) -> Steps:
    """Rank 0's `everything` becomes the data of all ranks in order, which all have equal lengths.

    In the memory of the other ranks the part of their own subtree is filled.
    """
    length = len(data)
    everything[op.rank * length : (op.rank + 1) * length] = data
    # The nearest child has the smallest subtree: it is ready first.
    arriving = [
        op.receive(child, everything[child * length : end * length], part=_UP)
        for child, end in _children(op.rank, op.size)
    ]
    yield from arriving
    if op.rank:
        end = min(op.rank + _lowest_bit(op.rank), op.size)
        own = everything[op.rank * length : end * length]
        yield op.send(op.rank - _lowest_bit(op.rank), own, part=_UP)


def send_down(op: Operation, data: memoryview, root: int = 0) -> Steps:
    """Make all members' `data` the root's."""
    place = (op.rank - root) % op.size
    if place:
        yield op.receive((place - _lowest_bit(place) + root) % op.size, data, part=_DOWN)
    # The farthest child has the largest subtree: it is served first.
    for child, _ in reversed(list(_children(place, op.size))):
        op.send((child + root) % op.size, data, part=_DOWN)


def _lowest_bit(rank: int) -> int:
    return rank & -rank


def _children(rank: int, size: int) -> Iterator[tuple[int, int]]:
    """(child, end of its subtree), nearest first."""
    bit = 1
    while (rank == 0 or bit < _lowest_bit(rank)) and rank + bit < size:
        yield rank + bit, min(rank + 2 * bit, size)
        bit *= 2
