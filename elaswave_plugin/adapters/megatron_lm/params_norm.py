"""The norm of all weights, from shards: the same digits whoever holds which layers.

Megatron-LM adds float32 squares over replicas and stages that its groups name
(megatron/training/utils.py, ``calc_params_l2_norm``), in which free workers have no part.
"""

import math
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared

from elaswave_plugin.adapters.megatron.state.optimizer_state import FlatShard


def params_norm(
    chunks: Sequence[DistributedDataParallel], shard: FlatShard, *, is_first: bool
) -> float:
    """Return the norm over everyone's masters and untrained weights; collective over WORLD.

    ``is_first``: whether this worker is the first of its stage and TP position, which counts what
    all of these hold alike. Squares are added in float64: the order of sums does not show in what
    Megatron-LM prints.
    """
    squares = 0.0
    for piece in _own_pieces(chunks, shard, is_first):
        squares += float(piece.double().square().sum())
    total = torch.tensor(squares, dtype=torch.float64, device=torch.cuda.current_device())
    dist.all_reduce(total)
    return math.sqrt(float(total))


def _own_pieces(
    chunks: Sequence[DistributedDataParallel], shard: FlatShard, is_first: bool
) -> Iterator[torch.Tensor]:
    trained = {param for chunk in chunks for param in chunk.param_to_bucket_group}
    for param in (param for chunk in chunks for param in chunk.parameters()):
        if not (param_is_not_tensor_parallel_duplicate(param) and param_is_not_shared(param)):
            continue
        if shard.owns(param):
            yield shard.main_of(param).detach()
        elif is_first and param not in trained:
            yield param.detach()
