"""Optimizer state that a script loads before the state is resharded, kept over the resharding."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from elaswave_plugin.adapters.megatron.state import adam
from elaswave_plugin.core.layout.shards import MOMENTS

_MASTER = "master"


class LoadedState:
    """One worker's part of it, by parameter: collective over WORLD, as all its methods are."""

    def __init__(self, optimizer: DistributedOptimizer) -> None:
        self._optimizer = optimizer
        inner = optimizer.optimizer
        count = torch.tensor(adam.applied_steps(inner) if inner.state else -1)
        dist.all_reduce(count, op=dist.ReduceOp.MAX)
        self._applied_steps = int(count)
        self._pieces: dict[torch.nn.Parameter, tuple[int, dict[str, torch.Tensor]]] = {}
        for param in optimizer.model_param_group_index_map if inner.state else ():
            start, parts = self._own(param)
            self._pieces[param] = start, {name: one.clone() for name, one in parts.items()}
        inner.state.clear()

    def _own(self, param: torch.nn.Parameter) -> tuple[int, dict[str, torch.Tensor]]:
        """Return where the own piece of a parameter starts, and its parts, flat."""
        outer = self._optimizer
        group, order = outer.model_param_group_index_map[param]
        main = outer.optimizer.param_groups[group]["params"][order]
        state = outer.optimizer.state[main]
        parts = {name: state[name].view(-1) for name in MOMENTS if name in state}
        parts[_MASTER] = main.detach().view(-1)
        return outer._get_model_param_range_map(param)["param"].start, parts

    @torch.no_grad()
    def install(self, params: Sequence[torch.nn.Parameter]) -> None:
        """Put it where the pieces of ``params``, all that are trained, are now."""
        if self._applied_steps < 0:
            return
        outer = self._optimizer
        for param in params:
            whole = self._whole(param)
            if param in outer.model_param_group_index_map:
                start, parts = self._own(param)
                for name, one in parts.items():
                    one.copy_(whole[name][start : start + one.numel()])
        adam.set_applied_steps(outer.optimizer, self._applied_steps)
        self._pieces.clear()

    def _whole(self, param: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        """All of a parameter's state, of which each worker had a piece."""
        names = (*MOMENTS, _MASTER)
        found = torch.zeros(len(names), param.numel(), device=param.device)
        start, parts = self._pieces.get(param, (0, {}))
        for row, name in zip(found, names, strict=True):
            if name in parts:
                row[start : start + parts[name].numel()] = parts[name]
        # Each number has one contributor, so that the sum only adds zeros to it.
        dist.all_reduce(found, group=self._optimizer.data_parallel_group)
        return dict(zip(names, found, strict=True))
