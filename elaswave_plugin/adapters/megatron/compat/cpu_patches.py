"""The patch records that let Megatron-Core train on CPU tensors.

Megatron-Core has no device abstraction: it asks torch.cuda for the current device and writes
device="cuda" literally (call sites: tensor_parallel/random.py, optimizer/clip_grads.py,
pipeline_parallel/schedules.py and others). Each record answers one such symbol with its CPU
meaning. megatron/training, which Megatron-LM's scripts call, has no CPU path either: it asserts
CUDA, makes its groups and seeds its generators only where it counts a device, and builds and warms
up CUDA kernels. On a machine with a GPU none of the records is applied.
"""

import contextlib
import copy
import logging
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from elaswave_plugin.adapters.megatron.compat.versions import SCRIPTS, record
from elaswave_plugin.adapters.patching import PatchRecord, PatchSet
from elaswave_plugin.around import around
from elaswave_plugin.values.set_within import set_within

_NO_OLD_GPU = 10
_FACTORIES = (
    *("tensor", "zeros", "empty", "ones", "full", "arange", "rand"),
    *("zeros_like", "empty_like"),
)


class _CpuStream:
    """A stream, or an event, on a device without them: everything has already happened."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, stream: object) -> None:
        """Nothing to wait for."""

    def wait_event(self, event: object) -> None:
        """Nothing to wait for."""

    def record_event(self) -> "_CpuStream":
        """Return an event that has happened already."""
        return self

    def synchronize(self) -> None:
        """Nothing to wait for."""


def _is_cuda(device: object) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


def _on_cpu(factory: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if _is_cuda(kwargs.get("device")):
        kwargs["device"] = "cpu"
    return factory(*args, **kwargs)


def _moved_on_cpu(
    native: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    """``Tensor.to``, whose device may be its first argument."""
    named = ("cpu" if _is_cuda(one) else one for one in args)
    return _on_cpu(native, tensor, *named, **kwargs)


def _being(replacement: Any) -> Callable[[Any], Any]:
    """A record's ``make`` for what follows from nothing that is there."""
    return lambda original: replacement


def _returning(value: Any) -> Callable[[Any], Any]:
    """A record's ``make`` for a function that ignores its arguments and returns ``value``."""
    return _being(lambda *args, **kwargs: value)


