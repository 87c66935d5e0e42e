"""Writes what a run's workers have at each step, and in each micro-batch, for the comparison.

One file a process: lines of JSON, each of which says worker, view and step.
"""

import hashlib
import json
import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from numbers import Number
from typing import Any, Protocol

import numpy as np
import torch

from elaswave_plugin.kept import accessors, kept_objects
from elaswave_plugin.recovery.worker import Worker
from elaswave_plugin.rehearsal.order import RunOrder
from elaswave_plugin.rehearsal.reach import (
    Found,
    Plain,
    attributes,
    frames_of_the_script,
    modules_of_the_script,
)
from elaswave_plugin.step_state.step_state import copied, digest_of
from elaswave_plugin.values.plain import encode

STATE, PASS, LOSSES, RESULT, FACTS = "state", "pass", "losses", "result", "facts"
_LONGEST = 40


class Carried(Protocol):
    """The part of a step that an adapter carries, for the records."""

    @property
    def facts(self) -> dict[str, Any]:
        """The facts of the job: `schedule.Facts` by name."""

    @property
    def part(self) -> str:
        """The part of the model that this worker has; others may have it too."""

    def tensors(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Return weights and buffers by names that are alike on all their holders."""

    def settings(self) -> Mapping[str, Any]:
        """Plain settings of the optimizer's groups, and the like."""

    def models(self) -> Iterable[tuple[str, torch.nn.Module]]:
        """Its modules, whose own attributes are the script's where it defines their class."""

    def owned(self) -> Iterable[object]:
        """Objects that the job carries itself, which are not looked into again."""


class Recorder:
    """The records of one worker."""

    def __init__(self, worker: Worker, carried: Carried, order: RunOrder) -> None:
        self._worker = worker
        self._carried = carried
        name = f"{worker.slot}-{worker.member.incarnation}.jsonl"
        self._file = (order.records / name).open("a", buffering=1)
        self.kind = "training"
        """What passes are for."""
        self.samples = ""
        """Of the present pass, or the last one."""
        self._calls: Counter[str] = Counter()
        # The number of the first work behind each step, of all works of the job.
        self._works: dict[int, int] = {}
        self._returned: list[tuple[str, Any]] = []
        self._pass: dict[str, Any] = {}
        self._begun: int | None = None
        self._write(FACTS, carried.facts | {"files": self._files()})

    def _files(self) -> list[str]:
        frames = [frame.f_code.co_filename for frame in frames_of_the_script()]
        modules = [one.__file__ for one in modules_of_the_script().values() if one.__file__]
        return list(dict.fromkeys([*frames, *modules]))

    # ---- between two steps ----------------------------------------------------------------------

    def state(self, step: int) -> None:
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

    def returned(self, phase: str, result: Any) -> None:
        """A part of a work between two steps is over, as an evaluation with its loss."""
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
            said = {f"{name}{part}": _shown(one) for part, one in _leaves(result)}
            if said:
                self._write(RESULT, {"at": at, "results": said})
        self._returned.clear()

    def repeats(self, step: int) -> None:
        """Forget the works behind a step that is made again, as they are, too."""
        self._works = {at: number for at, number in self._works.items() if at <= step}

    def attempt(self) -> None:
        """A step, or work between two steps, begins or begins again."""
        self._calls.clear()

    # ---- a micro-batch --------------------------------------------------------------------------

    def begin_pass(self, samples: str) -> None:
        """The forward pass of these samples begins."""
        self.samples = samples
        name = f"{self.kind}, {samples}"
        self._pass = {"at": self._worker.completed, "pass": name, "call": self._calls[name]}
        self._calls[name] += 1
        self._pass["draws"] = generators()

    def batch(self, batch: Any) -> None:
        """The pass has read this."""
        self._pass["batch"] = plain_digest(batch)

    def end_pass(self) -> None:
        """It is over."""
        drawn = generators()
        before = self._pass["draws"]
        self._pass["draws"] = {name: one for name, one in before.items() if drawn[name] != one}
        self._write(PASS, self._pass)

    def losses(self, losses: Mapping[str, Any]) -> None:
        """Record what each micro-batch of the present step has reported here."""
        said = {name: plain_digest(one) for name, one in losses.items()}
        self._write(LOSSES, {"at": self._worker.completed, "losses": said})

    def _write(self, kind: str, said: Mapping[str, Any]) -> None:
        worker = self._worker
        incarnation = worker.member.incarnation
        who = {"slot": worker.slot, "incarnation": incarnation, "view": worker.view.epoch}
        line = {"kind": kind, **who, "part": self._carried.part, **said}
        self._file.write(json.dumps(line) + "\n")


def facts_of(worker: Worker, *, rotates: bool) -> dict[str, Any]:
    """`schedule.Facts` by name; ``rotates``: micro-batches are dealt whole."""
    layout = worker.placement.described()
    width = len(worker.launch_slots) if layout is None else int(layout["dp"])
    return {
        "width": width,
        "parts": len(worker.launch_slots) // width,
        "exact": worker.config.consistency == "exact",
        "returns": worker.config.respawn > 0 and worker.config.snapshots,
        "rotates": rotates,
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
    """Yield numbers, texts, tensors and arrays in containers, by where they are."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        named = [(f".{name}", one) for name, one in zip(value._fields, value, strict=True)]
    elif isinstance(value, Mapping):
        named = [(f"[{key!r}]", one) for key, one in value.items()]
    elif isinstance(value, list | tuple):
        named = [(f"[{number}]", one) for number, one in enumerate(value)]
    else:
        if isinstance(value, bool | int | float | str | torch.Tensor | np.ndarray):
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
    return _short(repr(_said(value)).encode())


def _said(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return ("tensor", str(value.dtype), tuple(value.shape), digest_of(value))
    if isinstance(value, Mapping):
        return [(str(key), _said(one)) for key, one in value.items()]
    if isinstance(value, list | tuple):
        return [_said(one) for one in value]
    if isinstance(value, np.ndarray):
        return ("array", str(value.dtype), value.shape, _short(value.tobytes()))
    if isinstance(value, float):
        return value.hex()
    return repr(value) if isinstance(value, bool | int | str | None) else type(value).__name__


def _digest_of_state(name: str, value: Any) -> str:
    return plain_digest(copied(accessors(name, value)[0]()))


def _short(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
