"""The predicted step of one plan: its windows under the memory limit, and its simulated time.

Small jobs are simulated worker by worker; jobs of more than `MOST_PASSES` micro-batch passes flow
as fluids (`fluid_seconds`), which only fits slots that are no wider than the narrowest stage.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from math import ceil

from elaswave_plugin.core.planner.costs import CostModel
from elaswave_plugin.core.planner.greedy import greedy_graph, greedy_room, greedy_step, split_step
from elaswave_plugin.core.planner.microbatch_split import (
    REDEAL,
    REROUTE,
    RESIZE,
    MicrobatchSplit,
    StageSlowness,
    redeal,
    reroute,
    resize,
)
from elaswave_plugin.core.planner.slot_time import Flow, SlotFlow, fluid_seconds, slot_flow
from elaswave_plugin.core.step.dataflow import fair_width
from elaswave_plugin.core.step.schedule import (
    Op,
    OpLists,
    fit_windows,
    interleaved_lists,
    peak_in_flight,
    window_lists,
    window_sizes,
)
from elaswave_plugin.core.step.simulate import OpGraph, StageTime, op_graph, simulate
from elaswave_plugin.errors import ConfigurationError

# Their numbers, by stage; only rerouting asks which they are, the others for how many.
Replicas = tuple[Sequence[int], ...]
# Micro-batches x virtual stages up to which every worker is simulated (some 15 ms each).
MOST_PASSES = 20_000
# The same up to which the greedy order is tried as well (some 40 ms each).
MOST_GREEDY_PASSES = 2_500
# The same up to which weight gradients are placed (some 60 ms each).
MOST_SPLIT_PASSES = 2_500


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """The work of a step, fixed at launch whichever workers run it."""

    num_microbatches: int
    microbatch_size: int
    launch_width: int


@dataclass(frozen=True, slots=True)
class DataflowChoice:
    """A policy of microbatch_split and, for redeal, the micro-batches of a slot."""

    policy: str
    slot_width: int

    def __str__(self) -> str:
        return f"{self.policy} {self.slot_width}" if self.policy == REDEAL else self.policy

    def split(
        self, replicas: Sequence[Sequence[int]], work: StepWork, slowness: StageSlowness = ()
    ) -> MicrobatchSplit:
        """Deal the samples to the replicas of each stage; raises ConfigurationError.

        ``slowness``: of their workers, in the order of the replicas.
        """
        return replace(self._split(replicas, work, slowness), slowness=slowness)

    def _split(
        self, replicas: Sequence[Sequence[int]], work: StepWork, slowness: StageSlowness
    ) -> MicrobatchSplit:
        widths = [len(stage) for stage in replicas]
        if self.policy == REDEAL:
            return redeal(
                widths=widths,
                num_microbatches=work.num_microbatches,
                microbatch_size=work.microbatch_size,
                slot_width=self.slot_width,
                slowness=slowness,
            )
        if self.policy == REROUTE:
            return reroute(
                replicas=replicas,
                launch_width=work.launch_width,
                num_microbatches=work.num_microbatches,
                microbatch_size=work.microbatch_size,
            )
        if self.policy == RESIZE:
            return resize(
                widths=widths,
                launch_width=work.launch_width,
                num_microbatches=work.num_microbatches,
                microbatch_size=work.microbatch_size,
            )
        raise ConfigurationError(
            f"dataflow is {self.policy!r}, wanted one of {REDEAL}, {REROUTE}, {RESIZE}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Simulated seconds of a step, and the slots in flight by stage where windows say so."""

    seconds: float
    windows: tuple[int, ...] = ()


