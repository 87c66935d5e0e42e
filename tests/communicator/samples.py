"""The tensors of four ranks, the same wherever they are made, and what reductions make of them."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.distributed import ReduceOp

WORLD = 4
FOLDS: dict[str, tuple[Any, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = {
    "SUM": (ReduceOp.SUM, torch.add),
    "PRODUCT": (ReduceOp.PRODUCT, torch.mul),
    "MAX": (ReduceOp.MAX, torch.maximum),
    "MIN": (ReduceOp.MIN, torch.minimum),
}


def sample(rank: int, numel: int, dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    """The tensor of a rank; the caller's own."""
    return made(rank, numel, dtype, salt).clone()


@cache
def made(rank: int, numel: int, dtype: torch.dtype, salt: int) -> torch.Tensor:
    """The tensor of a rank, made once: nobody may write to it."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    if dtype.is_floating_point:
        values = torch.randn(numel, generator=generator, dtype=torch.float64)
        return (values * 10.0 ** torch.randint(-3, 4, (numel,), generator=generator)).to(dtype)
    top = 2 if dtype is torch.bool else 50
    return torch.randint(0, top, (numel,), generator=generator).to(dtype)


@cache
def folded(numel: int, dtype: torch.dtype, name: str, salt: int = 0) -> torch.Tensor:
    """((x0 op x1) op x2) op x3 in the tensors' dtype; nobody may write to it."""
    total = made(0, numel, dtype, salt)
    for rank in range(1, WORLD):
        total = FOLDS[name][1](total, made(rank, numel, dtype, salt))
    return total
