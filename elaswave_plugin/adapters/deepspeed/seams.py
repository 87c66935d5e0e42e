"""The patch records of an elastic DeepSpeed job."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from elaswave_plugin.adapters.patching import PatchRecord, PatchSet
from elaswave_plugin.errors import ConfigurationError

_DEEPSPEED = "deepspeed"
_VALID = ">=0.19.8,<0.20"
_ARGUMENTS = "_elaswave_arguments"


def _remembering(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.__dict__[_ARGUMENTS] = (args, kwargs)

    return __init__


def arguments_of(optimizer: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a ZeRO optimizer was constructed with; raises ConfigurationError where nobody saw it."""
    try:
        args, kwargs = optimizer.__dict__[_ARGUMENTS]
    except KeyError:
        raise ConfigurationError(
            f"the {type(optimizer).__name__} was not made by deepspeed.initialize with the section "
            "elaswave; pass the model and a plain optimizer to it"
        ) from None
    return args, kwargs


def _already_flat(
    original: Callable[[list[torch.Tensor]], torch.Tensor],
) -> Callable[[list[torch.Tensor]], torch.Tensor]:
    def defragment(tensors: list[torch.Tensor]) -> torch.Tensor:
        flat = flat_buffer_of(tensors)
        return original(tensors) if flat is None else flat

    return defragment


def flat_buffer_of(tensors: list[torch.Tensor]) -> torch.Tensor | None:
    """The one-dimensional buffer whose consecutive pieces are ``tensors``; None where none is."""
    first = tensors[0]
    storage = first.untyped_storage()
    position = 0
    for tensor in tensors:
        together = tensor.untyped_storage().data_ptr() == storage.data_ptr()
        if not together or tensor.storage_offset() != position:
            return None
        position += tensor.numel()
    if storage.nbytes() != position * first.element_size():
        return None
    flat = torch.empty(0, dtype=first.dtype, device=first.device)
    return flat.set_(storage, 0, (position,), (1,))


def deepspeed_patches() -> PatchSet:
    """What every elastic job needs; applied before the engine is built."""
    remembering = [
        PatchRecord(
            target=target,
            reason="a new layout runs the constructor of the same object again, as it was called",
            distribution=_DEEPSPEED,
            valid=_VALID,
            make=_remembering,
        )
        for target in (
            "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.__init__",
            "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3.__init__",
        )
    ]
    return PatchSet(
        [
            *remembering,
            PatchRecord(
                # As bound in stage3.py, which is where the optimizer looks it up.
                target="deepspeed.runtime.zero.stage3:defragment",
                reason=(
                    "it collects garbage for up to a second, also where the partitions are flat"
                ),
                distribution=_DEEPSPEED,
                valid=_VALID,
                parameters=("tensors",),
                make=_already_flat,
            ),
        ]
    )


def launch_patches() -> PatchSet:
    """What a worker of ours needs before torch.distributed is initialized; never undone."""
    return PatchSet(
        [
            PatchRecord(
                target="deepspeed.comm.torch:build_shm_op",
                reason=(
                    "on a CPU it compiles for a minute an operation for inference that keeps the "
                    "launch's world size for ever, and leaves files in shared memory"
                ),
                distribution=_DEEPSPEED,
                valid=_VALID,
                parameters=(),
                make=_builds_nothing,
            ),
        ]
    )


def _builds_nothing(original: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: None
