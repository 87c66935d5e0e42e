"""The bytes that a worker keeps of each part of the model, and the memory it has for a plan."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from elaswave_plugin.core.step.dataflow import Dataflow, deal
from elaswave_plugin.errors import ConfigurationError, TooLittleMemoryError

Planned = TypeVar("Planned")


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Bytes of weights, gradients and optimizer state, and of all that a worker may hold.

    ``units``: elements of each part of the model, as in `GridPlacement`: layers by number from 1,
    what is in front of them below, what follows them above. Of each element a worker keeps
    ``weight_bytes`` and ``gradient_bytes``; its stage's workers share ``optimizer_bytes`` out.
    ``is_estimate``: the limit was not set, it is what the devices have; ``left_out_bytes``: such
    a limit that no plan fits, so that none counts.
    """

    units: Mapping[int, int]
    weight_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    limit_bytes: float = float("inf")
    is_estimate: bool = False
    left_out_bytes: float = 0.0

    def without_limit(self) -> "StateBytes":
        """The same for a plan that counts no limit."""
        return replace(self, limit_bytes=float("inf"), left_out_bytes=self.limit_bytes)

    def reasons(self) -> tuple[str, ...]:
        """List the remarks that a plan made with this state needs, as sentences."""
        if not self.left_out_bytes:
            return ()
        return (
            "memory: counted without a limit, since nothing fits the"
            f" {self.left_out_bytes / 2**30:.3g} GiB that the devices seem to have",
        )

    def held_bytes(self, num_elements: int, *, width: int) -> float:
        """Return what a worker keeps of these elements, if ``width`` workers have the same ones."""
        each = self.weight_bytes + self.gradient_bytes + self.optimizer_bytes / width
        return num_elements * each

    def elements(self, num_layers: int) -> list[int]:
        """Count the elements in front of the layers, of each layer, and behind the layers."""
        front = sum(length for unit, length in self.units.items() if unit < 1)
        tail = sum(length for unit, length in self.units.items() if unit > num_layers)
        return [front, *(self.units.get(number + 1, 0) for number in range(num_layers)), tail]


def deal_within(state: StateBytes, *, live: Sequence[int], **more: Any) -> Dataflow:
    """`deal` in a data-parallel job; raises TooLittleMemoryError for workers too few for its state.

    Micro-batches are run one after the other: what each of them takes is alike in all deals.
    """
    needed = state.held_bytes(sum(state.units.values()), width=len(live))
    if needed > state.limit_bytes:
        raise TooLittleMemoryError(
            f"weights, gradients and optimizer state of each of {len(live)} workers take"
            f" {needed / 2**30:.3g} GiB, and memory_limit_gib is {state.limit_bytes / 2**30:.3g};"
            " restart from the last checkpoint with more workers, or raise the limit"
        )
    return deal(live=live, **more)


def within_memory(
    state: StateBytes, plan: Callable[..., Planned], *args: object, **more: object
) -> Planned:
    """``plan`` with this ``state``; without the limit where nothing fits one that is an estimate.

    What a plan takes is not known to the byte, and a job without a set limit goes on.
    Raises ConfigurationError where nothing fits a limit that was set.
    """
    try:
        return plan(*args, state=state, **more)
    except ConfigurationError:
        if not state.is_estimate:
            raise
    return plan(*args, state=state.without_limit(), **more)
