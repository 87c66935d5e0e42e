"""The parts of the state that a step of an engine changes or relies on, beside its shards.

An engine's script owns its loop, whose body cannot be called again: what changes there is
put back with the step that is redone, and runs again with it.
"""

import random
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash

from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.kept import accessors, kept_objects
from elaswave_plugin.step_state.step_state import Part, copied, digest_of, named_settings
from elaswave_plugin.values.detached import detached_copy
from elaswave_plugin.values.plain import gathered

# What torch.nn.BatchNorm1d and its like have: averages over batches, and how many there were.
_AVERAGES, _COUNTS = ("running_mean", "running_var"), ("num_batches_tracked",)


class Changing:
    """Names of the buffers that passes change: whatever the first step has changed anywhere."""

    def __init__(self, *, why_not: Callable[[str], str | None]) -> None:
        """``why_not(name)``: why a buffer that passes change is not carried; None where it is."""
        self._why_not = why_not
        self._found: set[str] = set()
        self.names: tuple[str, ...] | None = None
        """None before the first step is complete."""

    @property
    def may_change(self) -> bool:
        """True if passes change any, or may, as is not known yet."""
        return self.names is None or bool(self.names)

    def know(self, names: tuple[str, ...] | None) -> None:
        """Have these names; None: the first step begins, again."""
        self.names, self._found = names, set()

    def check(
        self, values: Iterable[tuple[str, torch.Tensor]], before: Mapping[str, torch.Tensor]
    ) -> None:
        """Raise ConfigurationError for a value that passes have changed and may not change.

        ``before``: those before the step.
        """
        for name, tensor in values:
            if name not in before or name in (self.names or ()):
                continue
            if torch.equal(copied(tensor), before[name]):
                continue
            why = self._why_not(name)
            if why is None and self.names is not None:
                why = "it did not in the first step, which says what is changed"
            if why is not None:
                raise ConfigurationError(
                    f"the forward pass changes the model's buffer {name!r}, which is not carried "
                    f"through a loss ({why}): use a layer without running statistics, or change it "
                    "between the steps, in the body of the loop"
                )
            self._found.add(name)

    def settle(self) -> tuple[str, ...]:
        """The passes of a step are done; returns what they may change (collective over WORLD)."""
        if self.names is None:
            everyone = gathered(sorted(self._found))
            self.names = tuple(sorted({name for names in everyone for name in names}))
        return self.names


def why_no_average(name: str) -> str | None:
    """Return why a buffer that passes change is not averaged; None for a running statistic."""
    if name.rpartition(".")[2] in (*_AVERAGES, *_COUNTS):
        return None
    return f"only {' and '.join(_AVERAGES)} are, which are averaged over the workers"


@torch.no_grad()
def average(values: Mapping[str, torch.Tensor], names: Sequence[str]) -> None:
    """Average running statistics over WORLD in place, in rank order; counts are the largest."""
    for name in names:
        value = values[name].detach().clone()
        if name.rpartition(".")[2] in _COUNTS:
            dist.all_reduce(value, op=dist.ReduceOp.MAX)
        else:
            dist.all_reduce(value)
            value /= dist.get_world_size()
        values[name].copy_(value)


class Generators(Part):
    """Torch's generators of the host and the device, NumPy's and Python's."""

    name = "the random generators"

    def keep(self) -> tuple[Any, ...]:
        """Their states."""
        device = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
        return torch.get_rng_state(), device, np.random.get_state(), random.getstate()

    def put_back(self, kept: Any) -> None:
        """Install them."""
        host, device, numpy, python = kept
        torch.set_rng_state(host)
        if device is not None:
            torch.cuda.set_rng_state(device)
        np.random.set_state(numpy)
        random.setstate(python)


class Buffers(Part):
    """Tensors of the modules that are no parameters; running statistics are averaged."""

    name = "the model's buffers"
    of_bodies = True

    def __init__(self, model: torch.nn.Module, *, refused: str | None = None) -> None:
        """``refused``: why what passes change is not carried here; None where it is averaged."""
        self._model = model
        self._changing = Changing(why_not=lambda name: refused or why_no_average(name))

    def keep(self) -> dict[str, Any]:
        """A copy of each, by name, and what passes change."""
        values = {name: copied(tensor) for name, tensor in self._model.named_buffers()}
        return {"values": values, "changing": self._changing.names}

    @torch.no_grad()
    def put_back(self, kept: Any) -> None:
        """Install those that are there; a first pass may make more."""
        self._changing.know(kept["changing"])
        for name, tensor in self._model.named_buffers():
            value = kept["values"].get(name)
            if value is not None and value.shape == tensor.shape:
                tensor.copy_(value)

    def check(self, kept: Any) -> None:
        """Raise ConfigurationError for one that passes have changed and may not change."""
        self._changing.check(self._model.named_buffers(), kept["values"])

    def agree(self) -> None:
        """The passes of a step are done: average what they changed (collective over WORLD)."""
        average(dict(self._model.named_buffers()), self._changing.settle())

    def proof(self) -> int:
        """Digest what is averaged; a later worker is given the others when it has entered."""
        digest = xxhash.xxh3_64()
        values = dict(self._model.named_buffers())
        for name in self._changing.names or ():
            digest.update(f"{name} {digest_of(values[name])}".encode())
        return digest.intdigest() >> 1


