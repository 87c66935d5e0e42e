"""Writes what a run's workers have at each step, and in each micro-batch, for the comparison.

One file a process: lines of JSON, each of which says worker, view and step.
"""

import hashlib
import json
import math
import random
import sys
import sysconfig
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import cache
from importlib import import_module
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
from typing import Any, cast

import numpy as np
import torch
import xxhash

from elaswave_plugin.adapters.closure import nonlocals_of
from elaswave_plugin.config import SAVE_PHASE
from elaswave_plugin.core.recovery_plan.placement import ShardGroup
from elaswave_plugin.framework import Framework
from elaswave_plugin.kept import accessors, kept_objects
from elaswave_plugin.recovery.worker import Worker
from elaswave_plugin.rehearsal.files import LedSaves
from elaswave_plugin.rehearsal.order import RunOrder
from elaswave_plugin.step_state.step_state import copied, digest_of
from elaswave_plugin.values.plain import encode

_DEEPEST, _MOST, _LONGEST_LIST = 8, 20_000, 4096
_FRAMEWORKS = ("torch", "megatron", "deepspeed", "numpy", "elaswave_plugin", "transformer_engine")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
# How far objects of libraries are passed through, and what in them: a trainer's callbacks.
_THROUGH, _FEW = 3, 100
Plain = Number | str | None


class Found:
    """The state that a script's objects hold: digests of tensors and plain values, by name.

    Looked into are modules, optimizers, containers, and objects of classes that the script defines;
    what a framework keeps for itself is its adapter's business.
    """

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
    return items[:_LONGEST_LIST]


STATE, PASS, LOSSES, RESULT, FACTS = "state", "pass", "losses", "result", "facts"
_LONGEST = 40
# What work between steps returns and is compared.
_NUMBERS = (bool, int, float, str, torch.Tensor, np.ndarray)
# Adapter of the framework that a job binds -> what records it.
_OURS = "elaswave_plugin.rehearsal."
_RECORDED = (
    ("elaswave_plugin.adapters.megatron.", _OURS + "of_megatron", "CarriedMegatron"),
    ("elaswave_plugin.adapters.deepspeed.", _OURS + "of_deepspeed", "CarriedEngine"),
)


