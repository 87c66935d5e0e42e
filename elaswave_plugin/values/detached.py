"""Deep copies of values whose tensors may hang in the graph of a pass."""

import copy
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode

Value = TypeVar("Value")


def detached_copy(value: Value) -> Value:
    """Copy a value in depth, whatever holds its tensors; the copies have no graph.

    torch's own deepcopy refuses a tensor with a graph, and a copied graph would keep the pass's
    memory. Source: ``torch.Tensor.__deepcopy__``.
    """
    with _Detaching():
        return copy.deepcopy(value)


class _Detaching(TorchFunctionMode):
    """Answers for the deepcopy of a tensor while it is active."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Copy a tensor that is no leaf without its graph, and all else as torch does."""
        if func is torch.Tensor.__deepcopy__ and not args[0].is_leaf:
            tensor, memo = args
            memo[id(tensor)] = tensor.detach().clone()
            return memo[id(tensor)]
        return func(*args, **(kwargs or {}))
