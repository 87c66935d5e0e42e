"""Finds tensors, generators and plain values that a script's objects hold, and digests them.

Looked into are modules, optimizers, containers, and objects of classes that the script defines;
what a framework keeps for itself is its adapter's business.
"""

import random
import sys
import sysconfig
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Set
from functools import cache
from numbers import Number
from pathlib import Path
from types import (
    FrameType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

import numpy as np
import torch
import xxhash

from elaswave_plugin.adapters.closure import nonlocals_of
from elaswave_plugin.step_state.step_state import digest_of
from elaswave_plugin.values.plain import encode

_DEEPEST, _MOST, _LONGEST = 8, 20_000, 4096
_FRAMEWORKS = ("torch", "megatron", "deepspeed", "numpy", "elaswave_plugin", "transformer_engine")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
# How far objects of libraries are passed through, and what in them: a trainer's callbacks.
_THROUGH, _FEW = 3, 100
Plain = Number | str | None


class Found:
    """The state that was found: digests of tensors by name, and plain values by name."""

    def __init__(self, *, besides: Iterable[object] = ()) -> None:
        """``besides``: objects that are looked at elsewhere."""
        # Kept alive, so that no other object has their number meanwhile.
        self._seen: dict[int, object] = {id(one): one for one in besides}
        self.tensors: dict[str, int] = {}
        self.values: dict[str, Plain] = {}

    def frame(self, frame: FrameType) -> None:
        """The variables of a function of the script that runs, or of its file."""
        name = frame.f_code.co_name
        prefix = "" if name == "<module>" else f"{name}."
        for variable, value in list(frame.f_locals.items()):
            if not variable.startswith("__"):
                self.look(f"{prefix}{variable}", value)

    def look(self, name: str, value: Any, depth: int = 0) -> None:
        """Note a value, and what is in it."""
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, Plain):
            if len(self.values) < _MOST and not (isinstance(value, str) and len(value) > 200):
                self.values[name] = value
            return
        if id(value) in self._seen or depth > _DEEPEST or len(self._seen) > _MOST:
            return
        self._seen[id(value)] = value
        if isinstance(value, torch.Tensor):
            self.tensors[name] = digested(value)
        elif (state := _state_of(value)) is not None:
            self.tensors[name] = xxhash.xxh3_64_intdigest(encode(state)) >> 1
        elif isinstance(value, np.ndarray) and value.dtype != object:
            self.tensors[name] = xxhash.xxh3_64_intdigest(value.tobytes()) >> 1
        else:
            for part, inner in _parts(value):
                self.look(f"{name}{part}", inner, depth + 1)


def _state_of(value: Any) -> Any:
    """That of a generator of torch, NumPy or Python; None of anything else."""
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, np.random.RandomState):
        return value.get_state()
    return value.getstate() if isinstance(value, random.Random) else None


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, torch.nn.Module):
        yield from _of_module(value)
    elif isinstance(value, torch.optim.Optimizer):
        yield ".state_dict()", value.state_dict()
    elif isinstance(value, Mapping):
        yield from ((f"[{key!r}]", one) for key, one in _first(list(value.items())))
    elif isinstance(value, Set):
        yield ".__len__()", len(value)
    elif isinstance(value, SimpleNamespace):
        yield from _of_dict(value)
    elif isinstance(value, list | tuple | deque):
        yield from ((f"[{number}]", one) for number, one in enumerate(_first(list(value))))
    elif isinstance(value, FunctionType):
        if of_the_script(value.__module__):
            yield from ((f".{name}", one) for name, one in nonlocals_of(value))
            yield from ((f".{name}", one) for name, one in vars(value).items())
    elif isinstance(value, MethodType):
        yield ".__self__", value.__self__
    elif isinstance(value, type):
        if of_the_script(value.__module__):
            items = list(vars(value).items())
            yield from ((f".{name}", one) for name, one in items if not name.startswith("__"))
    elif _is_of_the_script(value):
        yield ".__class__", type(value)
        yield from _attributes_of(value)
    else:
        yield from _held_by(value, _THROUGH)


