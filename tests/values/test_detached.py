"""Copies of values with tensors that have a graph, wherever these are."""

import copy
from collections import defaultdict
from dataclasses import dataclass

import pytest
import torch

from elaswave_plugin.values.detached import detached_copy


@dataclass
class Holder:
    """An object of a script's."""

    loss: torch.Tensor


def test_a_copy_has_no_graph_and_is_otherwise_as_deepcopy_makes_it() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    loss, view = (weight * 2).sum(), (weight * 2)[1:]
    value = defaultdict(list, nested=[loss, (view, Holder(loss))], weight=weight, count=3)
    with pytest.raises(RuntimeError, match="deepcopy protocol"):
        copy.deepcopy(value)
    copied = detached_copy(value)
    first, (second, holder) = copied["nested"]
    assert first is not loss and not first.requires_grad and first.item() == 6.0
    assert holder.loss is first
    assert not second.requires_grad and torch.equal(second, view)
    assert isinstance(copied["weight"], torch.nn.Parameter) and copied["weight"] is not weight
    assert copied["count"] == 3 and copied["new"] == []
    assert loss.requires_grad