class Settings(Part):
    """All that is set in the optimizer's groups, by the scheduler or by the loop's body."""

    name = "the settings of the optimizer's groups"
    of_bodies = True

    def __init__(self, optimizer: Any) -> None:
        """``optimizer``: torch's, whose groups the engine reads in its step."""
        self._optimizer = optimizer

    def keep(self) -> list[dict[str, Any]]:
        """Each group without its parameters."""
        return [
            detached_copy({key: value for key, value in group.items() if key != "params"})
            for group in self._optimizer.param_groups
        ]

    def put_back(self, kept: Any) -> None:
        """Install them."""
        for group, one in zip(self._optimizer.param_groups, kept, strict=True):
            group.update(detached_copy(one))

    def proof(self) -> int:
        """Of the groups."""
        return xxhash.xxh3_64_intdigest(repr(self.keep()).encode()) >> 1

    def told(self) -> dict[str, str]:
        """Each setting by its name and group."""
        return named_settings(self.keep())


class Weights(Part):
    """Trained weights that the body of the loop has changed since they were sealed."""

    name = "the trained weights"
    of_bodies = True

    def __init__(self, model: torch.nn.Module, *, whole: bool) -> None:
        """``whole``: every worker holds all of each weight, so that no worker's change is lost."""
        self._model = model
        self._whole = whole
        self._sealed: dict[str, int] = {}

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, param in self._model.named_parameters():
            if param.requires_grad:
                yield name, getattr(param, "ds_tensor", param)

    def sealed(self) -> None:
        """Remember what was sealed, by digest."""
        self._sealed = {name: digest_of(weight) for name, weight in self._weights()}

    def keep(self) -> dict[str, torch.Tensor]:
        """Copies of those that were changed; raises ConfigurationError where they are cut."""
        changed = {
            name: copied(weight)
            for name, weight in self._weights()
            if name in self._sealed and digest_of(weight) != self._sealed[name]
        }
        if changed and not self._whole:
            raise ConfigurationError(
                f"the loop changes the weight {next(iter(changed))!r} between two steps, of which "
                "each worker has a part, which a loss would undo: use ZeRO 0 to 2, or leave it out"
            )
        return changed

    def whole(self) -> dict[str, torch.Tensor]:
        """Copies of all of them."""
        return {name: copied(weight) for name, weight in self._weights()}

    @torch.no_grad()
    def put_back(self, kept: Any) -> None:
        """Install them on top of what was sealed."""
        for name, weight in self._weights():
            if name in kept:
                weight.copy_(kept[name])

    def proof(self) -> int:
        """Of all of them, where every worker has them."""
        digest = xxhash.xxh3_64()
        for name, weight in self._weights() if self._whole else ():
            digest.update(f"{name} {digest_of(weight)}".encode())
        return digest.intdigest() >> 1


class Frozen(Part):
    """Weights that are not trained, which may change only as an object that is kept.

    The engine broadcasts them at the start, and a survivor gives them to a later worker, once that
    one is in. Of those that ZeRO-3 has cut, each worker looks at its own part.
    """

    name = "weights that are not trained"

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._digests: dict[str, int] = {}
        # The parts that the digests are of, as a recovery cuts them again.
        self._parts: dict[str, weakref.ref[torch.Tensor]] = {}

    def keep(self) -> None:
        """Raise ConfigurationError where one was changed since the last step."""
        for name, param in self._unkept():
            part = getattr(param, "ds_tensor", None)
            digest = digest_of(param if part is None else part)
            if part is not None and (name not in self._parts or self._parts[name]() is not part):
                self._parts[name] = weakref.ref(part)
                self._digests.pop(name, None)
            if self._digests.setdefault(name, digest) != digest:
                raise ConfigurationError(
                    f"the weight {name!r} is not trained, and was changed between two steps, which "
                    "would be done once more, or not at all, where a loss has a step redone: call "
                    "elaswave_plugin.keep(name, module) with its module before the loop, and with "
                    "a dict that holds the step of the last change, in place of a variable"
                )

    def put_back(self, kept: Any) -> None:
        """They are as they were."""

    def _unkept(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Those that belong to no object that the script keeps."""
        frozen = [one for one in self._model.named_parameters() if not one[1].requires_grad]
        kept = set(_kept_places()) if frozen else set()
        return ((name, param) for name, param in frozen if param.data_ptr() not in kept)


def _kept_places() -> Iterator[int]:
    """Yield the addresses of the tensors of kept objects."""
    for name, value in kept_objects().items():
        state = accessors(name, value)[0]()
        for one in state.values() if isinstance(state, dict) else ():
            if isinstance(one, torch.Tensor):
                yield one.data_ptr()