def _held_by(value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    """Yield the script's own objects in one of a library, as the callbacks of a trainer."""
    if isinstance(value, Mapping | list | tuple):
        parts = _parts(value) if len(value) <= _FEW else ()
    elif isinstance(value, ModuleType | type | torch.Tensor) or _is_of_a_framework(value):
        return
    else:
        parts = _of_dict(value)
    for name, one in parts:
        if _is_of_the_script(one):
            yield name, one
        elif depth:
            yield from ((name + part, inner) for part, inner in _held_by(one, depth - 1))


def _attributes_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what an object has in its dict, and in the slots of its classes."""
    slots = [
        name
        for one in type(value).__mro__
        for name, member in vars(one).items()
        if isinstance(member, MemberDescriptorType) and hasattr(value, name)
    ]
    yield from ((f".{name}", getattr(value, name)) for name in slots)
    yield from _of_dict(value)


def _of_dict(value: Any) -> Iterator[tuple[str, Any]]:
    yield from ((f".{name}", one) for name, one in list(getattr(value, "__dict__", {}).items()))


def _is_of_the_script(value: Any) -> bool:
    return not isinstance(value, ModuleType) and of_the_script(type(value).__module__)


def _is_of_a_framework(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] in _FRAMEWORKS


def _of_module(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    yield from ((f".{name}", one) for name, one in module._parameters.items() if one is not None)
    yield from ((f".{name}", one) for name, one in module._buffers.items() if one is not None)
    yield from ((f".{name}", one) for name, one in module._modules.items() if one is not None)
    yield from ((f".{name}", one) for name, one in attributes(module))


def attributes(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield what the script has set in a module beside tensors: in its own classes, in hooks."""
    if of_the_script(type(module).__module__):
        ours = torch.nn.Module().__dict__.keys()
        yield from ((name, one) for name, one in list(vars(module).items()) if name not in ours)
    for kind in _HOOKS:
        for hook in list(vars(module)[kind].values()):
            if isinstance(hook, FunctionType) and of_the_script(hook.__module__):
                yield hook.__name__, hook


def of_the_script(module: str | None) -> bool:
    """Return whether a module is the script's own: no framework, no library."""
    if module is None or module.partition(".")[0] in _FRAMEWORKS:
        return False
    return module == "__main__" or is_own(getattr(sys.modules.get(module), "__file__", None))


# Asked before each step for every module of the frameworks, thousands of them: answered once.
@cache
def is_own(file: str | None) -> bool:
    """Return whether a file is one of the script's: no library, nothing of this package."""
    if file is None or file.startswith("<") or _is_of_a_library(file):
        return False
    return not _is_of_a_library(str(Path(file).resolve()))


def _is_of_a_library(path: str) -> bool:
    parts = ("/site-packages/", "/dist-packages/", "/megatron/core/", "/megatron/training/")
    return path.startswith(_libraries()) or any(part in path for part in parts)


@cache
def _libraries() -> tuple[str, ...]:
    """The folders of Python's own modules, of installed ones, and of this package."""
    paths = sysconfig.get_paths()
    package = str(Path(__file__).resolve().parents[1])
    return paths["stdlib"], paths["platstdlib"], paths["purelib"], paths["platlib"], package


def frames_of_the_script() -> list[FrameType]:
    """The script's own frames on the stack of this thread, the outermost last."""
    found, frame = [], sys._getframe()
    while frame is not None:
        if is_own(frame.f_code.co_filename):
            found.append(frame)
        frame = frame.f_back  # type: ignore[assignment]
    return found


def modules_of_the_script() -> dict[str, ModuleType]:
    """The files that the script has imported of its own, by module name."""
    found = {name: one for name, one in list(sys.modules.items()) if name != "__main__"}
    return {name: one for name, one in found.items() if is_own(getattr(one, "__file__", None))}


def digested(tensor: torch.Tensor) -> int:
    """A digest of dtype, shape and bits; of values that are nowhere only dtype and shape."""
    said = f"{tensor.dtype} {tuple(tensor.shape)}".encode()
    digest = xxhash.xxh3_64(said)
    if tensor.numel() and tensor.layout == torch.strided and tensor.device.type != "meta":
        digest.update(digest_of(tensor).to_bytes(8, "little"))
    return digest.intdigest() >> 1


def _first(items: list[Any]) -> list[Any]:
    return items[:_LONGEST]
