"""Sums whose terms come from members of a group one after the other, each as soon as it is ready.

Terms travel over the links in small parts, whatever carries the group's collectives. A part that
comes in its turn is added while the caches hold it, by whichever thread drives the links; one that
comes early waits in memory of the links. So a sum takes its own memory, and that of one part.
"""

from collections.abc import Sequence
from typing import Any

import torch

from elaswave_plugin.communicator.groups.group_core import Body, ElasticWork, GroupCore
from elaswave_plugin.communicator.links.buffers import Fold, flat_bytes, make_fold
from elaswave_plugin.communicator.links.operation import Operation, Steps

PART_BYTES = 512 << 10

# The rank that sends a term, and the tag that it sends it by.
Term = tuple[int, int]


def send_term(tensor: torch.Tensor, group: Any, *, rank: int, tag: int) -> ElasticWork:
    """Send a term to the rank that adds it up; ``tensor`` may change once the work is done."""
    data = flat_bytes(tensor.detach().to("cpu"))

    def body(op: Operation) -> Steps:
        for number, part in enumerate(_parts(data)):
            op.send(rank, part, part=number)
        yield from ()

    return _started("send", body, group, tag)


def add_terms(total: torch.Tensor, group: Any, *, terms: Sequence[Term]) -> ElasticWork:
    """Have the sum of the terms, added in their order, in ``total`` once the work is done.

    ``total``: contiguous host memory of the terms' shape and dtype, its values overwritten.
    """
    fold, out = make_fold("SUM", total.dtype), flat_bytes(total)
    return _started("recv", lambda op: _add_up(op, out, terms, fold), group, terms[0][1])


def _add_up(op: Operation, out: memoryview, terms: Sequence[Term], fold: Fold) -> Steps:
    parts = _parts(out)
    space = op.borrow(max(map(len, parts), default=0))
    for order, (rank, tag) in enumerate(terms):
        for number, part in enumerate(parts):
            into = space[: len(part)] if order else part
            yield op.receive(rank, into, part=number, tag=tag)
            if order:
                fold.combine(part, into, part)


def _parts(data: memoryview) -> list[memoryview]:
    return [data[start : start + PART_BYTES] for start in range(0, len(data), PART_BYTES)]


def _started(name: str, body: Body, group: Any, tag: int) -> ElasticWork:
    return ElasticWork(group._links, [GroupCore._start(group, name, body, [], tag=tag)])
