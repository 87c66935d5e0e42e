"""The collectives, each a generator that posts transfers and yields what it waits for.

Every reduction is a left-to-right fold in rank order, so a result depends on the members and their
data only, not on the way that the data took. Three ways, by size:

- small, few members: every member sends everything to every other, in one round;
- small, many members: to the first rank and back over a tree, so that a worker of a large group
  needs connections to the logarithm of its members;
- large: each piece to its owner and back, which is least work for the busiest link.
  An all-reduce does it chunk by chunk.
"""

from collections.abc import Iterator

from elaswave_plugin.communicator.links.buffers import Fold, pieces
from elaswave_plugin.communicator.links.operation import ANY_SOURCE, Operation, Receive, Steps

# Relative to the root, the parent of rank r is r without its lowest bit, and the subtree of r holds
# the ranks from r up to r plus that bit: few connections a worker, few messages in all.
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


_EXCHANGE_BYTES = 64 << 10
# Up to this, what arrives at one member is so little that rounds cost more than bytes.
_CHUNK_BYTES = 512 << 10
_AHEAD = 2
# Larger chunks, or more of them, fall out of the cache before they are folded; smaller ones cost
# more calls than they save.

Views = list[memoryview]


def _is_small(op: Operation, length: int) -> bool:
    return length * (op.size - 1) <= _EXCHANGE_BYTES


def _copy(target: memoryview, source: memoryview) -> None:
    target[:] = source


def _fold_in_order(
    op: Operation, own: memoryview, received: dict[int, Receive], out: memoryview, fold: Fold
) -> Steps:
    """out = ((x0 + x1) + x2) + ...; `out` may be the memory of `own`."""
    total = own
    for rank in range(op.size):
        if rank != op.rank and not received[rank].done:
            yield received[rank]
        term = own if rank == op.rank else received[rank].view
        if rank == 0:
            total = term
            continue
        # Received memory is ours to overwrite; `own` is written only when nobody needs it any more.
        last = rank == op.size - 1
        into = out if last or op.rank == 0 else received[0].view
        fold.combine(total, term, into)
        total = into
    if op.size == 1 and len(out):
        _copy(out, own)
    fold.finish(out, op.size)


def all_reduce(op: Operation, data: memoryview, fold: Fold) -> Steps:
    """Every member's `data` becomes the fold of all."""
    if _is_small(op, len(data)):
        if op.size > TREE_ABOVE:
            yield from _all_reduce_tree(op, data, fold)
        else:
            yield from _all_reduce_exchange(op, data, fold)
        return
    yield from _all_reduce_chunks(op, data, fold)


