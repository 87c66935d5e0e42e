"""Writes what a run's workers have at each step, and in each micro-batch, for the comparison.

One file a process: lines of JSON, each of which says worker, view and step.
"""

import hashlib
import json
import math
import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from numbers import Number
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from elaswave_plugin.config import SAVE_PHASE
from elaswave_plugin.core.recovery_plan.placement import ShardGroup
from elaswave_plugin.framework import Framework
from elaswave_plugin.kept import accessors, kept_objects
from elaswave_plugin.recovery.worker import Worker
from elaswave_plugin.rehearsal.order import RunOrder
from elaswave_plugin.rehearsal.reach import (
    Found,
    Plain,
    attributes,
    digested,
    frames_of_the_script,
    modules_of_the_script,
)
from elaswave_plugin.rehearsal.saves import LedSaves
from elaswave_plugin.step_state.step_state import copied, digest_of
from elaswave_plugin.values.plain import encode

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
