"""The optimizer state of a checkpoint, of which each worker writes and reads its own ranges.

Megatron-Core's fully reshardable format gathers the optimizer state of a whole stage on each of its
workers, to save it and to load it: 12 bytes a parameter. But a range of a flattened tensor is a few
boxes of the tensor, and torch's distributed checkpoints take boxes of any size. So here each worker
writes views of what it has, and reads no more than that. Keys and shapes are those of upstream,
which loads these checkpoints, and whose own are loaded here.
Source: megatron/core/optimizer/distrib_optimizer.py, ``sharded_param_state_fully_reshardable``.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories

from elaswave_plugin.adapters.megatron.compat.versions import record
from elaswave_plugin.adapters.patching import Hook, PatchRecord
from elaswave_plugin.errors import ConfigurationError

MASTER = "param"
NAMES = (MASTER, "exp_avg", "exp_avg_sq")
_MODULE = "megatron.core.optimizer.distrib_optimizer"
Place = tuple[tuple[int, ...], tuple[int, ...]]


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Place]:
    """Yield offset and size of the boxes that are the elements [start, stop), row after row."""
    if start >= stop:
        return
    if len(shape) <= 1:
        yield ((start,), (stop - start,)) if shape else ((), ())
        return
    size = math.prod(shape[1:])
    first, last = -(-start // size), stop // size
    if first > last:
        # Within one row.
        yield from _in_row(shape, last, start - last * size, stop - last * size)
        return
    yield from _in_row(shape, first - 1, start - (first - 1) * size, size)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    yield from _in_row(shape, last, 0, stop - last * size)


def _in_row(shape: Sequence[int], row: int, start: int, stop: int) -> Iterator[Place]:
    for offset, size in boxes(shape[1:], start, stop):
        yield (row, *offset), (1, *size)


def own_ranges(optimizer: Any) -> Iterator[tuple[Any, slice]]:
    """Yield the parameters of which this worker has optimizer state, and the elements it has."""
    for buffer in optimizer.gbuf_ranges:
        for buckets in buffer.values():
            for bucket in buckets:
                for param, ranges in bucket["param_map"].items():
                    yield param, slice(ranges["param"].start, ranges["param"].end)


def sharded_state(
    optimizer: Any, model_sharded_state_dict: Any, is_loading: bool = False, metadata: Any = None
) -> dict[Any, Any]:
    """Return the tensors that this worker has of each parameter, by "name number".

    Raises ConfigurationError for a model whose checkpoints have its parameters in other pieces.
    """
    described, _ = extract_sharded_tensors_and_factories(model_sharded_state_dict)
    of_param = {one.data: one for one in nested_values(described)}
    found: dict[Any, Any] = {}
    for index, (param, own) in enumerate(own_ranges(optimizer)):
        tensors = optimizer._get_main_param_and_optimizer_states(param)
        # Each range is there once in a group of replicas.
        replica = (*of_param[param].replica_id[:2], optimizer.distributed_optimizer_instance_id)
        found[index] = {
            f"{name} {number}": piece
            for name in NAMES
            for number, piece in enumerate(
                _pieces(of_param[param], name, own, tensors[name], replica, is_loading=is_loading)
            )
        }
    # Something has to be there, also where a worker has padding only.
    return found or {"none": LocalNonpersistentObject(None)}


def _pieces(
    described: Any, name: str, own: slice, state: Any, replica: Any, *, is_loading: bool
) -> Iterator[ShardedTensor]:
    """Yield the boxes of one tensor of the state, whose elements are those in ``own``."""
    at = own.start
    for whole, first in _parts(described, f"optimizer.state.{name}.{described.key}"):
        begin, end = max(own.start, first), min(own.stop, first + math.prod(whole.local_shape))
        lead = whole.prepend_axis_num
        for offset, size in boxes(whole.local_shape, begin - first, end - first):
            count = math.prod(size)
            values = state.detach()[at - own.start : at - own.start + count].float()
            at += count
            shape = (*(1 for _ in range(lead)), *size)
            yield ShardedTensor(
                key=whole.key,
                data=torch.empty(shape) if is_loading else values.view(shape),
                dtype=torch.float32,
                local_shape=shape,
                global_shape=whole.global_shape,
                global_offset=(
                    *whole.global_offset[:lead],
                    *(a + b for a, b in zip(whole.global_offset[lead:], offset, strict=True)),
                ),
                # None: boxes of any size.
                axis_fragmentations=None,
                replica_id=replica,
                allow_shape_mismatch=whole.allow_shape_mismatch,
            )
    if at != own.stop:
        raise ConfigurationError(
            f"checkpoints have {described.key} in pieces that are no rows of it, which are saved"
            " from more than one worker; train with layers of Megatron-Core's own"
        )


def _parts(described: Any, key: str) -> Iterator[tuple[ShardedTensor, int]]:
    """Yield the tensors that a checkpoint has of a parameter, and their first elements in it."""
    if not isinstance(described, ShardedTensorFactory):
        yield replace(described, key=key, data=None), 0
        return
    whole = torch.empty(described.data.shape, device="meta")
    for part in nested_values(described.build_fn(key, whole, described.replica_id, None)):
        if part.data._base is whole and part.data.is_contiguous():
            yield part, part.data.storage_offset()


@torch.no_grad()
def load_state(optimizer: Any, state_dict: Mapping[int, Mapping[str, torch.Tensor]]) -> None:
    """Install what a checkpoint brought into the tensors of `sharded_state`."""
    for index, (param, _) in enumerate(own_ranges(optimizer)):
        pieces: dict[str, list[torch.Tensor]] = {name: [] for name in NAMES}
        for key, piece in state_dict[index].items():
            pieces[key.partition(" ")[0]].append(piece.flatten())
        tensors = {name: torch.cat(found) for name, found in pieces.items()}
        optimizer._set_main_param_and_optimizer_states(param, tensors)


def records() -> list[PatchRecord]:
    """Return the patches that lead saves and loads of optimizer state here."""
    return [
        record(
            f"{_MODULE}:DistributedOptimizer.sharded_param_state_fully_reshardable",
            lambda method: wraps(method)(sharded_state),
            "it gathers the optimizer state of a stage on each of its workers",
            *("self", "model_sharded_state_dict", "is_loading", "metadata"),
            hook=Hook(f"{_MODULE}:sharded_state_hook", lambda method: sharded_state),
        ),
        record(
            f"{_MODULE}:DistributedOptimizer.load_parameter_state_from_fully_reshardable",
            lambda method: wraps(method)(load_state),
            "it takes tensors that are whole on each worker",
            *("self", "state_dict"),
            hook=Hook(f"{_MODULE}:load_state_hook", lambda method: load_state),
        ),
    ]
