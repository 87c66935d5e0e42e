"""The cost facts that planners work with: seconds and bytes of each unit, memory of a worker.

A *unit* is the smallest piece that a stage can own: a layer, half a layer (attention | MLP) where
the framework lets it be cut, the embedding, the output head. Seconds and activation bytes are for
one sample on one TP group; other bytes are for one replica, and the optimizer's are shared out over
the replicas of a stage. The runtime measures them in the running job; `uniform_costs` makes them up
for simulations and for plans made before a job runs.

>>> costs = uniform_costs(num_layers=4, forward_s=1.0, backward_s=2.0, head_s=1.5)
>>> [unit.name for unit in costs.units], costs.bounds
(['layer 0', 'layer 1', 'layer 2', 'layer 3', 'head'], (0, 1, 2, 3, 5))
>>> [time.forward_s for time in costs.stage_times((0, 2, 4))]
[2.0, 3.5]
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from elaswave_plugin.core.step.dataflow import Dataflow, deal
from elaswave_plugin.core.step.simulate import LinkTime, StageTime
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


Amounts = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitCost:
    """One unit. ``backward_s`` is for input gradients, ``weights_s`` for weight gradients.

    ``resident_bytes``: weights and gradients on every worker; ``weight_bytes``: what travels before
    the first forward at a new place; ``optimizer_bytes``: what follows behind the compute.
    ``reduce_s``: reduction of the unit's gradients over its stage.
    """

    name: str
    forward_s: float
    backward_s: float
    weights_s: float = 0.0
    reduce_s: float = 0.0
    activation_bytes: float = 0.0
    weight_bytes: float = 0.0
    resident_bytes: float = 0.0
    optimizer_bytes: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """All units in order, and what the machines can do.

    ``bounds`` [boundaries + 1]: units before which a stage may begin, from 0 to the number of
    units; cuts are indices into it, so with whole layers cut l is in front of layer l.
    ``memory_bytes`` of a worker; ``most_held``: samples in flight, times the layers of its stage,
    that it may hold in any case; ``transfer_bytes_per_s`` into a worker; ``rebind_s``: the fixed
    pause of a move; ``slowdown``: by how much compute takes longer while state moves behind it,
    unless measured as if it stood still.
    Raises ConfigurationError for amounts that are negative or no numbers.
    """

    units: tuple[UnitCost, ...]
    bounds: tuple[int, ...]
    link: LinkTime = field(default_factory=LinkTime)
    fixed_s: float = 0.0
    memory_bytes: float = float("inf")
    most_held: float = float("inf")
    transfer_bytes_per_s: float = float("inf")
    rebind_s: float = 0.0
    slowdown: float = 1.0
    # Amounts in front of each boundary, by field of `UnitCost`: every candidate asks for them.
    _totals: Mapping[str, Amounts] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for unit in self.units:
            for name in UnitCost.__dataclass_fields__:
                value = getattr(unit, name)
                if name != "name" and not 0 <= value < float("inf"):
                    raise ConfigurationError(
                        f"{unit.name}: {name} is {value}, wanted a number from 0"
                    )
        object.__setattr__(self, "_totals", self._summed())
        if not self.memory_bytes > 0 or not self.transfer_bytes_per_s > 0:
            raise ConfigurationError(
                f"memory_bytes is {self.memory_bytes} and transfer_bytes_per_s"
                f" {self.transfer_bytes_per_s}, wanted both above 0"
            )

    def _summed(self) -> dict[str, Amounts]:
        """Running sums over the units, taken at the boundaries."""
        edges = list(self.bounds)
        return {
            name: np.cumsum([0.0, *(getattr(unit, name) for unit in self.units)])[edges]
            for name in UnitCost.__dataclass_fields__
            if name != "name"
        }

    def totals(self, name: str) -> Amounts:
        """Amount of the field ``name`` in front of each boundary, [boundaries + 1]."""
        return self._totals[name]

    def sample_seconds(self) -> Amounts:
        """Forward and backward seconds of a sample in front of each boundary."""
        return self.totals("forward_s") + self.totals("backward_s") + self.totals("weights_s")

    def stage_times(
        self, cuts: Sequence[int], *, speeds: Sequence[float] | None = None
    ) -> tuple[StageTime, ...]:
        """Times of the (virtual) stages that ``cuts`` make; ``speeds``: 1 is as measured."""
        edges = list(cuts)
        rates = np.ones(len(cuts) - 1) if speeds is None else np.asarray(speeds)
        parts = {
            name: (np.diff(self.totals(name)[edges]) / rates).tolist()
            for name in ("forward_s", "backward_s", "weights_s")
        }
        reduce_s = np.diff(self.totals("reduce_s")[edges]).tolist()
        return tuple(
            StageTime(
                forward_s=parts["forward_s"][stage],
                backward_s=parts["backward_s"][stage],
                weights_s=parts["weights_s"][stage],
                fixed_s=self.fixed_s / float(rates[stage]),
                reduce_s=reduce_s[stage],
            )
            for stage in range(len(cuts) - 1)
        )

    def resident_bytes(self, cuts: Sequence[int], widths: Sequence[int]) -> tuple[float, ...]:
        """Bytes on each worker of a stage before any activation."""
        edges = list(cuts)
        kept = np.diff(self.totals("resident_bytes")[edges])
        shared = np.diff(self.totals("optimizer_bytes")[edges])
        return tuple((kept + shared / np.asarray(widths)).tolist())

    def activation_bytes(self, cuts: Sequence[int]) -> tuple[float, ...]:
        """Bytes that a sample in flight occupies at each stage."""
        return tuple(np.diff(self.totals("activation_bytes")[list(cuts)]).tolist())


def uniform_costs(
    *,
    num_layers: int,
    forward_s: float,
    backward_s: float,
    head_s: float = 0.0,
    reduce_s: float = 0.0,
    halves: bool = False,
    activation_bytes: float = 0.0,
    weight_bytes: float = 0.0,
    link: LinkTime | None = None,
    memory_bytes: float = float("inf"),
    transfer_bytes_per_s: float = float("inf"),
    rebind_s: float = 0.0,
) -> CostModel:
    """Equal layers whose backward is input and weight gradients in equal parts.

    ``head_s``: forward of the output head, its backward in proportion; it stays with the last
    layer. ``halves``: every layer may be cut in two equal units. Training state is that of mixed
    precision with Adam: 2 bytes of weights, 4 of gradients and 12 of optimizer for a parameter.
    """
    parts = 2 if halves else 1
    names = [
        f"layer {layer}" + (f" part {part}" if halves else "")
        for layer in range(num_layers)
        for part in range(parts)
    ]
    units = [
        UnitCost(
            name=name,
            forward_s=forward_s / parts,
            backward_s=backward_s / 2 / parts,
            weights_s=backward_s / 2 / parts,
            reduce_s=reduce_s / parts,
            activation_bytes=activation_bytes / parts,
            weight_bytes=weight_bytes / parts,
            resident_bytes=3 * weight_bytes / parts,
            optimizer_bytes=6 * weight_bytes / parts,
        )
        for name in names
    ]
    bounds = list(range(len(units) + 1))
    if head_s:
        gradient_s = head_s * backward_s / forward_s / 2
        units.append(
            UnitCost(name="head", forward_s=head_s, backward_s=gradient_s, weights_s=gradient_s)
        )
        bounds[-1] += 1
    return CostModel(
        units=tuple(units),
        bounds=tuple(bounds),
        link=link or LinkTime(),
        memory_bytes=memory_bytes,
        transfer_bytes_per_s=transfer_bytes_per_s,
        rebind_s=rebind_s,
    )