class Predictor:
    """Predicts plans of one job; remembers what takes long: dataflows, and greedy orders."""

    def __init__(self, costs: CostModel, work: StepWork, *, vpp: int = 1) -> None:
        self.costs = costs
        self.work = work
        self.vpp = vpp
        self._flows: dict[tuple[DataflowChoice, Replicas, StageSlowness], SlotFlow] = {}
        self._graphs: dict[tuple[DataflowChoice, Replicas], OpGraph] = {}
        self._greedy_steps: dict[tuple[object, ...], tuple[OpLists, float]] = {}

    def is_exact(self, num_stages: int) -> bool:
        """Return whether every worker is simulated."""
        return self.work.num_microbatches * num_stages * self.vpp <= MOST_PASSES

    def knows_greedy(self, num_stages: int) -> bool:
        """Return whether the greedy order can be tried."""
        return self.vpp == 1 and self.work.num_microbatches * num_stages <= MOST_GREEDY_PASSES

    def knows_split(self, num_stages: int) -> bool:
        """Return whether a step is small enough to place its weight gradients."""
        return self.work.num_microbatches * num_stages * self.vpp <= MOST_SPLIT_PASSES

    def predict(
        self,
        choice: DataflowChoice,
        replicas: Replicas,
        cuts: Sequence[int],
        *,
        extra: int | None,
        speeds: Sequence[float] | None = None,
        slowness: StageSlowness = (),
    ) -> Prediction:
        """Simulate a plan with windows P - s + ``extra``, smaller where memory wants it.

        ``extra`` None: in greedy order, which does without ``slowness``. Raises ConfigurationError
        where the plan does not fit.
        """
        times = self._times(cuts, speeds)
        if self.vpp > 1:
            lists = self.lists(choice, replicas, cuts, extra=extra, slowness=slowness)
            step = simulate(lists, times, self.costs.link, slowness=slowness)
            return Prediction(seconds=step.seconds)
        if extra is None:
            windows = self._greedy_windows(choice, replicas, cuts)
            seconds = self._greedy(choice, replicas, cuts, times, windows)[1]
            return Prediction(seconds=seconds, windows=windows)
        wanted = window_sizes(len(replicas), extra=extra)
        if not self.is_exact(len(replicas)):
            flow = self._fluid(choice, replicas, slowness)
            slot_samples = [
                ceil(flow.slot_width / width) * self.work.microbatch_size for width in flow.widths
            ]
            limits = [
                limit // samples
                for limit, samples in zip(self.limits(replicas, cuts), slot_samples, strict=True)
            ]
            windows = fit_windows(wanted, limits)
            seconds = fluid_seconds(flow, times, self.costs.link, windows)
        else:
            split = self._flow(choice, replicas, slowness)
            windows = self._fitted(split, wanted, self.limits(replicas, cuts))
            seconds = split.seconds(times, self.costs.link, windows)
        return Prediction(seconds=seconds, windows=windows)

    def lists(
        self,
        choice: DataflowChoice,
        replicas: Replicas,
        cuts: Sequence[int],
        *,
        extra: int | None,
        speeds: Sequence[float] | None = None,
        slowness: StageSlowness = (),
    ) -> OpLists:
        """The op lists of all workers. Raises ConfigurationError where they do not fit."""
        assignment = choice.split(replicas, self.work, slowness).assignment()
        if self.vpp > 1:
            lists = interleaved_lists(assignment, num_chunks=self.vpp)
            self._check_chunks(lists, replicas, cuts)
            return lists
        if extra is None:
            windows = self._greedy_windows(choice, replicas, cuts)
            return self._greedy(choice, replicas, cuts, self._times(cuts, speeds), windows)[0]
        wanted = window_sizes(len(replicas), extra=extra)
        flow = self._flow(choice, replicas, slowness)
        return window_lists(assignment, self._fitted(flow, wanted, self.limits(replicas, cuts)))

    def split_backward(
        self,
        choice: DataflowChoice,
        replicas: Replicas,
        cuts: Sequence[int],
        *,
        extra: int | None,
        speeds: Sequence[float] | None = None,
    ) -> tuple[float, OpLists]:
        """Seconds and lists of the same plan with weight gradients in the bubbles."""
        times = self._times(cuts, speeds)
        lists = self.lists(choice, replicas, cuts, extra=extra, speeds=speeds)
        limits = [float(limit) for limit in self.limits(replicas, cuts)]
        graph = (
            self._graph(choice, replicas, times)
            if self.vpp == 1
            else op_graph(lists, times, self.costs.link)
        )
        filled, seconds = split_step(lists, graph, times, limits=limits)
        return seconds, filled

    def _greedy_windows(
        self, choice: DataflowChoice, replicas: Replicas, cuts: Sequence[int]
    ) -> tuple[int, ...]:
        wanted = window_sizes(len(replicas), extra=1)
        return self._fitted(self._flow(choice, replicas), wanted, self.limits(replicas, cuts))

    def _greedy(
        self,
        choice: DataflowChoice,
        replicas: Replicas,
        cuts: Sequence[int],
        times: Sequence[StageTime],
        windows: Sequence[int],
    ) -> tuple[OpLists, float]:
        """Lists and seconds in greedy order."""
        key = (choice, replicas, tuple(cuts), tuple(times))
        if key not in self._greedy_steps:
            flow = self._flow(choice, replicas)
            peaks = [flow.peak(stage, window) for stage, window in enumerate(windows)]
            room = greedy_room(peaks, self.limits(replicas, cuts))
            graph = self._graph(choice, replicas, times)
            self._greedy_steps[key] = greedy_step(graph, times, limits=room, windows=windows)
        return self._greedy_steps[key]

    def _graph(
        self, choice: DataflowChoice, replicas: Replicas, times: Sequence[StageTime]
    ) -> OpGraph:
        if (choice, replicas) not in self._graphs:
            assignment = choice.split(replicas, self.work).assignment()
            self._graphs[choice, replicas] = greedy_graph(assignment, times, self.costs.link)
        return self._graphs[choice, replicas]

    def _times(self, cuts: Sequence[int], speeds: Sequence[float] | None) -> tuple[StageTime, ...]:
        every = None if speeds is None else [*speeds] * self.vpp
        return self.costs.stage_times(cuts, speeds=every)

    def _flow(
        self, choice: DataflowChoice, replicas: Replicas, slowness: StageSlowness = ()
    ) -> SlotFlow:
        key = (choice, replicas, slowness)
        if key not in self._flows:
            self._flows[key] = slot_flow(choice.split(replicas, self.work, slowness))
        return self._flows[key]

    def _fluid(self, choice: DataflowChoice, replicas: Replicas, slowness: StageSlowness) -> Flow:
        return Flow(
            policy=choice.policy,
            widths=tuple(map(fair_width, slowness)) or tuple(map(len, replicas)),
            num_microbatches=self.work.num_microbatches,
            microbatch_size=self.work.microbatch_size,
            slot_width=choice.slot_width,
        )

    def limits(self, replicas: Replicas, cuts: Sequence[int]) -> list[int]:
        """Samples that the workers of each stage have memory for; chunks of a stage together.

        Chunks are charged as the largest one: with embedding or head it is larger than the others.
        """
        num_stages = len(replicas)
        activations, layers = self.costs.activation_bytes(cuts), _layers(cuts)
        limits = []
        for stage, left in enumerate(self._left(replicas, cuts)):
            everything = self.work.num_microbatches * self.work.microbatch_size * self.vpp
            limit = everything if left >= 0 else 0
            largest = max(activations[stage::num_stages]), max(layers[stage::num_stages])
            for each, most in zip(largest, (left, self.costs.most_held), strict=True):
                if limit and each * limit > most:
                    limit = int(most // each)
            limits.append(limit)
        return limits

    def _fitted(
        self, flow: SlotFlow, windows: Sequence[int], limits: Sequence[int]
    ) -> tuple[int, ...]:
        """The largest windows whose samples in flight fit."""
        slots = []
        for stage, (window, limit) in enumerate(zip(windows, limits, strict=True)):
            fitting = window
            while fitting and flow.peak(stage, fitting) > limit:
                fitting -= 1
            slots.append(fitting)
        return fit_windows(windows, slots)

    def _left(self, replicas: Replicas, cuts: Sequence[int]) -> list[float]:
        """Bytes that a worker of each stage has beside its state; below 0: not even for that."""
        widths = [len(stage) for stage in replicas]
        resident = self.costs.resident_bytes(cuts, widths * self.vpp)
        stages = range(len(replicas))
        return [self.costs.memory_bytes - sum(resident[stage :: len(replicas)]) for stage in stages]

    def _check_chunks(self, lists: OpLists, replicas: Replicas, cuts: Sequence[int]) -> None:
        """Raises ConfigurationError where what the chunks of a stage hold together does not fit."""
        num_stages = len(replicas)
        activations, layers = self.costs.activation_bytes(cuts), _layers(cuts)
        for stage, left in enumerate(self._left(replicas, cuts)):
            for each, most, what in (
                (activations, left, "bytes"),
                (layers, self.costs.most_held, "samples times layers"),
            ):
                held = partial(_held, by_chunk=each[stage::num_stages])
                peak = max(peak_in_flight(ops, held) for ops in lists[stage])
                if peak > most:
                    raise ConfigurationError(
                        f"stage {stage} would hold {peak:.4g} {what} in flight and has memory for"
                        f" {most:.4g}; raise the memory limit or lower vpp"
                    )


def _layers(cuts: Sequence[int]) -> list[int]:
    return [stop - start for start, stop in pairwise(cuts)]


def _held(op: Op, *, by_chunk: Sequence[float]) -> float:
    return (op.stop - op.start) * by_chunk[op.chunk]
