"""What layers take in the running job: a worker's medians, and what everyone makes of all of them.

Seconds are of one sample, and of the clock 1: a forward pass and a backward pass of one
transformer layer, of what is in front of the layers (embedding), of what is behind (head, loss).
Where backwards are split, those of a layer come as input gradients and weight gradients. Beside the
passes: what an operation (a forward or a backward of a micro-batch) takes between two of them, what
a step takes around all of them (update, snapshot), and a message between two stages.

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
from statistics import fmean, median
from typing import Any

from elaswave_plugin.core.planner.costs import CostModel, UnitCost
from elaswave_plugin.core.step_time import LinkTime

FRONT, LAYER, BEHIND = "front", "layer", "behind"
FORWARD, BACKWARD = "forward", "backward"
SPLIT = INPUTS, WEIGHTS = "inputs", "weights"
OPERATION, AROUND, LINK = "operation", "around", "link"
STEPS_FOR_COSTS = 5
"""Fewer steps say little: the first ones compile and fill caches."""
STEPS_REMEMBERED = 15
DIGITS = 2
"""Significant digits: what noise changes below them must not change a plan."""

Passes = tuple[float, float]
_PAIRS = (FRONT, LAYER, BEHIND, LINK)
_NUMBERS = ("weights", "operation_s", "around_s", "scale")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """(forward, backward) seconds by part; without measurements a layer takes 1 and 2.

    ``weights``: the share of a layer's backward pass that weight gradients take, half if not known.
    ``operation_s`` of each operation and ``around_s`` of a step, beside the passes; ``link``:
    seconds of a message between stages, and of each sample in it. ``scale``: by how much a layer
    takes longer than ``layer``, which is rounded so that noise does not change plans.
    """

    layer: Passes = (1.0, 2.0)
    front: Passes = (0.0, 0.0)
    behind: Passes = (0.0, 0.0)
    weights: float = 0.5
    operation_s: float = 0.0
    around_s: float = 0.0
    link: Passes = (0.0, 0.0)
    scale: float = 1.0
    is_measured: bool = False

    def to_json(self) -> dict[str, list[float]]:
        """A dict that JSON can carry, by part."""
        pairs = {part: list(getattr(self, part)) for part in _PAIRS}
        return {**pairs, **{name: [getattr(self, name)] for name in _NUMBERS}}

    @classmethod
    def from_json(cls, record: Mapping[str, Sequence[float]]) -> "LayerTimes":
        """The measured times that `to_json` described."""
        parts: dict[str, Any] = {part: (record[part][0], record[part][1]) for part in _PAIRS}
        parts |= {name: record[name][0] for name in _NUMBERS}
        return cls(is_measured=True, **parts)

    def step_s(self, simulated_s: float) -> float:
        """A step of which the operations take ``simulated_s`` by `costs`."""
        return self.scale * simulated_s + self.around_s

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
        latency_s, sample_s = self.link
        return CostModel(
            units=units,
            bounds=bounds,
            link=LinkTime(latency_s=latency_s, sample_s=sample_s),
            fixed_s=self.operation_s,
            memory_bytes=memory_bytes,
        )


class PassTimes:
    """One worker's measurements: of each step the mean over its passes, whose sum it takes, of the
    last steps the median."""

    def __init__(self, *, wanted_steps: int = STEPS_FOR_COSTS) -> None:
        """Nothing is told before ``wanted_steps`` steps."""
        self._wanted = wanted_steps
        self._step: dict[tuple[str, str], list[float]] = {}
        self._known: dict[tuple[str, str], deque[float]] = {}
        # Seconds of a message between stages and of each byte in it, bytes of a sample, once known.
        self.link_rate: Passes | None = None
        self.sample_bytes: float | None = None
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

    def note_beside(self, operation_s: float, around_s: float) -> None:
        """Beside its passes a step took so much for each operation, and around all of them."""
        self._step[OPERATION, OPERATION] = [operation_s]
        self._step[AROUND, AROUND] = [around_s]

    def step_over(self) -> None:
        """A step is complete."""
        self.pace = min(self._paces[: self.compared], default=None)
        self._paces = []
        for key, seconds in self._step.items():
            self._known.setdefault(key, deque(maxlen=STEPS_REMEMBERED)).append(fmean(seconds))
        self._step = {}

    def drop_step(self) -> None:
        """The step was interrupted: its passes waited for who is gone."""
        self._step, self._paces, self.pace = {}, [], None

    def medians(self) -> dict[str, Any]:
        """Seconds by part, [forward, backward]; nothing of what is known for too few steps."""
        found = {}
        if self.link_rate is not None and self.sample_bytes is not None:
            message_s, byte_s = self.link_rate
            found[LINK] = [message_s, byte_s * self.sample_bytes]
        kinds = dict.fromkeys((FRONT, LAYER, BEHIND), (FORWARD, BACKWARD))
        for part, each in {**kinds, OPERATION: (OPERATION,), AROUND: (AROUND,)}.items():
            passes = [self._known.get((part, which), ()) for which in each]
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
    every: dict[str, list[Sequence[float]]] = {}
    for _, one in sorted(told.items()):
        for part, seconds in one.items():
            every.setdefault(part, []).append(seconds)
    if LAYER not in every:
        return LayerTimes()
    exact = {part: [*map(median, zip(*each, strict=True))] for part, each in every.items()}
    found: dict[str, Any] = {
        part: tuple(map(_rounded, exact[part])) for part in _PAIRS if part in exact
    }
    if WEIGHTS in exact:
        found["weights"] = _rounded(exact[WEIGHTS][0])
    if OPERATION in exact:
        found["operation_s"] = _rounded(exact[OPERATION][0])
    if AROUND in every:
        # Who begins first and ends last has waited for nobody.
        found["around_s"] = min(seconds[0] for seconds in every[AROUND])
    if sum(found[LAYER]):
        found["scale"] = sum(exact[LAYER]) / sum(found[LAYER])
    return LayerTimes(is_measured=True, **found)


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