class Carried(ABC):
    """The part of a step that an adapter carries, for the records."""

    rotates = False
    """True if micro-batches are dealt whole, so that each may be another worker's."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    @property
    def shard_group(self) -> ShardGroup | None:
        """That of this worker; None for a free one."""
        return self.worker.placement.shard_group_of(self.worker.slot)

    @property
    def part(self) -> str:
        """The part of the model that this worker has, as others may; none for a free one."""
        one = self.shard_group
        return "" if one is None else f"stage {one.stage} tp {one.tp}"

    @property
    @abstractmethod
    def groups(self) -> Sequence[Mapping[str, Any]]:
        """The optimizer's groups."""

    def settings(self) -> Mapping[str, str]:
        """Plain settings of the optimizer's groups."""
        return {
            f"optimizer group {number} {key!r}": repr(value)
            for number, group in enumerate(self.groups)
            for key, value in group.items()
            if isinstance(value, bool | int | float | str | tuple | list | None) and key != "params"
        }

    @abstractmethod
    def tensors(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Return weights and buffers by names that are alike on all their holders."""

    @abstractmethod
    def models(self) -> Iterable[tuple[str, torch.nn.Module]]:
        """Its modules, whose own attributes are the script's where it defines their class."""

    @abstractmethod
    def owned(self) -> Iterable[object]:
        """Objects that the job carries itself, which are not looked into again."""

    def may_spread(self) -> bool:
        """Return whether several replicas may run micro-batches of one."""
        return False


def observer(path: Path, worker: Worker, framework: Framework) -> Callable[..., None]:
    """The worker is bound in the rehearsal's run that ``path`` orders; records what it tells."""
    order = RunOrder.read(path)
    name = type(framework).__module__
    ours, carrier = next(ours for adapter, *ours in _RECORDED if name.startswith(adapter))
    carried: Carried = getattr(import_module(ours), carrier)(worker, framework)
    if order.rotates:
        deal, spread = worker.deal, carried.may_spread()
        worker.deal = lambda **over: cast(Any, deal(**over)).rotated(spread=spread)
        worker.dataflow = worker.deal(**worker.placement.dealt_over)
    return Recorder(carried, order)


class Recorder:
    """The records of one worker; called with the name of what it tells, which is a method here."""

    def __init__(self, carried: Carried, order: RunOrder) -> None:
        self._worker = worker = carried.worker
        self._carried = carried
        self._saves = LedSaves(order.saves, free=order.folder)
        name = f"{worker.slot}-{worker.member.incarnation}.jsonl"
        self._file = (order.records / name).open("a", buffering=1)
        self._samples = ""
        self._calls: Counter[str] = Counter()
        # The number of the first work behind each step, of all works of the job.
        self._works: dict[int, int] = {}
        self._returned: list[tuple[str, Any]] = []
        self._pass: dict[str, Any] = {}
        self._begun: int | None = None
        self._write(FACTS, {**_facts_of(carried), "files": self._files()})

    def __call__(self, what: str, *told: Any) -> None:
        getattr(self, what)(*told)

    def _files(self) -> list[str]:
        frames = [frame.f_code.co_filename for frame in frames_of_the_script()]
        modules = [one.__file__ for one in modules_of_the_script().values() if one.__file__]
        return list(dict.fromkeys([*frames, *modules]))

    # ---- between two steps ----------------------------------------------------------------------

    def begun(self, step: int, repeats_bodies: bool) -> None:
        """An attempt of a step begins; its works are made again where bodies are repeated."""
        if repeats_bodies:
            self._works = {at: number for at, number in self._works.items() if at <= step}
        self._state(step)

    def closed(self) -> None:
        """The last step is over."""
        self._state(self._worker.completed)

    def _state(self, step: int) -> None:
        """All that is there before ``step`` begins, or after the last one."""
        carried = self._carried
        self._calls.clear()
        tensors = {name: digest_of(tensor) for name, tensor in carried.tensors()}
        found = Found(besides=carried.owned())
        for prefix, one in carried.models():
            for name, value in attributes(one):
                found.look(f"model.{prefix}{name}", value)
        for name, module in modules_of_the_script().items():
            found.look(name, vars(module))
        for frame in frames_of_the_script():
            found.frame(frame)
        kept = {
            f"kept {name!r}": _digest_of_state(name, one) for name, one in kept_objects().items()
        }
        self._write(
            STATE,
            {
                "at": step,
                "tensors": tensors,
                "settings": dict(carried.settings()),
                "kept": kept,
                "draws": self._drawn_by_body(step),
                "script": found.tensors,
                "values": {name: _said_plain(value) for name, value in found.values.items()},
            },
        )

    def _drawn_by_body(self, step: int) -> dict[str, str]:
        """The generators as the loop's body has left them; none where it has not just run here."""
        before, self._begun = self._begun, max(step, self._begun or step)
        return generators() if before is not None and step == before + 1 else {}

    def announced(self, phase: str) -> None:
        """A part of a work between two steps begins, or begins again."""
        self._calls.clear()
        if phase == SAVE_PHASE:
            self._saves.begin()

    def returned(self, phase: str, result: Any) -> None:
        """It is over, as an evaluation with its loss."""
        if phase == SAVE_PHASE:
            self._saves.end()
        self._returned.append((phase, result))

    def interrupted(self) -> None:
        """The work that runs is made again, if not all have completed it."""
        self._returned.clear()

    def worked(self, number: int) -> None:
        """Record the results of a work that all have completed, after ``number`` others."""
        at = self._worker.completed
        place = number - self._works.setdefault(at, number)
        for order, (phase, result) in enumerate(self._returned):
            numbers = (place + 1, order + 1) if order else (place + 1,) if place else ()
            name = " ".join([phase, *map(str, numbers)])
            leaves = [one for one in _leaves(result) if isinstance(one[1], _NUMBERS)]
            said = {f"{name}{part}": _shown(one) for part, one in leaves}
            if said:
                self._write(RESULT, {"at": at, "results": said})
        self._returned.clear()

    # ---- a micro-batch --------------------------------------------------------------------------

    def pass_begun(
        self,
        start: int,
        stop: int,
        chunk: Any = None,
        iterator: Any = None,
        evaluates: bool = False,
    ) -> None:
        """The forward pass of these samples begins."""
        if hasattr(iterator, "observe"):
            iterator.observe = self
        number = getattr(chunk, "vp_stage", None)
        chunk_said = f" in chunk {number}" if number else ""
        self._samples = f"samples {start} to {stop - 1}{chunk_said}"
        name = f"{'evaluation' if evaluates else 'training'}, {self._samples}"
        self._pass = {"at": self._worker.completed, "pass": name, "call": self._calls[name]}
        self._calls[name] += 1
        self._pass["draws"] = generators()

    def batch(self, batch: Any) -> None:
        """The pass has read this."""
        self._pass["batch"] = plain_digest(batch)

    def passed(self) -> None:
        """It is over."""
        drawn = generators()
        before = self._pass["draws"]
        self._pass["draws"] = {name: one for name, one in before.items() if drawn[name] != one}
        self._write(PASS, self._pass)

    def reported(self, numbers: Sequence[object], losses: Sequence[Any]) -> None:
        """Record the losses of micro-batches of the present step; of none, of the present pass."""
        names = [f"micro-batch {number}" for number in numbers] or [self._samples]
        said = {name: plain_digest(one) for name, one in zip(names, losses, strict=False)}
        self._write(LOSSES, {"at": self._worker.completed, "losses": said})

    def _write(self, kind: str, said: Mapping[str, Any]) -> None:
        worker = self._worker
        incarnation = worker.member.incarnation
        who = {"slot": worker.slot, "incarnation": incarnation, "view": worker.view.epoch}
        line = {"kind": kind, **who, "part": self._carried.part, **said}
        self._file.write(json.dumps(line) + "\n")


def _facts_of(carried: Carried) -> dict[str, Any]:
    """The facts of the launch: `schedule.Facts` by name."""
    worker = carried.worker
    layout = worker.placement.described()
    width = len(worker.launch_slots) if layout is None else int(layout["dp"])
    return {
        "width": width,
        "parts": len(worker.launch_slots) // width,
        "exact": worker.config.consistency == "exact",
        "returns": worker.config.respawn > 0 and worker.config.snapshots,
        "rotates": carried.rotates,
    }


def generators() -> dict[str, str]:
    """A digest of each generator that a script draws from without having made it."""
    states = {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy.random": encode(np.random.get_state()),
        "random": encode(random.getstate()),
    }
    if torch.cuda.is_available():
        states["torch.cuda"] = torch.cuda.get_rng_state().numpy().tobytes()
    return {name: _short(state) for name, state in states.items()}


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield what containers hold, by where it is."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        named = [(f".{name}", one) for name, one in zip(value._fields, value, strict=True)]
    elif isinstance(value, Mapping):
        named = [(f"[{key!r}]", one) for key, one in value.items()]
    elif isinstance(value, list | tuple):
        named = [(f"[{number}]", one) for number, one in enumerate(value)]
    else:
        yield path, value
        return
    for name, one in named:
        yield from _leaves(one, path + name)


def _shown(value: Any) -> str:
    """A number as Python writes it, to the bit; a digest of what is longer."""
    if isinstance(value, torch.Tensor | np.ndarray):
        if math.prod(value.shape) != 1:
            return plain_digest(value)
        value = value.item()
    text = repr(value)
    return text if len(text) <= _LONGEST else plain_digest(value)


def _said_plain(value: Plain) -> str:
    return str(value) if isinstance(value, Number) else repr(value)


def plain_digest(value: Any) -> str:
    """A digest of tensors and plain values, in containers."""
    return _short(repr([(path, _told(one)) for path, one in _leaves(value)]).encode())


def _told(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return digested(value)
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, _short(value.tobytes())
    return repr(value) if isinstance(value, bool | int | float | str) else type(value).__name__


def _digest_of_state(name: str, value: Any) -> str:
    return plain_digest(copied(accessors(name, value)[0]()))


def _short(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
