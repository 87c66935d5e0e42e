"""The norm of the gradients: collective sums whose bits do not depend on the group of workers."""

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist

# Chunked so that the double and integer temporaries stay in cache.
_CHUNK = 16384


def canonical_norm(gradients: Iterable[torch.Tensor], group: dist.ProcessGroup) -> float:
    """L2 norm over all tensors of all ranks of ``group``, equal for any cut, order or membership.

    Every squared element, scaled by the common exponent, is split into two 31-bit integer parts;
    integer sums have no order. Exact to 2^-62 of the largest square, for up to 2^32 elements in
    total. A non-finite largest element is returned as it is. Source: ``core/step/sum_order.py``.
    """
    gradients = [gradient.reshape(-1) for gradient in gradients if gradient.numel()]
    largest = torch.zeros(1, dtype=torch.float64)
    for gradient in gradients:
        largest = torch.maximum(largest, gradient.abs().max().double().cpu())
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    peak = float(largest)
    if not 0.0 < peak < math.inf:
        return peak
    exponent = math.frexp(peak)[1]
    high = low = 0
    for gradient in gradients:
        for chunk in torch.split(gradient, _CHUNK):
            square = (chunk.double() * 2.0**-exponent).square_()
            upper = (square * 2.0**31).round_()
            high += int(upper.long().sum())
            low += int((square - upper * 2.0**-31).mul_(2.0**62).round_().long().sum())
    sums = torch.tensor([high, low], dtype=torch.int64)
    dist.all_reduce(sums, group=group)
    total = (int(sums[0]) << 31) + int(sums[1])
    return math.sqrt(float(total)) * 2.0 ** (exponent - 31)
