"""Updates of partitions on a CPU, whose bits do not depend on where a partition ends.

A kernel for the CPU computes the last elements of a tensor, fewer than it takes at once, by other
instructions, which round otherwise. So the optimizer is given partitions with some zeros behind
them. On other devices all elements are computed alike.
"""

from typing import Any

import torch
from torch.nn.functional import pad

# A multiple of what any kernel takes at once.
_AT_ONCE = 64


class PaddedUpdates:
    """The partitions of one optimizer, padded while it steps."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        # Of each padded one: the tensor, its gradient, its state.
        self._cut: list[tuple[Any, torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]] = []
        inner.register_step_pre_hook(lambda *given: self._pad())
        inner.register_step_post_hook(lambda *given: self._unpad())

    @torch.no_grad()
    def _pad(self) -> None:
        self._cut = []
        for group in self._inner.param_groups:
            for one in group["params"]:
                missing = -one.numel() % _AT_ONCE
                if one.grad is None or one.device.type != "cpu" or not missing:
                    continue
                state = self._inner.state[one]
                moments = {
                    name: value
                    for name, value in state.items()
                    if torch.is_tensor(value) and value.shape == one.shape
                }
                self._cut.append((one, one.data, one.grad, moments))
                grad, one.grad = one.grad, None
                one.data = pad(one.data, (0, missing))
                one.grad = pad(grad, (0, missing))
                state.update({name: pad(value, (0, missing)) for name, value in moments.items()})

    @torch.no_grad()
    def _unpad(self) -> None:
        for one, data, grad, moments in self._cut:
            state = self._inner.state[one]
            for name, value in state.items():
                if torch.is_tensor(value) and value.shape == one.shape:
                    # The first step has made it.
                    own = moments.setdefault(name, torch.empty_like(data))
                    own.copy_(value[: own.numel()])
            state.update(moments)
            data.copy_(one.data[: data.numel()])
            one.grad = None
            one.data, one.grad = data, grad
        self._cut = []
