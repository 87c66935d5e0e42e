"""The backward pass of a module is announced for any output, or nothing is."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")

from elaswave_plugin.adapters.deepspeed.engine.framework import _announce_backward


@dataclass
class Output:
    """A class that a module may return."""

    hidden: torch.Tensor


TRAINED = torch.ones(2, requires_grad=True)


@pytest.mark.parametrize(
    "made",
    [
        lambda hidden: hidden,
        lambda hidden: (None, hidden),
        lambda hidden: [torch.ones(2), (hidden,)],
        lambda hidden: OrderedDict(loss=None, logits=hidden),
        Output,
    ],
)
def test_the_backward_of_an_output_is_announced(made: Any) -> None:
    announced: list[str] = []
    hidden = TRAINED * 2
    _announce_backward(announced.append)(made(hidden))
    hidden.sum().backward()
    assert announced == ["backward"]


@pytest.mark.parametrize("output", [None, 3, "text", object(), {}, torch.ones(2)])
def test_an_output_without_gradients_announces_nothing(output: object) -> None:
    announced: list[str] = []
    _announce_backward(announced.append)(output)
    assert not announced
