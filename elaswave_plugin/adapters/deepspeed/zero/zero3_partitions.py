"""The partitions of ZeRO-3's parameters: whether there are any, of which group, and cut again."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import GatheredParameters, Init, ZeroParamStatus

from elaswave_plugin.core.layout.shards import padded_size


def is_cut(model: Any) -> bool:
    """Return whether ``deepspeed.zero.Init`` has cut the model's parameters already."""
    return any(hasattr(param, "ds_process_group") for param in model.parameters())


def take_world(model: Any) -> None:
    """Parameters that ``deepspeed.zero.Init`` has cut over a WORLD that is gone are of this one.

    The owners of partitions stay: ranks of the launch are the same in both.
    """
    for param in model.parameters():
        if hasattr(param, "ds_process_group"):
            param.ds_process_group = _init_of(param).ds_process_group = dist.group.WORLD


@torch.no_grad()
def make_whole(model: torch.nn.Module) -> int:
    """Have a model whole that ``deepspeed.zero.Init`` may have cut; return its bytes.

    Collective over WORLD where it is cut. On a worker that comes later, the values are undefined.
    """
    whole: dict[Any, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False):
            if not hasattr(param, "ds_process_group"):
                continue
            # Tied ones stay so.
            if param not in whole:
                with GatheredParameters([param]):
                    values = param.data.clone()
                whole[param] = torch.nn.Parameter(values, requires_grad=param.requires_grad)
            module.register_parameter(name, whole[param])
    for param in model.parameters():
        # What computes with a weight outside of its module asks, in ZeRO-3, whether it is there.
        param.ds_status = ZeroParamStatus.AVAILABLE  # type: ignore[attr-defined]
    return sum(one.numel() * one.element_size() for one in model.parameters())


@torch.no_grad()
def cut_again(params: Iterable[Any]) -> None:
    """Give every parameter a partition of the present size; values undefined.

    Those of one dtype and device lie in one buffer; where parameters are offloaded, small ones stay
    on the accelerator.
    """
    of_kind: dict[tuple[torch.dtype, torch.device], list[Any]] = {}
    for param in params:
        of_kind.setdefault((param.ds_tensor.dtype, param.ds_tensor.device), []).append(param)
    width = dist.get_world_size()
    for (dtype, device), alike in of_kind.items():
        sizes = [padded_size(param.ds_numel, width, 1) // width for param in alike]
        flat = torch.zeros(sum(sizes), dtype=dtype, device=device)
        for param, size, piece in zip(alike, sizes, flat.split(sizes), strict=True):
            _cut(param, size, piece)


def _cut(param: Any, size: int, piece: torch.Tensor) -> None:
    width, rank = dist.get_world_size(), dist.get_rank()
    old = param.ds_tensor
    new: Any = torch.empty(0, dtype=piece.dtype, device=piece.device)
    new.data = piece
    new.ds_numel, new.status, new.final_location = size, old.status, old.final_location
    param.ds_tensor, param.ds_numel_aligned = new, size * width
    param.ds_zero_partition_rank, param.ds_zero_partition_world_size = rank, width
    param.ds_secondary_tensor_group_size = width
    param.ds_status = ZeroParamStatus.NOT_AVAILABLE
    init = _init_of(param)
    init.rank = init.rank_in_group = rank
    init.dp_world_size = init.num_ranks_in_param_group = width


def _init_of(param: Any) -> Init:
    """The object that the parameter's own functions close over: it holds sizes and ranks."""
    cells = [cell.cell_contents for cell in param.all_gather.__closure__]
    return next(cell for cell in cells if isinstance(cell, Init))
