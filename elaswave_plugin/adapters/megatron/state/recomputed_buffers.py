"""Buffers in recomputed forward passes: each uses those of its first pass, and changes none.

Otherwise spectral norm would compute gradients of another function than that of the loss, and
running means would count a micro-batch twice. Recomputation runs inside of the backward pass
(torch.utils.checkpoint, megatron/core/tensor_parallel/random.py, ``CheckpointFunction``).
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from elaswave_plugin.errors import ConfigurationError

Buffers = dict[str, torch.Tensor | None]


class RecomputedBuffers:
    """Watches modules that have buffers of their own, one micro-batch at a time."""

    def __init__(self, modules: Iterable[tuple[str, torch.nn.Module]]) -> None:
        self._seen: dict[str, list[Buffers]] = {}
        self._stashed: dict[str, list[Buffers]] = {}
        self._only: frozenset[str] | None = None
        for name, module in modules:
            module.register_forward_pre_hook(partial(self._before, name))
            module.register_forward_hook(partial(self._after, name))

    def watch_only(self, names: Iterable[str]) -> None:
        """Passes change buffers of these modules, and of no others."""
        self._only = frozenset(names)

    def begin(self) -> None:
        """Another micro-batch begins."""
        self._seen.clear()

    def _is_watched(self, name: str, module: torch.nn.Module) -> bool:
        return module.training and (self._only is None or name in self._only)

    def _before(self, name: str, module: torch.nn.Module, inputs: Any) -> None:
        if not self._is_watched(name, module):
            return
        if _recomputes():
            # Other tensors, as the backward pass goes on to use those that it finds here.
            self._stashed.setdefault(name, []).append(dict(module._buffers))
            module._buffers.update(_copies(self._first(name)))
        else:
            self._seen.setdefault(name, []).append(_copies(module._buffers))

    def _after(self, name: str, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if self._is_watched(name, module) and _recomputes():
            module._buffers.update(self._stashed[name].pop())

    def _first(self, name: str) -> Buffers:
        """The buffers before the pass; raises ConfigurationError where there were several."""
        first, *others = self._seen[name]
        for other in others:
            if not all(map(_equal, first.values(), other.values())):
                raise ConfigurationError(
                    f"the module {name!r} changes its buffers, and is called several times for a "
                    "micro-batch and recomputed, so that it is not known with which of them: leave "
                    "it out of activation recomputation"
                )
        return first


def _recomputes() -> bool:
    """Return whether this runs inside of a backward pass."""
    return torch._C._current_graph_task_id() != -1


def _copies(buffers: Buffers) -> Buffers:
    return {name: one if one is None else one.detach().clone() for name, one in buffers.items()}


def _equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)
