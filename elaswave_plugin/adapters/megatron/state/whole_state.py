"""The optimizer's state of whole parameters, put together from the shards of a stage."""

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from elaswave_plugin.adapters.megatron.state.optimizer_state import FlatShard
from elaswave_plugin.core.layout.shards import MOMENTS

MASTER = "param"
PARTS = (MASTER, *MOMENTS)

Whole = dict[str, torch.Tensor]


def gather(
    optimizer: DistributedOptimizer, shard: FlatShard
) -> dict[torch.nn.Parameter, Whole] | None:
    """Return master and moments of each trained parameter, flat and on the host.

    Collective over the replicas of a stage; None on all of them but the first.
    """
    group = optimizer.data_parallel_group
    found: dict[torch.nn.Parameter, Whole] = {}
    for param in shard.params:
        whole = torch.zeros(len(PARTS), param.numel(), device=param.device)
        if shard.owns(param):
            start = optimizer._get_model_param_range_map(param)["param"].start
            for row, piece in zip(whole, shard.pieces_of(param), strict=True):
                row[start : start + piece.numel()] = piece
        # Each number has one contributor, so that the sum only adds zeros to it.
        dist.all_reduce(whole, group=group)
        if group.rank() == 0:
            found[param] = dict(zip(PARTS, whole.cpu(), strict=True))
    return found if group.rank() == 0 else None


@torch.no_grad()
def scatter(
    optimizer: DistributedOptimizer,
    shard: FlatShard,
    state: dict[torch.nn.Parameter, Whole],
) -> None:
    """Install the own pieces of whole parameters; parts that are not there stay as they are."""
    for param, whole in state.items():
        if shard.owns(param):
            start = optimizer._get_model_param_range_map(param)["param"].start
            for name, piece in zip(PARTS, shard.pieces_of(param), strict=True):
                if name in whole:
                    piece.copy_(whole[name].view(-1)[start : start + piece.numel()])
