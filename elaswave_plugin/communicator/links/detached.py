"""Collectives answered locally, as if every member held what this one holds.

A trainer that comes later builds its model so: at the sizes of the launch, beside a
training that it does not disturb. What it holds is replaced by the job's state before it is used.
"""

from elaswave_plugin.communicator.links.buffers import Fold
from elaswave_plugin.communicator.links.operation import Operation, Steps
from elaswave_plugin.errors import ConfigurationError

Views = list[memoryview]


def _copy(target: memoryview, source: memoryview) -> None:
    # Where the parts of the members differ in size, the others' are not known.
    if len(target) == len(source):
        target[:] = source


def _fold(op: Operation, data: memoryview, out: memoryview, fold: Fold) -> None:
    own = memoryview(bytes(data))
    _copy(out, own)
    for _ in range(op.size - 1):
        fold.combine(out, own, out)
    fold.finish(out, op.size)


def _at_once() -> Steps:
    """No transfer to wait for."""
    yield from ()


def all_reduce(op: Operation, data: memoryview, fold: Fold) -> Steps:
    """The fold of as many equal terms as there are members."""
    _fold(op, data, data, fold)
    return _at_once()


def reduce_scatter(op: Operation, out: memoryview, parts: Views, fold: Fold) -> Steps:
    """The own part, folded as by `all_reduce`."""
    _fold(op, parts[op.rank], out, fold)
    return _at_once()


def reduce(op: Operation, data: memoryview, root: int, fold: Fold) -> Steps:
    """At the root, what `all_reduce` gives."""
    if op.rank == root:
        _fold(op, data, data, fold)
    return _at_once()


def broadcast(op: Operation, data: memoryview, root: int) -> Steps:
    """The root's data is the own."""
    return _at_once()


def all_gather(op: Operation, outs: Views, data: memoryview) -> Steps:
    """Answer with the own data for every member."""
    for out in outs:
        _copy(out, data)
    return _at_once()


def all_to_all(op: Operation, outs: Views, ins: Views) -> Steps:
    """Answer as if every member sent what is sent from here to here."""
    for out in outs:
        _copy(out, ins[op.rank])
    return _at_once()


def gather(op: Operation, outs: Views, data: memoryview, root: int) -> Steps:
    """Give the root the own data as every member's."""
    return all_gather(op, outs if op.rank == root else [], data)


def scatter(op: Operation, out: memoryview, ins: Views, root: int) -> Steps:
    """The root's part for this member, where this is the root; else what is there stays."""
    if op.rank == root:
        _copy(out, ins[op.rank])
    return _at_once()


def barrier(op: Operation) -> Steps:
    """Return at once, as if every member were there."""
    return _at_once()


def send(op: Operation, data: memoryview, rank: int) -> Steps:
    """Drop the data: no member receives it."""
    return _at_once()


def receive(op: Operation, data: memoryview, rank: int) -> Steps:
    """Raise ConfigurationError: no worker sends anything."""
    raise ConfigurationError(
        f"{op.describe()}: this worker came later and is building its model beside the "
        "training, where no worker sends to it; receive nothing before the first training step, or "
        "use --elaswave-respawn 0"
    )
