"""DDP's parameter and gradient buffers, laid out in place and re-viewed for any width.

Megatron-Core pads each bucket for the width it was built with (distributed/
param_and_grad_buffer.py). ``lay_out`` moves the parameters, at attach and where layers come or go,
into storage in which every bucket has room for all widths; ``set_width`` then only changes the
length of views.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucket, partition_buckets
from megatron.core.transformer.transformer_layer import TransformerLayer

from elaswave_plugin.adapters.megatron.compat.versions import new_bucket
from elaswave_plugin.core.layout.shards import padded_size, reserved_size

# Every parameter starts at a multiple of this number of elements, as in Megatron-Core.
_PARAM_ALIGNMENT = 64

Parts = Sequence[Sequence[torch.nn.Parameter]]


def present_parts(model: DistributedDataParallel) -> list[list[torch.nn.Parameter]]:
    """The parameters by bucket, as DDP has dealt them out."""
    return [bucket.params_list for buffer in model.buffers for bucket in buffer.buckets]


def lay_out(model: DistributedDataParallel, parts: Parts, max_width: int) -> None:
    """One bucket for each of ``parts``, with room for every width up to ``max_width``.

    Parameter objects stay the same; their ``data`` and ``main_grad`` become views of new storage.
    The model has one dtype, and so one buffer.
    """
    (buffer,) = model.buffers
    starts = [_starts(params) for params in parts]
    lengths = [
        of_part[-1] + params[-1].numel() for of_part, params in zip(starts, parts, strict=True)
    ]
    sizes = [reserved_size(length, max_width) for length in lengths]
    *offsets, numel = accumulate(sizes, initial=0)
    like = buffer.param_data
    param_data = torch.zeros(numel, dtype=like.dtype, device=like.device)
    grad_data = torch.zeros(numel, dtype=buffer.grad_data.dtype, device=like.device)
    buffer.param_index_map, buffer.buckets = {}, []
    for index, params in enumerate(parts):
        for param, position in zip(params, starts[index], strict=True):
            start = offsets[index] + position
            stop = start + param.numel()
            view = param_data[start:stop].view(param.shape)
            view.copy_(param.data)
            param.data = view
            param.main_grad = grad_data[start:stop].view(param.shape)  # type: ignore[attr-defined]
            buffer.param_index_map[param] = (start, stop, index)
        span = slice(offsets[index], offsets[index] + sizes[index])
        buffer.buckets.append(
            new_bucket(
                buffer,
                params=list(params),
                param_data=param_data[span],
                grad_data=grad_data[span],
                offset=offsets[index],
                numel_unpadded=lengths[index],
                gradient_scaling_factor=buffer.gradient_scaling_factor,
                bucket_id=index,
            )
        )
    buffer.params = [param for params in parts for param in params][::-1]
    buffer.param_indices = list(range(len(buffer.params)))
    buffer.param_to_bucket = {p: bucket for bucket in buffer.buckets for p in bucket.params_list}
    buffer.bucket_indices = list(zip(offsets, accumulate(sizes), strict=True))
    buffer.param_data, buffer.grad_data = param_data, grad_data
    buffer.numel, buffer.numel_unpadded = numel, sum(lengths)
    if hasattr(buffer, "param_data_cpu"):
        # A copy of the old one, into which an offload copies.
        buffer.param_data_cpu = None
    if hasattr(buffer, "grad_numel"):  # 0.17 and 0.18
        buffer.grad_numel = numel
    _group_buckets(model)


def divide_before_sums(models: Sequence[DistributedDataParallel]) -> None:
    """Have each replica's gradients divided by the width, where DDP takes their mean instead.

    After a loss replicas add unequal numbers of micro-batches, whose mean is none; NCCL's own mean
    is such a sum. As Megatron-Core's distributed/distributed_data_parallel.py scales them.
    """
    for model in models:
        for buffer in model.buffers if model.ddp_config.average_in_collective else ():
            for one in (buffer, *buffer.buckets):
                one.gradient_scaling_factor /= model.intra_dp_cp_group.size()
    for model in models:
        model.ddp_config.average_in_collective = False


def _starts(params: Sequence[torch.nn.Parameter]) -> list[int]:
    """Return the element at which each parameter begins in its bucket."""
    sizes = (-(-param.numel() // _PARAM_ALIGNMENT) * _PARAM_ALIGNMENT for param in params)
    return list(accumulate(sizes, initial=0))[:-1]


def _group_buckets(model: DistributedDataParallel) -> None:
    """As the end of ``DistributedDataParallel.__init__``, for parameters that may be new."""
    model.bucket_groups = partition_buckets(
        model.buffers, force_single_bucket_group=len(model.bucket_groups) == 1
    )
    if model.ddp_config.overlap_param_gather:
        for earlier, later in zip(model.bucket_groups, model.bucket_groups[1:], strict=False):
            later.next_param_gather_bucket_group = earlier
    known = model.param_to_bucket_group
    model.param_to_bucket_group = {
        param: group
        for group in model.bucket_groups
        for bucket in group.buckets
        for param in bucket.params_list
    }
    model.params_with_grad = [p for p in model.module.parameters() if p.requires_grad]
    # The accumulators have to be held: with them go the hooks that count gradients.
    model.grad_accs = [
        one for one in model.grad_accs if one.variable in model.param_to_bucket_group
    ]
    for param in model.params_with_grad:
        if param not in known:
            param.grad_added_to_main_grad = False
            accumulator = param.expand_as(param).grad_fn.next_functions[0][0]
            accumulator.register_hook(model._make_backward_post_hook(param))
            model.grad_accs.append(accumulator)


def set_width(model: DistributedDataParallel, width: int, rank: int) -> None:
    """Re-view every bucket for ``width`` shards, of which this worker owns ``rank``.

    This is the list of what DDP captured by value from the data-parallel group.
    """
    for buffer in model.buffers:
        buffer.data_parallel_world_size = width
        if hasattr(buffer, "num_optimizer_shards"):  # from 0.19 on
            buffer.num_optimizer_shards = width
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
    """Forget an interrupted step: operations in flight, counted gradients, gathered weights.

    Its gradients stay until the next attempt, which zeroes them before its first pass.
    """
    for group in model.bucket_groups:
        group.grad_reduce_handle = None
        group.param_gather_handle = None
        group.param_gather_dispatched = False
        # As before a first batch, in which reductions are started in the order of the buckets, not
        # of the backward pass: a newcomer has no other order yet, and they have to meet. Cleared
        # before reset(), which would take a half-counted batch as the golden count.
        group.is_first_batch = True
        group.golden_per_param_grad_ready_counts = {}
        group.per_param_grad_ready_counts = {}
        group.is_last_microbatch = True
    for param in model.parameters():
        param.grad = None


def are_offloaded(models: Sequence[DistributedDataParallel]) -> bool:
    """Return whether the script has taken weights from the device, whose storage is empty then."""
    return any(_is_empty(buffer.param_data) for model in models for buffer in model.buffers)


def bring_back(models: Sequence[DistributedDataParallel]) -> bool:
    """Give weights and gradients that are offloaded their storage, zeroed; whether any were."""
    data = [(one.param_data, one.grad_data) for model in models for one in model.buffers]
    empty = [one for pair in data for one in pair if _is_empty(one)]
    for one in empty:
        one.untyped_storage().resize_(one.nbytes)
        one.detach().zero_()
    return bool(empty)


def _is_empty(data: torch.Tensor) -> bool:
    return data.untyped_storage().nbytes() == 0


def layer_numbers(chunks: Sequence[DistributedDataParallel]) -> tuple[int, ...]:
    """The global numbers of this worker's transformer layers, from 1 on."""
    modules = (module for chunk in chunks for module in chunk.modules())
    return tuple(m.layer_number for m in modules if isinstance(m, TransformerLayer))


def buckets(chunks: Sequence[DistributedDataParallel]) -> list[_ParamAndGradBucket]:
    """Every bucket, in the order of the flat state."""
    return [bucket for chunk in chunks for buffer in chunk.buffers for bucket in buffer.buckets]


def bucket_lengths(chunks: Sequence[DistributedDataParallel]) -> tuple[int, ...]:
    """Unpadded elements of every bucket, in the order of the flat state."""
    return tuple(bucket.numel_unpadded for bucket in buckets(chunks))


def gather_weights(bucket: _ParamAndGradBucket, group: dist.ProcessGroup) -> None:
    """Gather the weights of a bucket from their shards (collective over ``group``)."""
    mine = bucket.param_data.chunk(group.size())[group.rank()]
    dist.all_gather_into_tensor(bucket.param_data, mine, group=group)
