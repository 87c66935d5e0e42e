"""The norm of the gradients: collective sums whose bits do not depend on the group of workers."""

import math
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist

# Elements at once: on a CPU few enough that temporaries stay in the cache, elsewhere enough that
# there are few kernels. Sums of 2^22 parts would still be exact.
_CHUNK_CPU, _CHUNK = 1 << 16, 1 << 20


def canonical_norm(gradients: Iterable[torch.Tensor], group: dist.ProcessGroup) -> float:
    """L2 norm over all tensors of all ranks of ``group``, equal for any cut, order or membership.

    Every squared element, in units of the common exponent, is split into two 31-bit integer parts;
    sums of integers have no order. Exact to 2^-62 of the largest square, for up to 2^32 elements in
    total. A non-finite largest element is returned as it is. Source: ``core/step/sum_order.py``.
    """
    gradients = [gradient.detach().reshape(-1) for gradient in gradients if gradient.numel()]
    ends = [torch.stack(torch.aminmax(chunk)).double() for chunk in _chunks(gradients)]
    largest = torch.stack(ends).abs().amax().view(1).cpu() if ends else torch.zeros(1).double()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    peak = float(largest)
    if not 0.0 < peak < math.inf:
        return peak
    exponent = math.frexp(peak)[1]
    sums = _units(_chunks(gradients), exponent)
    dist.all_reduce(sums, group=group)
    total = (int(sums[0]) << 31) + int(sums[1])
    return math.sqrt(float(total)) * 2.0 ** (exponent - 31)


def _chunks(gradients: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Cut long gradients and join short ones, each of which would cost kernels of its own."""
    joined: list[torch.Tensor] = []
    room = 0
    for gradient in gradients:
        size = _CHUNK_CPU if gradient.device.type == "cpu" else _CHUNK
        for piece in torch.split(gradient, size):
            if joined and piece.numel() > room:
                yield torch.cat(joined) if len(joined) > 1 else joined[0]
                joined = []
            room = (room if joined else size) - piece.numel()
            joined.append(piece)
    if joined:
        yield torch.cat(joined)


def _units(chunks: Iterable[torch.Tensor], exponent: int) -> torch.Tensor:
    """Sum the upper and the lower parts of the squares: int64 of shape [2], on the host.

    What is added to a double and taken away again rounds it to a multiple of a power of two.
    """
    coarse, fine = (math.ldexp(1.5, 52 - bits + 2 * exponent) for bits in (31, 62))
    space, sums = torch.empty(2, 0, dtype=torch.float64), []
    for chunk in chunks:
        if space.shape[1] < chunk.numel():
            space = torch.empty(2, chunk.numel(), dtype=torch.float64, device=chunk.device)
        square, upper = space[:, : chunk.numel()]
        square.copy_(chunk).mul_(square)
        torch.add(square, coarse, out=upper).sub_(coarse)
        square.sub_(upper).add_(fine).sub_(fine)
        sums += [upper.sum(), square.sum()]
    if not sums:
        return torch.zeros(2, dtype=torch.int64)
    units = [math.ldexp(1.0, bits - 2 * exponent) for bits in (31, 62)]
    counts = torch.stack(sums).view(-1, 2).cpu() * torch.tensor(units, dtype=torch.float64)
    return counts.long().sum(0)
