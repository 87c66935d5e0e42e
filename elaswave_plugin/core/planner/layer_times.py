"""The times of layers in the running job: each worker's medians, and the job's values from all.

Seconds are for one sample at clock 1: of a forward pass and a backward pass of one transformer
layer, of the part in front of the layers (embedding), and of the part behind (head, loss). Where
backwards are split, those of a layer are given as input gradients and weight gradients. Further
times: of an operation (a forward or a backward of a micro-batch) outside the passes, of a step
around all operations (update, snapshot), and of a message between two stages; and the factor by
which layers slow down while optimizer state follows behind them. Bytes are those that a sample
holds in each part from its forward until its backward pass.

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
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

from elaswave_plugin.core.planner.costs import CostModel, StateBytes, UnitCost
from elaswave_plugin.core.step.simulate import LinkTime

FRONT, LAYER, TAIL = "front", "layer", "tail"
FORWARD, BACKWARD = "forward", "backward"
SPLIT = INPUTS, WEIGHTS = "inputs", "weights"
OPERATION, AROUND, LINK, BYTE = "operation", "around", "link", "byte"
HELD = "held"
SUM = "sum"
FOLLOWED = "followed"
STEPS_FOR_COSTS = 5
"""Fewer steps tell little: the first ones compile and fill caches."""
STEPS_REMEMBERED = 15
DIGITS = 2
"""Significant digits: noise below them must not change a plan."""
# Of a median among thousands of workers; a plan keeps DIGITS of it.
_DIGITS_TOLD = 5

Passes = tuple[float, float]
PARTS = (FRONT, LAYER, TAIL)
_PAIRS = (FRONT, LAYER, TAIL, LINK)
_NUMBERS = ("weights", "operation_s", "around_s", "byte_s", "slowdown", "scale")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """(forward, backward) seconds by part; without measurements a layer takes 1 and 2.

    ``weights``: the share of a layer's backward pass that weight gradients take, half if not known.
    ``operation_s`` of each operation, ``around_s`` of a step: seconds outside the passes.
    ``link``: seconds of a message between stages, and of each sample in it.
    ``byte_s``: seconds of a byte of state that moves; ``slowdown``: the factor by which layers
    slow down meanwhile, less 1; 1 if it is not known.
    ``scale``: how many times as long a layer takes as ``layer``, which is rounded so that noise
    does not change plans.
    ``held_bytes``: of a sample in front, in a layer and behind; none before they are measured.
    """

    layer: Passes = (1.0, 2.0)
    front: Passes = (0.0, 0.0)
    tail: Passes = (0.0, 0.0)
    weights: float = 0.5
    operation_s: float = 0.0
    around_s: float = 0.0
    link: Passes = (0.0, 0.0)
    byte_s: float = 0.0
    slowdown: float = 1.0
    scale: float = 1.0
    held_bytes: tuple[float, ...] = ()
    is_measured: bool = False

    def to_json(self) -> dict[str, list[float]]:
        """A dict that JSON can carry, by part."""
        pairs = {part: list(getattr(self, part)) for part in _PAIRS}
        numbers = {name: [getattr(self, name)] for name in _NUMBERS}
        return {**pairs, **numbers, "held_bytes": list(self.held_bytes)}

    @classmethod
    def from_json(cls, record: Mapping[str, Sequence[float]]) -> "LayerTimes":
        """The measured times that `to_json` described."""
        parts: dict[str, Any] = {part: (record[part][0], record[part][1]) for part in _PAIRS}
        parts |= {name: record[name][0] for name in _NUMBERS}
        return cls(is_measured=True, held_bytes=tuple(record["held_bytes"]), **parts)

    def step_s(self, simulated_s: float) -> float:
        """Return the seconds of a step with operations that take ``simulated_s`` by `costs`."""
        return self.scale * simulated_s + self.around_s

    def costs(
        self, *, num_layers: int, most_held: float = float("inf"), state: StateBytes | None = None
    ) -> CostModel:
        """Return costs of equal layers, plus the part in front at the first, behind at the last.

        ``most_held``: samples in flight times layers of a worker. Bytes count with ``state`` only,
        those of activations once they are measured.
        """
        every = [LAYER] * num_layers
        units = [_unit(FRONT, self.front), *(_unit(one, self.layer, self.weights) for one in every)]
        units.append(_unit(TAIL, self.tail))
        if state is not None:
            front, layer, tail = self.held_bytes or (0.0, 0.0, 0.0)
            held = [front, *(layer for _ in every), tail]
            elements = state.elements(num_layers)
            units = [_kept(*one, state) for one in zip(units, held, elements, strict=True)]
        bounds = (0, *range(2, num_layers + 1), num_layers + 2)
        latency_s, sample_s = self.link
        return CostModel(
            units=tuple(units),
            bounds=bounds,
            link=LinkTime(latency_s=latency_s, sample_s=sample_s),
            fixed_s=self.operation_s,
            memory_bytes=float("inf") if state is None else state.limit_bytes,
            most_held=most_held,
            transfer_bytes_per_s=1 / self.byte_s if self.byte_s else float("inf"),
            slowdown=self.slowdown,
        )


class PassTimes:
    """One worker's measurements: means over the passes of a step, medians over the last steps.

    Means, since a step takes the sum of its passes.
    """

    def __init__(self, *, wanted_steps: int = STEPS_FOR_COSTS) -> None:
        """Tell nothing before ``wanted_steps`` steps."""
        self._wanted = wanted_steps
        self._step: dict[tuple[str, str], list[float]] = {}
        self._known: dict[tuple[str, str], deque[float]] = {}
        # Seconds of a message between stages and of each byte in it, bytes of a sample, once known.
        self.link_rate: Passes | None = None
        self.sample_bytes: float | None = None
        # Bytes that a sample holds, by part.
        self._held: dict[str, float] = {}
        # Passes through layers while optimizer state followed: of this step; and the slowdowns in
        # the last steps that had such passes.
        self._followed: dict[str, list[float]] = {}
        self._slowdowns: deque[float] = deque(maxlen=STEPS_REMEMBERED)
        self._paces: list[tuple[float, int]] = []
        # Seconds per token of the fastest forward pass of a layer in the last complete step, out of
        # `compared` passes, the number that all workers have: out of more, it would be faster.
        self.pace: float | None = None
        # The tokens of a sample in that pass.
        self.pace_tokens = 0
        self.compared: int | None = None

    def note(
        self, part: str, which: str, seconds: float, *, tokens: int = 0, followed: bool = False
    ) -> None:
        """Note the seconds of a pass through a part for a sample, of ``tokens`` if known.

        ``followed``: while optimizer state was on its way to this worker.
        """
        self._step.setdefault((part, which), []).append(seconds)
        if followed and part == LAYER:
            self._followed.setdefault(which, []).append(seconds)
        if tokens and (part, which) == (LAYER, FORWARD):
            self._paces.append((seconds / tokens, tokens))

    def note_held(self, part: str, sample_bytes: float) -> None:
        """Note the bytes that a sample holds in a part, from its forward pass on."""
        self._held[part] = sample_bytes

    def lacks_held(self, parts: Sequence[str]) -> bool:
        """Return whether to measure what one of them holds; the first step is not typical."""
        return bool(self._known) and not self._held.keys() >= set(parts)

    def note_beside(self, operation_s: float, around_s: float) -> None:
        """Note a step's seconds outside its passes: in each operation, and around all of them."""
        self._step[OPERATION, OPERATION] = [operation_s]
        self._step[AROUND, AROUND] = [around_s]

    @property
    def sum_s(self) -> float:
        """Seconds of the sum of a whole step's gradients; 0 where it is not known."""
        steps_s = self._known.get((SUM, SUM))
        return median(steps_s) if steps_s else 0.0

    def step_over(self) -> None:
        """Complete a step."""
        compared = self._paces[: self.compared]
        self.pace, self.pace_tokens = min(compared, default=(None, 0))
        self._paces = []
        self._compare_followed()
        for key, seconds in self._step.items():
            self._known.setdefault(key, deque(maxlen=STEPS_REMEMBERED)).append(fmean(seconds))
        self._step = {}

    def told_pace(self) -> tuple[float, int] | None:
        """Return the pace, and the tokens of its pass; None if it is not known."""
        return None if self.pace is None else (self.pace, self.pace_tokens)

    def drop_step(self) -> None:
        """Drop an interrupted step: its passes waited for the lost worker."""
        self._step, self._followed, self._paces, self.pace = {}, {}, [], None

    def _compare_followed(self) -> None:
        """Compare passes while state followed with those of the steps before."""
        known = {which: self._known.get((LAYER, which), ()) for which in self._followed}
        if known and all(len(steps) >= self._wanted for steps in known.values()):
            usual_s = sum(median(steps) for steps in known.values())
            took_s = sum(map(fmean, self._followed.values()))
            self._slowdowns.append(max(0.0, took_s / usual_s - 1))
        self._followed = {}

    def medians(self) -> dict[str, Any]:
        """Return seconds by part, [forward, backward], of parts known for enough steps."""
        found = {}
        if self.link_rate is not None and self.sample_bytes is not None:
            message_s, byte_s = self.link_rate
            found[LINK] = [message_s, byte_s * self.sample_bytes]
            found[BYTE] = [byte_s]
        if LAYER in self._held:
            found[HELD] = [self._held.get(part, 0.0) for part in PARTS]
        if self._slowdowns:
            found[FOLLOWED] = [median(self._slowdowns)]
        kinds = dict.fromkeys(PARTS, (FORWARD, BACKWARD))
        for part, each in {**kinds, OPERATION: (OPERATION,), AROUND: (AROUND,)}.items():
            passes = [self._known.get((part, which), ()) for which in each]
            if all(len(steps) >= self._wanted for steps in passes):
                found[part] = [median(steps) for steps in passes]
        return {**found, **self._apart(found)}

    def told(self) -> dict[str, list[float]]:
        """Return `medians` as all others are told: times in a few digits, which travel short."""
        return {
            part: list(each) if part == HELD else [float(f"{one:.{_DIGITS_TOLD}g}") for one in each]
            for part, each in self.medians().items()
        }

    def _apart(self, found: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
        """Return the medians of split backwards; the sum stands for a whole one never seen."""
        forward, *apart = (self._known.get((LAYER, which), ()) for which in (FORWARD, *SPLIT))
        if any(len(steps) < self._wanted for steps in apart):
            return {}
        inputs_s, weights_s = map(median, apart)
        reports = {WEIGHTS: [weights_s / (inputs_s + weights_s)]}
        if LAYER not in found and len(forward) >= self._wanted:
            reports[LAYER] = [median(forward), inputs_s + weights_s]
        return reports


def agreed(reports: Mapping[int, Mapping[str, Sequence[float]]]) -> LayerTimes:
    """Return the medians over all workers (by slot) of `PassTimes.medians`, alike on every worker.

    If no worker has measured a layer, the assumed times are used, and no others count.
    """
    every: dict[str, list[Sequence[float]]] = {}
    for _, one in sorted(reports.items()):
        for part, seconds in one.items():
            every.setdefault(part, []).append(seconds)
    # The worker that holds most limits every plan; a worker that has not measured a part told 0.
    held = tuple(map(max, zip(*every.pop(HELD, ()), strict=True)))
    if LAYER not in every:
        return LayerTimes(held_bytes=held)
    exact = {part: [*map(median, zip(*each, strict=True))] for part, each in every.items()}
    found: dict[str, Any] = {
        part: tuple(map(_rounded, exact[part])) for part in _PAIRS if part in exact
    }
    if WEIGHTS in exact:
        found["weights"] = _rounded(exact[WEIGHTS][0])
    for part, name in ((OPERATION, "operation_s"), (BYTE, "byte_s"), (FOLLOWED, "slowdown")):
        if part in exact:
            found[name] = _rounded(exact[part][0])
    # The first stage begins first and ends last; others wait for the pipeline to fill and drain.
    around_s = [one[AROUND][0] for one in reports.values() if AROUND in one and FRONT in one]
    if around_s:
        found["around_s"] = min(around_s)
    if sum(found[LAYER]):
        found["scale"] = sum(exact[LAYER]) / sum(found[LAYER])
    return LayerTimes(is_measured=True, held_bytes=held, **found)


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.{DIGITS}g}")


def _unit(name: str, passes: Passes, weights: float = 0.0) -> UnitCost:
    """Return a unit; ``weights``: the share of the backward pass that may come later."""
    forward_s, backward_s = passes
    return UnitCost(
        name=name,
        forward_s=forward_s,
        backward_s=backward_s * (1 - weights),
        weights_s=backward_s * weights,
    )


def _kept(unit: UnitCost, held_bytes: float, elements: int, state: StateBytes) -> UnitCost:
    """Return the unit with its bytes."""
    return replace(
        unit,
        activation_bytes=held_bytes,
        weight_bytes=elements * state.weight_bytes,
        resident_bytes=elements * (state.weight_bytes + state.gradient_bytes),
        optimizer_bytes=elements * state.optimizer_bytes,
    )
