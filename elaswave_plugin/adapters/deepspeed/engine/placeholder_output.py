"""The output of a dead forward pass: tensors shaped like a real one's, that lead to no parameter.

After an interruption the user's code runs on to its next batch, and needs something to run with.
Where every worker holds the whole model it is the real output of the user's input. In ZeRO stage 3
none can compute that alone, so it has the shape that an input of that size gave before: a single
number, such as a loss, is the one of that time, larger tensors are zeros, and in an evaluation,
whose result counts, everything is NaN. In the first step all compute one output together.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
import torch.distributed as dist

from elaswave_plugin.adapters.deepspeed.engine.output_forms import Forms
from elaswave_plugin.values.plain import gathered, told_by

_INPUT, _OUTPUT = "the batch that the engine is called with", "the output of the engine"
Signature = tuple[tuple[int, ...], ...]


class StandIn:
    """Remembers the outputs of the forward pass by the sizes of its inputs."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.shapes: dict[Signature, Any] = {}
        self._forms = Forms(model)

    def remember(self, inputs: Any, output: Any) -> None:
        """Keep the structure of an output, without its memory.

        Raises ConfigurationError at the first pass whose classes could not be told.
        """
        kept = _map(output, _kept)
        if not self.shapes:
            self._forms.told(inputs, _INPUT)
            self._forms.told(kept, _OUTPUT, lossy=True)
        self.shapes[_signature(inputs)] = kept

    def tell(self) -> list[tuple[Signature, Any]]:
        """Return the structures that a later worker takes, as a plain value."""
        return [
            (signature, self._forms.told(one, _OUTPUT, lossy=True))
            for signature, one in self.shapes.items()
        ]

    def follow(self, told: Sequence[tuple[Signature, Any]]) -> None:
        """Have the structures that another worker told beside those of this one."""
        self.shapes = {signature: self._forms.made(one) for signature, one in told} | self.shapes

    def make(self, inputs: Any, device: torch.device, *, counts: bool) -> Any:
        """Return an output for these inputs; ``counts``: whether its values matter."""
        signature = _signature(inputs)
        known = self.shapes.get(signature)
        if known is None:
            known = self._resized(signature)

        def fill(one: torch.Tensor) -> torch.Tensor:
            if counts and one.is_floating_point():
                return torch.full_like(one, math.nan, device=device)
            if not one.is_meta:
                return loose(one.to(device, copy=True))
            return loose(torch.zeros_like(one, device=device))

        return _map(known, fill)

    def learn(self, inputs: Any, forward: Callable[[Any], Any], *, device: torch.device) -> None:
        """Have an output where any worker may need one and has seen none (collective over WORLD).

        ``inputs``: of this worker's forward pass, None where it was in none; ``forward(inputs)``
        is the pass, which all make together.
        """
        everyone = gathered((inputs is not None, self.tell()))
        for _, told in everyone:
            self.follow(told)
        waiting = [rank for rank, (has_inputs, _) in enumerate(everyone) if has_inputs]
        if self.shapes or not waiting:
            return
        gives = dist.get_rank() == waiting[0]
        shared = told_by(waiting[0], self._forms.told(inputs, _INPUT) if gives else None)
        if inputs is None:
            inputs = _map(self._forms.made(shared), lambda one: one.to(device))
        self.remember(inputs, forward(inputs))

    def _resized(self, signature: Signature) -> Any:
        """The last output, with the batch dimension of its inputs replaced."""
        other, known = next(reversed(self.shapes.items()))
        old, new = (shapes[0][0] if shapes and shapes[0] else 0 for shapes in (other, signature))

        def resize(one: torch.Tensor) -> torch.Tensor:
            batched = one.dim() and one.shape[0] == old
            return one.new_empty((new, *one.shape[1:])) if batched else one

        return _map(known, resize)


def _kept(tensor: torch.Tensor) -> torch.Tensor:
    """Return the kept part of an output: a single number, else the shape without its memory."""
    return tensor.detach().cpu() if tensor.numel() == 1 else tensor.detach().to("meta")


def loose(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without its graph; a backward pass over it ends in it, and it may be changed."""
    tensor = tensor.detach()
    return tensor.requires_grad_().clone() if tensor.is_floating_point() else tensor


def unkept(compute: Callable[[], Any]) -> Any:
    """Compute an output that no backward pass follows; with gradients where the model takes some.

    Otherwise what they need would fill the memory.
    """
    try:
        with torch.no_grad():
            return compute()
    except RuntimeError as error:
        if "does not require grad" not in str(error):
            raise
    with torch.enable_grad():
        return compute()


def detached(output: Any) -> Any:
    """An output whose every tensor is loose."""
    return _map(output, loose)


def numbers_of(output: Any) -> list[torch.Tensor]:
    """List the tensors of one number in an output, as its loss; without their graphs."""
    numbers: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() == 1:
            numbers.append(tensor.detach())
        return tensor

    _map(output, note)
    return numbers


def with_numbers(output: Any, numbers: Sequence[torch.Tensor]) -> Any:
    """The output with these in the places of its tensors of one number, as far as there are."""
    left = iter(numbers)

    def fill(tensor: torch.Tensor) -> torch.Tensor:
        number = next(left, None) if tensor.numel() == 1 else None
        if number is None:
            return tensor
        return loose(number.to(tensor.device, copy=True).reshape(tensor.shape))

    return _map(output, fill)


def _signature(inputs: Any) -> Signature:
    shapes: list[tuple[int, ...]] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(tensor.shape))
        return tensor

    _map(inputs, note)
    return tuple(shapes)


def _map(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same structure with every tensor changed: tuples, lists, mappings, data classes."""
    if isinstance(value, torch.Tensor):
        return change(value)
    kind: Any = type(value)
    if isinstance(value, Mapping):
        changed = {key: _map(one, change) for key, one in value.items()}
        # As HF's ModelOutput: a mapping that is a data class, built from its fields.
        return kind(**changed) if is_dataclass(value) else kind(changed)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return kind(*(_map(one, change) for one in value))
    if isinstance(value, list | tuple):
        return kind(_map(one, change) for one in value)
    if is_dataclass(value) and not isinstance(value, type):
        return kind(
            **{field.name: _map(getattr(value, field.name), change) for field in fields(value)}
        )
    return value
