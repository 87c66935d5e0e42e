"""What layers take in the running job: a worker's medians, and what everyone makes of all of them.

Seconds are of one sample, and of the clock 1: a forward pass and a backward pass of one
transformer layer, of what is in front of the layers (embedding), of what is behind (head, loss).
Where backwards are split, those of a layer come as input gradients and weight gradients.

>>> mine = PassTimes(wanted_steps=1)
>>> mine.note(LAYER, FORWARD, 0.00402)
>>> mine.note(LAYER, BACKWARD, 0.00799)
>>> mine.step_over()
>>> times = agreed({0: mine.medians(), 1: {}})
>>> times.layer, times.is_measured
((0.004, 0.008), True)
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from elaswave_plugin.core.planner.costs import CostModel, UnitCost

FRONT, LAYER, BEHIND = "front", "layer", "behind"
FORWARD, BACKWARD = "forward", "backward"
SPLIT = INPUTS, WEIGHTS = "inputs", "weights"
STEPS_FOR_COSTS = 5
"""Fewer steps say little: the first ones compile and fill caches."""
STEPS_REMEMBERED = 15
DIGITS = 2
"""Significant digits: what noise changes below them must not change a plan."""

Passes = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """(forward, backward) seconds by part; without measurements a layer takes 1 and 2.

    ``weights``: the share of a layer's backward pass that weight gradients take, half if not known.
    """

    layer: Passes = (1.0, 2.0)
    front: Passes = (0.0, 0.0)
    behind: Passes = (0.0, 0.0)
    weights: float = 0.5
    is_measured: bool = False

    def to_json(self) -> dict[str, list[float]]:
        """A dict that JSON can carry, by part."""
        passes = {part: list(getattr(self, part)) for part in (FRONT, LAYER, BEHIND)}
        return {**passes, WEIGHTS: [self.weights]}

    @classmethod
    def from_json(cls, record: Mapping[str, Sequence[float]]) -> "LayerTimes":
        """The measured times that `to_json` described."""
        passes = {part: (record[part][0], record[part][1]) for part in (FRONT, LAYER, BEHIND)}
        return cls(is_measured=True, weights=record[WEIGHTS][0], **passes)

    def costs(
        self, *, num_layers: int, activation_bytes: float = 0.0, memory_bytes: float = float("inf")
    ) -> CostModel:
        """Equal layers, the first with what is in front and the last with what is behind.

        ``activation_bytes`` of a layer and sample, ``memory_bytes`` of a worker.
        """
        layers = [
            _unit(f"layer {number}", self.layer, self.weights, activation_bytes)
            for number in range(num_layers)
        ]
        units = (_unit(FRONT, self.front), *layers, _unit(BEHIND, self.behind))
        bounds = (0, *range(2, num_layers + 1), num_layers + 2)
        return CostModel(units=units, bounds=bounds, memory_bytes=memory_bytes)


class PassTimes:
    """One worker's measurements: of each step the median over its passes, of the last steps
    the median."""

    def __init__(self, *, wanted_steps: int = STEPS_FOR_COSTS) -> None:
        """Nothing is told before ``wanted_steps`` steps."""
        self._wanted = wanted_steps
        self._step: dict[tuple[str, str], list[float]] = {}
        self._known: dict[tuple[str, str], deque[float]] = {}
        self._paces: list[float] = []
        # Seconds per token of the fastest forward pass of a layer in the last complete step: of so
        # many, as many as all have who are compared. Of more, the fastest would be faster.
        self.pace: float | None = None
        self.compared: int | None = None

    def note(self, part: str, which: str, seconds: float, *, tokens: int = 0) -> None:
        """A pass took so long for a sample, of so many tokens if known, through a part."""
        self._step.setdefault((part, which), []).append(seconds)
        if tokens and (part, which) == (LAYER, FORWARD):
            self._paces.append(seconds / tokens)

    def step_over(self) -> None:
        """A step is complete."""
        self.pace = min(self._paces[: self.compared], default=None)
        self._paces = []
        for key, seconds in self._step.items():
            self._known.setdefault(key, deque(maxlen=STEPS_REMEMBERED)).append(median(seconds))
        self._step = {}

    def drop_step(self) -> None:
        """The step was interrupted: its passes waited for who is gone."""
        self._step, self._paces, self.pace = {}, [], None

    def medians(self) -> dict[str, Any]:
        """Seconds by part, [forward, backward]; nothing of what is known for too few steps."""
        found = {}
        for part in (FRONT, LAYER, BEHIND):
            passes = [self._known.get((part, which), ()) for which in (FORWARD, BACKWARD)]
            if all(len(steps) >= self._wanted for steps in passes):
                found[part] = [median(steps) for steps in passes]
        return {**found, **self._apart(found)}

    def _apart(self, found: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
        """What is known of split backwards; the sum stands for a whole one that was never seen."""
        forward, *apart = (self._known.get((LAYER, which), ()) for which in (FORWARD, *SPLIT))
        if any(len(steps) < self._wanted for steps in apart):
            return {}
        inputs_s, weights_s = map(median, apart)
        told = {WEIGHTS: [weights_s / (inputs_s + weights_s)]}
        if LAYER not in found and len(forward) >= self._wanted:
            told[LAYER] = [median(forward), inputs_s + weights_s]
        return told


def agreed(told: Mapping[int, Mapping[str, Sequence[float]]]) -> LayerTimes:
    """The medians over all workers (by slot) of what `PassTimes.medians` told, alike on everyone.

    A layer is as assumed, and nothing else counts, where nobody has measured one.
    """
    found = {}
    for part in (FRONT, LAYER, BEHIND):
        passes = [one[part] for _, one in sorted(told.items()) if part in one]
        if passes:
            forward, backward = (_rounded(median(which)) for which in zip(*passes, strict=True))
            found[part] = forward, backward
    if LAYER not in found:
        return LayerTimes()
    shares = [one[WEIGHTS][0] for _, one in sorted(told.items()) if WEIGHTS in one]
    return LayerTimes(
        is_measured=True,
        weights=_rounded(median(shares)) if shares else LayerTimes().weights,
        layer=found[LAYER],
        front=found.get(FRONT, (0.0, 0.0)),
        behind=found.get(BEHIND, (0.0, 0.0)),
    )


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.{DIGITS}g}")


def _unit(
    name: str, passes: Passes, weights: float = 0.0, activation_bytes: float = 0.0
) -> UnitCost:
    """``weights``: the share of the backward pass that may come later."""
    forward_s, backward_s = passes
    return UnitCost(
        name=name,
        forward_s=forward_s,
        backward_s=backward_s * (1 - weights),
        weights_s=backward_s * weights,
        activation_bytes=activation_bytes,
    )