def _all_reduce_chunks(op: Operation, data: memoryview, fold: Fold) -> Steps:
    """Each piece to its owner and back, chunk by chunk, a few of them under way at a time.

    A chunk is folded and sent on while it is in the cache.  The owner's result says that it has
    taken in what it was sent, and has asked for what comes next: hardly anything arrives unasked,
    which would cost a copy.
    """
    whole = len(data)
    parts = pieces(data, op.size, fold.item_bytes)
    count = -(-max(map(len, parts)) // _CHUNK_BYTES)
    chunks = [pieces(part, count, fold.item_bytes) for part in parts]
    own = chunks[op.rank]
    longest = max(map(len, own))
    space = [{r: op.borrow(longest) for r in op.others()} for _ in range(min(_AHEAD, count))]
    terms: list[dict[int, Receive]] = []
    results: list[list[Receive]] = []

    def ask(number: int) -> None:
        into, size = space[number % len(space)], len(own[number])
        terms.append({r: op.receive(r, into[r][:size], whole=whole) for r in op.others()})

    def offer(number: int) -> None:
        # It is overwritten by its result only when the owner has all of it.
        results.append([op.receive(r, chunks[r][number], part=1, whole=whole) for r in op.others()])
        for rank in op.others():
            op.send(rank, chunks[rank][number], whole=whole)

    for number in range(len(space)):
        ask(number)
    offer(0)
    for number, chunk in enumerate(own):
        yield from _fold_in_order(op, chunk, terms[number], chunk, fold)
        if len(terms) < count:
            ask(len(terms))
        for rank in op.others():
            op.send(rank, chunk, part=1, whole=whole)
        yield from results[number]
        while len(results) < len(terms):
            offer(len(results))


def _all_reduce_exchange(op: Operation, data: memoryview, fold: Fold) -> Steps:
    size = len(data)
    sends = [op.send(r, data) for r in op.others()]
    received = {r: op.receive(r, op.borrow(size)) for r in op.others()}
    yield from sends
    yield from _fold_in_order(op, data, received, data, fold)


def _all_reduce_tree(op: Operation, data: memoryview, fold: Fold) -> Steps:
    everything = op.borrow(len(data) * op.size)
    terms = equal_parts(everything, op.size)
    yield from gather_up(op, everything, data)
    if op.rank == 0:
        _copy(data, terms[0])
        for term in terms[1:]:
            fold.combine(data, term, data)
        fold.finish(data, op.size)
    yield from send_down(op, data)


def _reduce_pieces(op: Operation, parts: Views, fold: Fold, out: memoryview) -> Steps:
    """Send piece j of every member to rank j, which folds it into its `out`."""
    whole = sum(map(len, parts))
    own = parts[op.rank]
    for rank in op.others():
        op.send(rank, parts[rank], whole=whole)
    received = {r: op.receive(r, op.borrow(len(own)), whole=whole) for r in op.others()}
    yield from _fold_in_order(op, own, received, out, fold)


def reduce_scatter(op: Operation, out: memoryview, parts: Views, fold: Fold) -> Steps:
    """Make `out` the fold of all members' pieces of our rank."""
    yield from _reduce_pieces(op, parts, fold, out)


def reduce(op: Operation, data: memoryview, root: int, fold: Fold) -> Steps:
    """The root's `data` becomes the fold of all; the others' is left as it was."""
    parts = pieces(data, op.size, fold.item_bytes)
    own = parts[op.rank]
    if op.rank != root:
        out = op.borrow(len(own))
        yield from _reduce_pieces(op, parts, fold, out)
        op.send(root, out, part=1, whole=len(data))
        return
    yield from _reduce_pieces(op, parts, fold, own)
    yield from [op.receive(r, parts[r], part=1, whole=len(data)) for r in op.others()]


def broadcast(op: Operation, data: memoryview, root: int) -> Steps:
    """Make all members' `data` the root's."""
    if op.size > TREE_ABOVE:
        yield from send_down(op, data, root)
        return
    if op.rank != root:
        yield op.receive(root, data)
        return
    for rank in op.others():
        op.send(rank, data)


def all_gather(op: Operation, outs: Views, data: memoryview) -> Steps:
    """outs[j] becomes the data of rank j; `data` may lie in `outs` already."""
    even = all(len(out) == len(data) for out in outs)
    if op.size > TREE_ABOVE and even and _is_small(op, len(data)):
        everything = op.borrow(len(data) * op.size)
        yield from gather_up(op, everything, data)
        yield from send_down(op, everything)
        for out, part in zip(outs, equal_parts(everything, op.size), strict=True):
            _copy(out, part)
        return
    receives = [op.receive(r, outs[r]) for r in op.others()]
    for rank in op.others():
        op.send(rank, data)
    _copy(outs[op.rank], data)
    yield from receives


def all_to_all(op: Operation, outs: Views, ins: Views) -> Steps:
    """outs[j] becomes ins[our rank] of rank j."""
    receives = [op.receive(r, outs[r]) for r in op.others()]
    for rank in op.others():
        op.send(rank, ins[rank])
    _copy(outs[op.rank], ins[op.rank])
    yield from receives


def gather(op: Operation, outs: Views, data: memoryview, root: int) -> Steps:
    """The root's outs[j] becomes the data of rank j."""
    if op.rank != root:
        op.send(root, data)
        return
    receives = [op.receive(r, outs[r]) for r in op.others()]
    _copy(outs[root], data)
    yield from receives


def scatter(op: Operation, out: memoryview, ins: Views, root: int) -> Steps:
    """`out` becomes the root's ins[our rank]."""
    if op.rank != root:
        yield op.receive(root, out)
        return
    for rank in op.others():
        op.send(rank, ins[rank])
    _copy(out, ins[root])


def barrier(op: Operation) -> Steps:
    """Leave once all members have come (log2 of the size rounds)."""
    step, part = 1, 0
    while step < op.size:
        arrived = op.receive((op.rank - step) % op.size, memoryview(bytearray()), part=part)
        op.send((op.rank + step) % op.size, memoryview(b""), part=part)
        yield arrived
        step, part = step * 2, part + 1


def send(op: Operation, data: memoryview, rank: int) -> Steps:
    """Send to one member under the operation's tag."""
    yield op.send(rank, data)


def receive(op: Operation, data: memoryview, rank: int) -> Steps:
    """Receive from one member, or ANY_SOURCE, under the operation's tag."""
    arrived = op.receive(rank, data)
    yield arrived
    op.source_rank = op.group.members.index(arrived.peer) if rank == ANY_SOURCE else rank
