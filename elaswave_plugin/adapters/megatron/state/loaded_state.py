"""Optimizer state that a script loads before the state is resharded, kept over the resharding."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from elaswave_plugin.adapters.megatron.state import adam, whole_state


class LoadedState:
    """One worker's part of it, by parameter: collective over WORLD, as all its methods are."""

    def __init__(self, optimizer: DistributedOptimizer) -> None:
        self._optimizer = optimizer
        inner = optimizer.optimizer
        count = torch.tensor(adam.applied_steps(inner) if inner.state else -1)
        dist.all_reduce(count, op=dist.ReduceOp.MAX)
        self._applied_steps = int(count)
        self._pieces: dict[torch.nn.Parameter, whole_state.Piece] = {}
        for param in optimizer.model_param_group_index_map if inner.state else ():
            start, parts = whole_state.own_piece(optimizer, param)
            self._pieces[param] = start, {name: one.clone() for name, one in parts.items()}
        inner.state.clear()

    def install(self, params: Sequence[torch.nn.Parameter]) -> None:
        """Put it where the pieces of ``params``, all that are trained, are now."""
        if self._applied_steps < 0:
            return
        for param in params:
            piece = self._pieces.pop(param, (0, {}))
            whole = whole_state.whole_of(self._optimizer, param, piece)
            whole_state.install(self._optimizer, param, whole)
        adam.set_applied_steps(self._optimizer.optimizer, self._applied_steps)
