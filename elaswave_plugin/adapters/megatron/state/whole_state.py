"""The optimizer's state of whole parameters, put together from the pieces of a stage's workers."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from elaswave_plugin.adapters.megatron.state import adam
from elaswave_plugin.core.layout.shards import MOMENTS

MASTER = "param"
PARTS = (MASTER, *MOMENTS)

Parameter = torch.nn.Parameter
# Flat, by part.
Whole = dict[str, torch.Tensor]
# Where a worker's piece of a parameter starts, and its parts.
Piece = tuple[int, Whole]


def own_piece(optimizer: DistributedOptimizer, param: Parameter) -> Piece:
    """Return what this worker has of a parameter, without a copy; nothing, where it has none."""
    if param not in optimizer.model_param_group_index_map:
        return 0, {}
    group, order = optimizer.model_param_group_index_map[param]
    main = optimizer.optimizer.param_groups[group]["params"][order]
    state = optimizer.optimizer.state[main]
    parts = {name: state[name].view(-1) for name in MOMENTS if name in state}
    start: int = optimizer._get_model_param_range_map(param)["param"].start
    return start, {MASTER: main.detach().view(-1), **parts}


def whole_of(optimizer: DistributedOptimizer, param: Parameter, piece: Piece) -> Whole:
    """Return master and moments of a parameter; collective over the replicas of a stage."""
    start, parts = piece
    found = torch.zeros(len(PARTS), param.numel(), device=param.device)
    for name, part in parts.items():
        found[PARTS.index(name)][start : start + part.numel()] = part
    # Each number has one contributor, so that the sum only adds zeros to it.
    dist.all_reduce(found, group=optimizer.data_parallel_group)
    return dict(zip(PARTS, found, strict=True))


@torch.no_grad()
def install(optimizer: DistributedOptimizer, param: Parameter, whole: Whole) -> None:
    """Install the own piece of a parameter; parts that are not there stay as they are."""
    start, parts = own_piece(optimizer, param)
    for name, part in parts.items():
        if name in whole:
            part.copy_(whole[name].view(-1)[start : start + part.numel()])


class LoadedState:
    """Optimizer state that a script loads before it is resharded, kept over that.

    One worker's part, by parameter: collective over WORLD, as all its methods are.
    """

    def __init__(self, optimizer: DistributedOptimizer) -> None:
        self._optimizer = optimizer
        inner = optimizer.optimizer
        count = torch.tensor(adam.applied_steps(inner) if inner.state else -1)
        dist.all_reduce(count, op=dist.ReduceOp.MAX)
        self._applied_steps = int(count)
        self._pieces: dict[Parameter, Piece] = {}
        for param in optimizer.model_param_group_index_map if inner.state else ():
            start, parts = own_piece(optimizer, param)
            self._pieces[param] = start, {name: one.clone() for name, one in parts.items()}
        inner.state.clear()

    def install(self, params: Sequence[Parameter]) -> None:
        """Put it where the pieces of ``params``, all that are trained, are now."""
        if self._applied_steps < 0:
            return
        for param in params:
            piece = self._pieces.pop(param, (0, {}))
            whole = whole_of(self._optimizer, param, piece)
            install(self._optimizer, param, whole)
        adam.set_applied_steps(self._optimizer.optimizer, self._applied_steps)
