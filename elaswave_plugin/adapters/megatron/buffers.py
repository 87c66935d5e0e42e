"""DDP's parameter and gradient buffers, re-viewed in place for any data-parallel width.

Megatron-Core pads each bucket for the width it was built with (distributed/
param_and_grad_buffer.py). ``reserve`` moves the buffers once, at attach, into storage where every
bucket has room for all smaller widths; ``set_width`` then only changes the length of views.
"""

from collections.abc import Sequence

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.transformer_layer import TransformerLayer

from elaswave_plugin.core.shards import padded_size, reserved_size


def reserve(model: DistributedDataParallel, max_width: int) -> None:
    """Move the parameters and gradients into buckets with room for every width to ``max_width``.

    Parameter objects stay the same; their ``data`` and ``main_grad`` become views of new storage.
    """
    for buffer in model.buffers:
        lengths = [bucket.numel_unpadded for bucket in buffer.buckets]
        sizes = [reserved_size(length, max_width) for length in lengths]
        offsets = [sum(sizes[:index]) for index in range(len(sizes))]
        old_offsets = [bucket.offset for bucket in buffer.buckets]
        param_data = torch.zeros(
            sum(sizes), dtype=buffer.param_data.dtype, device=buffer.param_data.device
        )
        grad_data = torch.zeros(
            sum(sizes), dtype=buffer.grad_data.dtype, device=buffer.grad_data.device
        )
        for param, (start, stop, bucket) in list(buffer.param_index_map.items()):
            shift = offsets[bucket] - old_offsets[bucket]
            view = param_data[start + shift : stop + shift].view(param.shape)
            view.copy_(param.data)
            param.data = view
            param.main_grad = grad_data[start + shift : stop + shift].view(param.shape)
            buffer.param_index_map[param] = (start + shift, stop + shift, bucket)
        for bucket, offset in zip(buffer.buckets, offsets, strict=True):
            bucket.offset = offset
        buffer.bucket_indices = [
            (offset, offset + size) for offset, size in zip(offsets, sizes, strict=True)
        ]
        buffer.param_data, buffer.grad_data = param_data, grad_data
        buffer.numel = sum(sizes)


def set_width(model: DistributedDataParallel, width: int, rank: int) -> None:
    """Re-view every bucket for ``width`` shards, of which this worker owns ``rank``.

    This is the list of what DDP captured by value from the data-parallel group.
    """
    for buffer in model.buffers:
        buffer.data_parallel_world_size = width
        for bucket in buffer.buckets:
            stop = bucket.offset + padded_size(bucket.numel_unpadded, width)
            bucket.param_data = buffer.param_data[bucket.offset : stop]
            bucket.grad_data = buffer.grad_data[bucket.offset : stop]
    for group in model.bucket_groups:
        group.intra_distributed_optimizer_instance_size = width
        group.intra_distributed_optimizer_instance_rank = rank
        group.cached_param_buffer_shard_list = [None] * len(group.buckets)
        group.cached_grad_buffer_shard_list = [None] * len(group.buckets)


def drop_step(model: DistributedDataParallel) -> None:
    """Forget an interrupted step: operations in flight, counted gradients, gathered weights."""
    for group in model.bucket_groups:
        group.grad_reduce_handle = None
        group.param_gather_handle = None
        group.param_gather_dispatched = False
        # Cleared before reset(): in a first batch reset() would take a half-counted batch as
        # the golden count.
        group.per_param_grad_ready_counts = {}
        group.is_last_microbatch = True
    model.zero_grad_buffer()
    for param in model.parameters():
        param.grad = None


def layer_numbers(chunks: Sequence[DistributedDataParallel]) -> tuple[int, ...]:
    """The global numbers of this worker's transformer layers, from 1 on."""
    modules = (module for chunk in chunks for module in chunk.modules())
    return tuple(m.layer_number for m in modules if isinstance(m, TransformerLayer))


def bucket_lengths(chunks: Sequence[DistributedDataParallel]) -> tuple[int, ...]:
    """Unpadded elements of every bucket, in the order of the flat state."""
    buffers = (buffer for chunk in chunks for buffer in chunk.buffers)
    return tuple(bucket.numel_unpadded for buffer in buffers for bucket in buffer.buckets)