def _cuda_type_name(
    native: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Answer Megatron's comparisons of Tensor.type() with 'torch.cuda.FloatTensor'."""
    answer = native(tensor, *args, **kwargs)
    asked_for_name = not args and not kwargs
    # Behind the replacement that ``around`` has made.
    if asked_for_name and "/megatron/core/" in sys._getframe(2).f_code.co_filename:
        return answer.replace("torch.", "torch.cuda.", 1)
    return answer


def _quiet(original: Any) -> Any:
    silent = logging.getLogger(f"{__name__}.silent")
    silent.setLevel(logging.CRITICAL)
    return SimpleNamespace(getLogger=lambda name: silent)


def _torch_norm(
    native: Callable[..., Any], cls: type, config: Any, *args: Any, **kwargs: Any
) -> Any:
    """Under sequence parallelism only the fused norms mark their parameters, whose gradients are
    then added over the TP group; torch's norm asserts instead."""
    plain = copy.copy(config)
    plain.sequence_parallel = False
    norm = native(cls, plain, *args, **kwargs)
    for param in norm.parameters():
        param.sequence_parallel = config.sequence_parallel
    return norm


def _gating_without_kernels(
    native: Callable[..., Any],
    inp: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    router_dtype: Any,
) -> torch.Tensor:
    wide = None if bias is None else bias.to(router_dtype)
    return torch.nn.functional.linear(inp.to(router_dtype), weight.to(router_dtype), wide)


def _not_compiled(original: Any) -> Any:
    return getattr(original, "_torchdynamo_orig_callable", original)


def _router_records() -> list[PatchRecord]:
    """Return the records of mixtures of experts."""
    router = "megatron.core.transformer.moe.router"
    return [
        record(
            f"{router}:router_gating_linear",
            around(_gating_without_kernels),
            "without Transformer Engine it asks for a name that is not there",
            *("inp", "weight", "bias", "router_dtype"),
            gone=">=0.17",
        ),
        record(
            f"{router}:TopKRouter._apply_expert_bias",
            _not_compiled,
            "it adds up a few numbers, and is compiled for longer than a small job runs",
            *("self", "routing_map", "padding_mask"),
        ),
    ]


def _with_a_device(native: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Start a script where one device is counted, and none is asserted.

    Groups and generators are made only where a device is counted.
    """
    with set_within(torch.cuda, "device_count", lambda: 1):
        return native(*args, **{**kwargs, "allow_no_cuda": True})


def _script_records() -> list[PatchRecord]:
    """Return the records of what Megatron-LM's scripts call."""
    kernels = "it builds or warms up CUDA kernels"
    return [
        record(
            "megatron.training.training:initialize_megatron",
            around(_with_a_device),
            "it asserts CUDA, and makes groups and generators only where it counts a device",
            *("extra_args_provider", "args_defaults", "ignore_unknown_args", "allow_no_cuda"),
            *("skip_mpu_initialization", "get_embedding_ranks", "get_position_embedding_ranks"),
            *("parsed_args", "store"),
            valid=SCRIPTS,
        ),
        record(
            "megatron.training.arguments:get_device_arch_version",
            _returning(_NO_OLD_GPU),
            "older GPUs need CUDA_DEVICE_MAX_CONNECTIONS",
            valid=SCRIPTS,
        ),
        record(
            "megatron.training.training:set_jit_fusion_options",
            _returning(None),
            kernels,
            valid=SCRIPTS,
        ),
        record(
            "megatron.legacy.fused_kernels:load",
            _returning(None),
            kernels,
            "args",
            valid=SCRIPTS,
            gone=">=0.17",
        ),
    ]


def cpu_patches(*, scripts: bool = False) -> PatchSet:
    """All records for training on CPU; ``scripts``: of Megatron-LM."""
    device = "the device is asked from torch.cuda"
    streams = "streams have no meaning on CPU"
    literal = "things are moved to the GPU literally"
    tracker = "the RNG tracker keeps states of the CUDA generator"
    random = "megatron.core.tensor_parallel.random"

    def state(device: Any = "cuda", clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
        return torch.get_rng_state()

    def itself(one: Any, *args: Any, **kwargs: Any) -> Any:
        return one

    records = [
        record("torch.cuda:current_device", _returning(torch.device("cpu")), device),
        record("torch.cuda:current_stream", _returning(_CpuStream()), streams),
        record("torch.cuda:stream", _returning(contextlib.nullcontext()), streams),
        record("torch.cuda:Stream", _being(_CpuStream), streams),
        record("torch.cuda:synchronize", _returning(None), "no device to wait for"),
        record("torch.cuda:empty_cache", _returning(None), "no device to act on"),
        record("torch.cuda:set_device", _returning(None), "no device to choose"),
        record(
            "torch.cuda:manual_seed", _being(torch.default_generator.manual_seed), tracker, "seed"
        ),
        record("torch.cuda:get_rng_state", _being(state), tracker, "device"),
        record("torch:Tensor.cuda", _being(itself), literal),
        record("torch:Tensor.to", around(_moved_on_cpu), literal),
        record("torch.nn:Module.cuda", _being(itself), literal),
        record(
            "torch:Tensor.type", around(_cuda_type_name), "dtypes are compared with CUDA type names"
        ),
        *(
            record(f"torch:{name}", around(_on_cpu), 'device="cuda" is written literally')
            for name in _FACTORIES
        ),
        record(
            f"{random}:logging",
            _quiet,
            "its fork() warns of the CPU generator, which on CPU is the tracked one",
        ),
        record(
            f"{random}:_set_cuda_rng_state",
            _being(lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)),
            tracker,
            "new_state",
            "device",
            "graph_safe",
        ),
        record(
            f"{random}:_get_cuda_rng_state", _being(state), tracker, "device", "clone", "graph_safe"
        ),
        record(
            "megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__",
            around(_torch_norm),
            "sequence parallelism needs the fused norms, which need a GPU",
        ),
        *_router_records(),
    ]
    return PatchSet([*records, *_script_records()] if scripts else records)
