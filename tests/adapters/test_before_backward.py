"""A change of the view ends a backward pass between two layers."""

import pytest
import torch

from elaswave_plugin.adapters.megatron.framework import _before_backward
from elaswave_plugin.errors import EpochChanged


def model_of(layers: int) -> torch.nn.Sequential:
    return torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(layers)))


def test_a_backward_pass_ends_between_two_layers() -> None:
    model, asked = model_of(4), list[int]()

    def check() -> None:
        asked.append(len(asked))
        if len(asked) == 2:
            raise EpochChanged(2, "worker 1 exited")

    for layer in model:
        layer.register_forward_hook(_before_backward(check))
    with pytest.raises(EpochChanged):
        model(torch.ones(2, 4)).sum().backward()
    # The last layer's is done; the one in front of it is as it was.
    assert [layer.weight.grad is not None for layer in model] == [False, False, False, True]


def test_what_needs_no_gradient_is_left_alone() -> None:
    model = model_of(2).requires_grad_(False)
    for layer in model:
        layer.register_forward_hook(_before_backward(lambda: pytest.fail("nothing flows back")))
    with torch.no_grad():
        model(torch.ones(2, 4))
