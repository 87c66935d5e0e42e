"""The patch records that let Megatron-Core train on CPU tensors.

Megatron-Core has no device abstraction: it asks torch.cuda for the current device and writes
device="cuda" literally (call sites: tensor_parallel/random.py, optimizer/clip_grads.py,
pipeline_parallel/schedules.py and others). Each record answers one such symbol with its CPU
meaning. On a machine with a GPU none of them is applied.
"""

import contextlib
import copy
import dataclasses
import functools
import logging
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from elaswave_plugin.adapters.megatron.compat.versions import VALID
from elaswave_plugin.adapters.patching import PatchRecord, PatchSet

_FACTORIES = ("tensor", "zeros", "empty", "ones", "full", "arange", "zeros_like", "empty_like")


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


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Any:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return make


def _returning(value: Any) -> Callable[[Any], Any]:
    """A record's ``make`` for a function that ignores its arguments and returns ``value``."""
    return lambda original: lambda *args, **kwargs: value


def _same_tensor(original: Any) -> Any:
    return lambda self, *args, **kwargs: self


def _cuda_type_name(original: Any) -> Any:
    """Answer Megatron's comparisons of Tensor.type() with 'torch.cuda.FloatTensor'."""

    def tensor_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = original(self, *args, **kwargs)
        asked_for_name = not args and not kwargs
        if asked_for_name and "/megatron/core/" in sys._getframe(1).f_code.co_filename:
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer

    return tensor_type


def _set_state(original: Any) -> Any:
    return lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)


def _get_state(original: Any) -> Any:
    return lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()


def _quiet(original: Any) -> Any:
    silent = logging.getLogger(f"{__name__}.silent")
    silent.setLevel(logging.CRITICAL)
    return SimpleNamespace(getLogger=lambda name: silent)


def _get_default_state(original: Any) -> Any:
    return lambda device="cuda": torch.get_rng_state()


def _manual_seed(original: Any) -> Any:
    return lambda seed: torch.default_generator.manual_seed(seed)


def _torch_norm(original: Any) -> Any:
    """Under sequence parallelism only the fused norms mark their parameters, whose gradients are
    then added over the TP group; torch's norm asserts instead."""

    def make(cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
        plain = copy.copy(config)
        plain.sequence_parallel = False
        norm = original(cls, plain, *args, **kwargs)
        for param in norm.parameters():
            param.sequence_parallel = config.sequence_parallel
        return norm

    return make


def _gating_without_kernels(original: Any) -> Any:
    def router_gating_linear(
        inp: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, router_dtype: Any
    ) -> torch.Tensor:
        wide = None if bias is None else bias.to(router_dtype)
        return torch.nn.functional.linear(inp.to(router_dtype), weight.to(router_dtype), wide)

    return router_gating_linear


def _not_compiled(original: Any) -> Any:
    return getattr(original, "_torchdynamo_orig_callable", original)


def _record(target: str, make: Callable[[Any], Any], reason: str, *parameters: str) -> PatchRecord:
    """A record whose distribution and range follow from the module of its target."""
    of_megatron = target.startswith("megatron")
    return PatchRecord(
        target=target,
        reason=reason,
        distribution="megatron-core" if of_megatron else "torch",
        valid=VALID if of_megatron else ">=2.13,<2.16",
        make=make,
        parameters=parameters or None,
    )


def _router_records() -> list[PatchRecord]:
    """Of mixtures of experts."""
    router = "megatron.core.transformer.moe.router"
    gating = _record(
        f"{router}:router_gating_linear",
        _gating_without_kernels,
        "without Transformer Engine it asks for a name that is not there",
        *("inp", "weight", "bias", "router_dtype"),
    )
    return [
        dataclasses.replace(gating, gone=">=0.17"),
        _record(
            f"{router}:TopKRouter._apply_expert_bias",
            _not_compiled,
            "it adds up a few numbers, and is compiled for longer than a small job runs",
            *("self", "routing_map", "padding_mask"),
        ),
    ]


def cpu_patches() -> PatchSet:
    """All records for training on CPU."""
    device = "the device is asked from torch.cuda"
    streams = "streams have no meaning on CPU"
    literal = "things are moved to the GPU literally"
    tracker = "the RNG tracker keeps states of the CUDA generator"
    random = "megatron.core.tensor_parallel.random"
    records = [
        _record("torch.cuda:current_device", _returning(torch.device("cpu")), device),
        _record("torch.cuda:current_stream", _returning(_CpuStream()), streams),
        _record("torch.cuda:stream", _returning(contextlib.nullcontext()), streams),
        _record("torch.cuda:Stream", lambda original: _CpuStream, streams),
        _record("torch.cuda:synchronize", _returning(None), "no device to wait for"),
        _record("torch.cuda:empty_cache", _returning(None), "no device to act on"),
        _record("torch.cuda:set_device", _returning(None), "no device to choose"),
        _record("torch.cuda:manual_seed", _manual_seed, tracker, "seed"),
        _record("torch.cuda:get_rng_state", _get_default_state, tracker, "device"),
        _record("torch:Tensor.cuda", _same_tensor, literal),
        _record("torch.nn:Module.cuda", _same_tensor, literal),
        _record("torch:Tensor.type", _cuda_type_name, "dtypes are compared with CUDA type names"),
        *(
            _record(f"torch:{name}", _on_cpu, 'device="cuda" is written literally')
            for name in _FACTORIES
        ),
        _record(
            f"{random}:logging",
            _quiet,
            "its fork() warns of the CPU generator, which on CPU is the tracked one",
        ),
        _record(
            f"{random}:_set_cuda_rng_state",
            _set_state,
            tracker,
            "new_state",
            "device",
            "graph_safe",
        ),
        _record(
            f"{random}:_get_cuda_rng_state", _get_state, tracker, "device", "clone", "graph_safe"
        ),
        _record(
            "megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__",
            _torch_norm,
            "sequence parallelism needs the fused norms, which need a GPU",
        ),
        *_router_records(),
    ]
    return PatchSet(records)
