"""The tensors that passes leave in a model beside its weights, for a worker that has run none.

Modules make tables in their first forward pass (places, masks), which a newcomer is given. A model
that differs otherwise fits no newcomer.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from elaswave_plugin.errors import ConfigurationError

_WANTED = (
    "make all of the model in its constructors, not in a pass, and alike on all workers; or set"
    " respawn to 0 and leave --reserve out"
)


class Buffer(NamedTuple):
    """A tensor of a module that is no parameter; without a shape it is None."""

    name: str
    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    persistent: bool


class Structure(NamedTuple):
    """A model without its values: names of modules and parameters, each with its kind; buffers."""

    modules: tuple[tuple[str, str], ...]
    parameters: tuple[tuple[str, str], ...]
    buffers: tuple[Buffer, ...]

    def told(self) -> tuple[Any, ...]:
        """Return it as a plain value."""
        return self.modules, self.parameters, tuple(map(tuple, self.buffers))

    @classmethod
    def of(cls, told: tuple[Any, ...]) -> "Structure":
        """Return the one that was told."""
        modules, parameters, buffers = told
        return cls(modules, parameters, tuple(Buffer(*one) for one in buffers))


def structure_of(model: torch.nn.Module) -> Structure:
    """Return what the model consists of now."""
    # A parameter that ZeRO-3 has cut has its shape in an attribute.
    shapes = ((name, getattr(one, "ds_shape", one.shape)) for name, one in model.named_parameters())
    return Structure(
        modules=tuple((name, type(one).__name__) for name, one in model.named_modules()),
        parameters=tuple((name, str(tuple(shape))) for name, shape in shapes),
        buffers=tuple(buffer for buffer, _ in _buffers(model)),
    )


def fit(model: torch.nn.Module, told: Structure) -> None:
    """Give the model the buffers of the others' model, of undefined values.

    Raises ConfigurationError where the models differ otherwise.
    """
    mine = structure_of(model)
    _compare("module", mine.modules, told.modules)
    _compare("parameter", mine.parameters, told.parameters)
    for buffer in set(mine.buffers) - set(told.buffers):
        owner, _, name = buffer.name.rpartition(".")
        del model.get_submodule(owner)._buffers[name]
    for buffer in told.buffers:
        if buffer not in mine.buffers:
            _make(model, buffer)


def buffers_like(model: torch.nn.Module, told: Structure) -> Iterator[torch.Tensor]:
    """Yield the model's buffers that the structure names; in place of one of another shape, room.

    Tables grow with what passes meet, on each worker by itself.
    """
    device = next(model.parameters()).device
    own = dict(_buffers(model))
    for buffer in told.buffers:
        tensor = own.get(buffer)
        if buffer.shape is not None:
            yield tensor if tensor is not None else _room(buffer, device)


def _buffers(model: torch.nn.Module) -> Iterator[tuple[Buffer, torch.Tensor | None]]:
    for owner, module in model.named_modules():
        for name, tensor in module._buffers.items():
            yield (
                Buffer(
                    name=f"{owner}.{name}" if owner else name,
                    shape=None if tensor is None else tuple(tensor.shape),
                    dtype=None if tensor is None else tensor.dtype,
                    persistent=name not in module._non_persistent_buffers_set,
                ),
                tensor,
            )


def _make(model: torch.nn.Module, buffer: Buffer) -> None:
    owner, _, name = buffer.name.rpartition(".")
    tensor = None if buffer.shape is None else _room(buffer, next(model.parameters()).device)
    try:
        model.get_submodule(owner).register_buffer(name, tensor, persistent=buffer.persistent)
    except KeyError:
        raise ConfigurationError(
            f"the others' model has a buffer {buffer.name!r}, where this worker's has another"
            f" attribute: {_WANTED}"
        ) from None


def _room(buffer: Buffer, device: torch.device) -> torch.Tensor:
    assert buffer.shape is not None
    return torch.zeros(buffer.shape, dtype=buffer.dtype, device=device)


def _compare(what: str, mine: Sequence[Any], told: Sequence[Any]) -> None:
    if mine == told:
        return
    here, there = sorted(set(mine) - set(told)), sorted(set(told) - set(mine))
    differs = f"has its {what}s in another order than the others'"
    if there:
        name, kind = there[0]
        differs = f"has no {what} {name!r} of kind {kind}, which the others' has"
    elif here:
        name, kind = here[0]
        differs = f"has a {what} {name!r} of kind {kind}, which the others' has not"
    raise ConfigurationError(f"this worker's model {differs}: {_WANTED}")
