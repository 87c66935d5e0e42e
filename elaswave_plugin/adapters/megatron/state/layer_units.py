"""The parts of a model that can lie at another stage: layers, and what is before and after them.

A unit is a bucket of its own, cut evenly over the workers of its stage. Between stages of one
width a unit so travels in disjoint pieces from rank to rank, and nothing else moves. Without
pipeline stages nothing changes its place: the buckets stay as DDP has dealt them out.
"""

from collections.abc import Sequence

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.transformer_layer import TransformerLayer

from elaswave_plugin.adapters.megatron.state.buffers import present_parts

Parameters = list[torch.nn.Parameter]


def units_of(chunk: DistributedDataParallel) -> dict[int, Parameters]:
    """Trained parameters by unit, from the last to the first, as Megatron-Core fills its buffers.

    Layers have their numbers, from 1 on. What is in front of them is 0, what follows them one more
    than the number of layers. An embedding that two stages share is a unit of its own beyond these,
    since both stages have to cut it alike (megatron/core/distributed/param_and_grad_buffer.py).
    Where there is one stage only, the units are DDP's own buckets, from 0 downwards.
    """
    if chunk.config.pipeline_model_parallel_size == 1:
        return {-number: params for number, params in enumerate(present_parts(chunk))}
    num_layers: int = chunk.config.num_layers
    layer_of = {
        param: module.layer_number
        for module in chunk.modules()
        if isinstance(module, TransformerLayer)
        for param in module.parameters()
    }
    found: dict[int, Parameters] = {}
    beyond = 0
    for param in chunk.module.parameters():
        if not param.requires_grad:
            continue
        if param in layer_of:
            unit, beyond = layer_of[param], num_layers + 1
        elif getattr(param, "shared_embedding", False):
            unit = beyond + 1 if beyond else -1
        else:
            unit = beyond
        found.setdefault(unit, []).append(param)
    return {unit: found[unit][::-1] for unit in sorted(found, reverse=True)}


def unit_lengths(chunks: Sequence[DistributedDataParallel]) -> dict[int, int]:
    """Elements of each unit's bucket, unpadded; the chunks have to be laid out by units."""
    return {
        unit: bucket.numel_unpadded
        for chunk in chunks
        for unit, bucket in zip(
            units_of(chunk),
            (bucket for buffer in chunk.buffers for bucket in buffer.buckets),
            strict=True,
        )
    }
