"""Updates of partitions on a CPU: the bits of an element do not depend on where it is cut."""

import torch

from elaswave_plugin.adapters.deepspeed.zero.padded_updates import PaddedUpdates
from elaswave_plugin.core.layout.shards import MOMENTS

NUMEL = 10_000


def updated(width: int, *, pads: bool, steps: int = 3) -> list[torch.Tensor]:
    """Masters and moments after some steps of Adam, in so many partitions."""
    dice = torch.Generator().manual_seed(5)
    start = torch.randn(NUMEL, generator=dice)
    size = -(-NUMEL // width)
    parts = [torch.nn.Parameter(one.clone()) for one in start.split(size)]
    optimizers = [torch.optim.AdamW([one], 1e-3, fused=True) for one in parts]
    for optimizer in optimizers if pads else ():
        PaddedUpdates(optimizer)
    for _ in range(steps):
        gradients = torch.randn(NUMEL, generator=dice).split(size)
        for one, gradient, optimizer in zip(parts, gradients, optimizers, strict=True):
            data, one.grad = one.data_ptr(), gradient.clone()
            optimizer.step()
            assert (one.data_ptr(), one.shape, one.grad.shape) == (data, *2 * (gradient.shape,))
    states = [{"master": one, **optimizers[at].state[one]} for at, one in enumerate(parts)]
    return [torch.cat([one[name].detach() for one in states]) for name in ("master", *MOMENTS)]


def test_bits_are_those_of_any_cut() -> None:
    whole = updated(1, pads=True)
    for width in (3, 7, 13):
        cut = updated(width, pads=True)
        assert all(torch.equal(one, other) for one, other in zip(whole, cut, strict=True))


def test_without_zeros_behind_them_they_are_not() -> None:
    """Negative control: else the zeros are for nothing, and go."""
    whole = updated(1, pads=False)
    differ = [
        not torch.equal(one, other)
        for width in (3, 7, 13)
        for one, other in zip(whole, updated(width, pads=False), strict=True)
    ]
    assert any(differ)
