"""The deal of micro-batches over the replicas of each stage of a ragged pipeline, with its order.

Redeal: whole micro-batches are dealt again over every stage's live replicas. Reroute: those of lost
replicas are spread over their peers. A slow worker gets fewer where they are dealt again.
Micro-batches stay whole in both, so every stage and tp position has the exact order of sums of
``core/step/sum_order.py``. Resize: every stage cuts the samples of a round of micro-batches evenly
over its live replicas, which sums in another order. Simulated time decides between them, and how
many slots are in flight. If it gains, operations go in greedy order instead, and backwards are
split, with weight gradients where a worker would wait. Every worker adds gradients in rising order.

>>> from elaswave_plugin.core.layout.layout import launch_layout
>>> healthy = launch_layout(tp=1, pp=2, dp=2, num_layers=2)
>>> flow = flow_of(layout=healthy.without([1]), num_microbatches=4)
>>> print(flow)
stage 0: w0: 0 1 2 3; stage 1: w2: 0 2 | w3: 1 3
>>> from elaswave_plugin.core.step.schedule import show_ops
>>> print(show_ops(flow.ops(3)))
F1 B1 F3 B3
>>> print(flow_of(layout=healthy.without([1]), num_microbatches=4, policy="resize"))
stage 0: w0: [0,2) [2,4); stage 1: w2: [0,1) [2,3) | w3: [1,2) [3,4)
>>> flow_of(layout=healthy, num_microbatches=4).is_healthy, flow.is_healthy
(True, False)
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil
from typing import Any, Literal

from elaswave_plugin.core.layout.group_rules import coordinates_of
from elaswave_plugin.core.layout.layout import Coordinate, ParallelLayout, TpGroup
from elaswave_plugin.core.planner.costs import CostModel, StateBytes
from elaswave_plugin.core.planner.dvfs import ClockTable
from elaswave_plugin.core.planner.greedy import greedy_lists, greedy_room, with_weights_in_bubbles
from elaswave_plugin.core.planner.joint import JointPlan, joint_plan, plan_split
from elaswave_plugin.core.planner.layer_times import LayerTimes
from elaswave_plugin.core.planner.microbatch_split import REDEAL, REROUTE, RESIZE
from elaswave_plugin.core.planner.prediction import Predictor, StepWork
from elaswave_plugin.core.planner.search import PlanRules, slowness_of
from elaswave_plugin.core.step.dataflow import (
    Crossing,
    Dataflow,
    Samples,
    Shares,
    Slowness,
    crossings,
    fair_width,
    rotated,
)
from elaswave_plugin.core.step.schedule import (
    Assignment,
    OpLists,
    Piece,
    WorkerOps,
    interleaved_ops,
    peak_in_flight,
    window_lists,
    window_ops,
    window_sizes,
)
from elaswave_plugin.core.step.simulate import StageTime, StepTime, simulate
from elaswave_plugin.core.step.sum_order import replica_microbatches
from elaswave_plugin.errors import ConfigurationError

Policy = Literal["auto", "redeal", "reroute", "resize"]
SplitBackward = Literal["auto", "always", "never"]
# Every replica runs its own micro-batches.
AS_LAUNCHED = "as launched"
# Every replica runs those of others.
ROTATED = "rotated"


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineFlow:
    """The assignment of a step: ``pieces[stage][replica order]``, in samples of the global batch.

    A piece is one micro-batch of ``micro_batch_size`` samples, unless ``policy`` is resize.
    Micro-batch k always belongs to replica k mod ``layout.dp`` of the launch. ``windows``: slots in
    flight at each stage. Not compared: ``reasons`` for this deal; ``times`` of layers for which it
    is made; ``compute_s``, the simulated seconds of the operations, if these times were measured;
    ``most_held``, the samples times layers that a worker may hold in flight, None: as usual.
    ``clocks`` of the stages; none: they are left alone. ``slow``: (slot, factor by which it takes
    longer) of the slow workers that it was dealt for. ``lists`` of operations in greedy
    order or with split backwards, which change no sum; none: by the window rule, or interleaved.
    ``sums``: the micro-batches that each worker adds up, where these are not those that it runs.
    """

    layout: ParallelLayout
    num_microbatches: int
    micro_batch_size: int = 1
    policy: str
    pieces: tuple[tuple[tuple[Piece, ...], ...], ...]
    windows: tuple[int, ...]
    clocks: tuple[float, ...] = ()
    slow: tuple[tuple[int, float], ...] = ()
    reasons: tuple[str, ...] = field(default=(), repr=False, compare=False)
    times: LayerTimes = field(default_factory=LayerTimes, repr=False, compare=False)
    most_held: float | None = field(default=None, repr=False, compare=False)
    state: StateBytes | None = field(default=None, repr=False, compare=False)
    compute_s: float | None = field(default=None, repr=False, compare=False)
    lists: OpLists = field(default=(), compare=False)
    is_greedy: bool = field(default=False, compare=False)
    is_split: bool = field(default=False, compare=False)
    sums: tuple[tuple[tuple[int, ...], ...], ...] = ()

    @property
    def step_s(self) -> float | None:
        """The predicted seconds of a step: of the pipeline, and of the work around it."""
        return None if self.compute_s is None else self.times.step_s(self.compute_s)

    def __str__(self) -> str:
        return "; ".join(
            f"stage {stage}: "
            + " | ".join(
                f"{'+'.join(f'w{slot}' for slot in group.slots)}:"
                f" {' '.join(map(self._text, pieces))}"
                for group, pieces in zip(groups, of_stage, strict=True)
            )
            for stage, (groups, of_stage) in enumerate(
                zip(self.layout.stages, self.pieces, strict=True)
            )
        )

    def _text(self, piece: Piece) -> str:
        if self.is_resized:
            return f"[{piece.start},{piece.stop})"
        return str(piece.start // self.micro_batch_size)

    @property
    def is_resized(self) -> bool:
        """True if pieces are not whole micro-batches, so that sums have no canonical order."""
        return self.policy == RESIZE

    def coordinate(self, slot: int) -> Coordinate | None:
        """The place of a worker; None for a free one."""
        return coordinates_of(self.layout).get(slot)

    def part(self, slot: int) -> tuple[Any, ...] | None:
        """The part of the model that a worker has: stage, tp position, layers; and its replica."""
        place = self.coordinate(slot)
        if place is None:
            return None
        replica = self.layout.stages[place.stage][place.order].replica
        return place.stage, place.tp, self.layout.layers(place.stage), replica

    def clock(self, slot: int) -> float:
        """The clock of a worker; 1 for a free one."""
        coordinate = self.coordinate(slot)
        return self.clocks[coordinate.stage] if self.clocks and coordinate else 1.0

    def samples(self, slot: int) -> tuple[Samples, ...]:
        """The pieces of a worker in the order of their forwards; none for a free one."""
        coordinate = self.coordinate(slot)
        pieces = () if coordinate is None else self.pieces[coordinate.stage][coordinate.order]
        return tuple(Samples(piece.start, piece.stop) for piece in pieces)

    def microbatches(self, slot: int) -> tuple[int, ...]:
        """Micro-batches of a worker in the order of their forwards; of resized pieces the first."""
        return tuple(piece.start // self.micro_batch_size for piece in self.samples(slot))

    def reports(self, slot: int) -> tuple[int, ...]:
        """List the step's losses that a worker reports, by samples; all at the last stage."""
        coordinate = self.coordinate(slot)
        if coordinate is None or coordinate.stage != len(self.pieces) - 1:
            return ()
        if self.sums:
            return self.sums[-1][coordinate.order]
        if not self.is_resized:
            return self.microbatches(slot)
        starts = sorted(piece.start for pieces in self.pieces[-1] for piece in pieces)
        return tuple(starts.index(piece.start) for piece in self.samples(slot))

    @property
    def num_reports(self) -> int:
        """Losses of the step: one for each piece of the last stage."""
        return sum(map(len, self.pieces[-1])) if self.is_resized else self.num_microbatches

    def renumbered(self, numbers: Sequence[int], *, num_microbatches: int) -> "PipelineFlow":
        """Return the same work on these micro-batches, of a larger batch; not if resized.

        ``numbers``: rising, of each micro-batch here the one there.
        """
        size = self.micro_batch_size

        def there(piece: Piece) -> Piece:
            number = numbers[piece.start // size]
            return piece._replace(start=number * size, stop=(number + 1) * size)

        return replace(
            self,
            num_microbatches=num_microbatches,
            pieces=tuple(
                tuple(tuple(map(there, own)) for own in of_stage) for of_stage in self.pieces
            ),
            lists=(),
            is_greedy=False,
            is_split=False,
        )

    def ops(self, slot: int) -> WorkerOps:
        """Return the ordered operations of a worker that has a place.

        Without ``lists``: by the window rule, or interleaved if a worker has several model chunks.
        """
        coordinate = coordinates_of(self.layout)[slot]
        if self.lists:
            return self.lists[coordinate.stage][coordinate.order]
        pieces = self.pieces[coordinate.stage][coordinate.order]
        if self.layout.vpp > 1:
            return interleaved_ops(
                pieces,
                stage=coordinate.stage,
                num_stages=len(self.layout.stages),
                num_chunks=self.layout.vpp,
            )
        return window_ops(pieces, window=self.windows[coordinate.stage])

    def crossings(self, stage: int) -> tuple[Crossing, ...]:
        """List what passes from a stage to the next; from the last to the first: its next chunk."""
        following = (stage + 1) % len(self.pieces)
        return crossings(*(_intervals(self.pieces[one]) for one in (stage, following)))

    def shard_group(self, stage: int, tp: int) -> Dataflow:
        """Return the micro-batches of workers that share one state, for the exact order of sums.

        A worker has those of its own replica first: where it runs them all, their sum stays there.
        Raises ValueError if pieces are not whole micro-batches: such sums have no exact order.
        """
        if self.is_resized:
            raise ValueError("resized pieces have no exact order of sums")
        return Dataflow(
            num_microbatches=self.num_microbatches,
            num_replicas=self.layout.dp,
            placement=tuple(
                sorted(
                    (group.slots[tp], tuple(sorted(own, key=partial(self._is_other, group))))
                    for group, own in zip(self.layout.stages[stage], self._sums(stage), strict=True)
                )
            ),
        )

    def _sums(self, stage: int) -> Sequence[tuple[int, ...]]:
        """List the micro-batches that each replica of a stage adds up."""
        if self.sums:
            return self.sums[stage]
        return [
            tuple(piece.start // self.micro_batch_size for piece in pieces)
            for pieces in self.pieces[stage]
        ]

    def _is_other(self, group: TpGroup, microbatch: int) -> bool:
        return microbatch % self.layout.dp != group.replica

    @property
    def sent_apart(self) -> int:
        """The most contributions of a worker beside the one that its gradients hold in the end."""
        if self.is_healthy or self.is_resized:
            return 0
        return max(self.shard_group(stage, 0).sent_apart for stage in range(len(self.pieces)))

    @property
    def is_healthy(self) -> bool:
        """True if every stage is as at launch: the framework's own schedule runs."""
        layout = self.layout
        whole = layout.is_rectangular and layout.keeps_stages and layout.keeps_layers
        return whole and not self.slow and self.policy != ROTATED

    def rotated(self, *, spread: bool) -> "PipelineFlow":
        """Return the same work, each micro-batch by another replica; unchanged if not healthy.

        ``spread`` as in `Dataflow.rotated`.
        """
        if not self.is_healthy:
            return self
        pieces = tuple(rotated(stage, spread=spread) for stage in self.pieces)
        return replace(self, pieces=pieces, policy=ROTATED)

    def in_greedy_order(self) -> "PipelineFlow":
        """Return the same in greedy order, if layers take its ``times``."""
        predictor, limits = self._predictor()
        costs = predictor.costs
        peaks = [
            max(peak_in_flight(ops, lambda op: op.stop - op.start) for ops in stage)
            for stage in window_lists(self.pieces, self.windows)
        ]
        room = greedy_room(peaks, limits)
        times = self._stage_times(costs)
        lists = greedy_lists(self.pieces, times, costs.link, limits=room, windows=self.windows)
        return replace(self, lists=lists, is_greedy=True)

    def with_split_backward(self) -> "PipelineFlow":
        """Return the same with weight gradients where workers would wait, by its ``times``.

        Unchanged if there are too many workers for that.
        """
        predictor, limits = self._predictor()
        if not predictor.knows_split(len(self.layout.stages)):
            return self
        costs = predictor.costs
        lists = with_weights_in_bubbles(
            self.every_list(), self._stage_times(costs), costs.link, limits=limits
        )
        return replace(self, lists=lists, is_split=True)

    def _predictor(self) -> tuple[Predictor, list[int]]:
        """Return a predictor, and the samples that workers of each stage may hold."""
        layout = self.layout
        work = _work(layout, self.num_microbatches, self.micro_batch_size)
        most_held = self.most_held
        if most_held is None:
            most_held = _most_held(layout, work, dict(self.slow), None)
        costs = self.times.costs(
            num_layers=layout.num_layers, most_held=most_held, state=self.state
        )
        predictor = Predictor(costs, work, vpp=layout.vpp)
        return predictor, predictor.limits(tuple(map(range, layout.widths)), layout.cuts)

    def every_list(self) -> OpLists:
        """The ordered operations by stage and replica."""
        return tuple(
            tuple(self.ops(group.slots[0]) for group in groups) for groups in self.layout.stages
        )

    def simulated(self, times: LayerTimes, slow: Slowness) -> StepTime:
        """Simulate the compute of a step in which layers take ``times``, longer on the ``slow``."""
        costs = times.costs(num_layers=self.layout.num_layers)
        slowness = slowness_of(self.layout, slow)
        stages = self._stage_times(costs)
        return simulate(self.every_list(), stages, costs.link, slowness=slowness)

    def _stage_times(self, costs: CostModel) -> tuple[StageTime, ...]:
        speeds = [*self.clocks] * self.layout.vpp or None
        return costs.stage_times(self.layout.cuts, speeds=speeds)


def flow_of(
    *,
    layout: ParallelLayout,
    num_microbatches: int,
    micro_batch_size: int = 1,
    policy: Policy = "auto",
    may_resize: bool = False,
    split_backward: SplitBackward = "never",
    times: LayerTimes | None = None,
    slow: Slowness | None = None,
    clocks: ClockTable | None = None,
    power_cap_w: float = float("inf"),
    activation_room: float | None = None,
    state: StateBytes | None = None,
    launch_cuts: Sequence[int] | None = None,
    move_workers: bool = False,
    planned: PipelineFlow | None = None,
) -> PipelineFlow:
    """Deal a step's micro-batches over the live replicas of every stage, by simulated time.

    A whole layout goes on as at launch unless a worker is slow enough to get less work.
    ``may_resize``: whether auto may cut micro-batches; ``split_backward``: auto splits if it gains.
    ``slow``: the factor by which single workers take longer, by slot. With ``clocks``, stages may
    run at clocks other than 1 if one is narrower than at launch or has a slow worker; all workers
    together draw at most ``power_cap_w``. ``activation_room``: what a worker may hold, relative to
    the first stage at launch; ``state``: everything in bytes. With ``launch_cuts`` layers may leave
    stages with lost or slow workers, with ``move_workers`` replicas of wide stages too; ``layout``
    of the flow says where all are. ``planned``: the flow that led to ``layout``, returned if it is
    of as many micro-batches. Raises ConfigurationError if nothing fits in flight.
    """
    if planned is not None and planned.num_microbatches == num_microbatches:
        return planned
    times, slow = times or LayerTimes(), slow or {}
    work = _work(layout, num_microbatches, micro_batch_size)
    every = (REDEAL, REROUTE, RESIZE) if may_resize else (REDEAL, REROUTE)
    # A plan counts TP groups.
    rules = PlanRules(
        policies=every if policy == "auto" else (policy,),
        move_layers=launch_cuts is not None,
        move_workers=move_workers,
        split_backward=split_backward != "never",
        clocks=clocks,
        power_cap_w=power_cap_w / layout.tp,
    )
    found = _planned(layout, work, times, rules, slow, activation_room, state)
    if found is None:
        back = layout.recut(launch_cuts or layout.cuts)
        return _as_at_launch(back, num_microbatches, micro_batch_size, times)
    plan, slow, most_held = found
    pieces = plan_split(plan, work).assignment()
    chosen = () if plan.clocks is None else plan.clocks.clocks
    launch = _as_at_launch(plan.layout, num_microbatches, micro_batch_size, times)
    stays = plan.layout.is_rectangular and set(chosen) <= {1.0}
    if stays and _samples(pieces) == _samples(launch.pieces):
        return launch
    flow = replace(
        launch,
        policy=plan.chosen.choice.policy,
        pieces=pieces,
        windows=plan.chosen.windows,
        clocks=chosen,
        slow=tuple(sorted(slow.items())),
        reasons=(*plan.reasons, *(() if state is None else state.reasons())),
        most_held=most_held,
        state=state,
        compute_s=plan.seconds if times.is_measured else None,
    )
    flow = flow.in_greedy_order() if plan.chosen.is_greedy else flow
    splits = plan.split_backward or split_backward == "always"
    return flow.with_split_backward() if splits else flow


def _work(layout: ParallelLayout, num_microbatches: int, micro_batch_size: int) -> StepWork:
    return StepWork(
        num_microbatches=num_microbatches,
        microbatch_size=micro_batch_size,
        launch_width=layout.dp,
    )


def _planned(
    layout: ParallelLayout,
    work: StepWork,
    times: LayerTimes,
    rules: PlanRules,
    slow: Slowness,
    room: float | None,
    state: StateBytes | None,
) -> tuple[JointPlan, Slowness, float] | None:
    """The best plan, the slow ones that it spares, and what a worker may hold by it.

    None where all go on as at launch. Where no plan that spares the slow ones fits, they have as
    much to do as the others.
    """
    if layout.is_rectangular and not slow:
        return None
    most_held = _most_held(layout, work, slow, room)
    costs = times.costs(num_layers=layout.num_layers, most_held=most_held, state=state)
    facts: dict[str, Any] = {"before": layout, "after": layout, "costs": costs, "work": work}
    try:
        return joint_plan(**facts, rules=rules, slow=slow), slow, most_held
    except ConfigurationError:
        if not slow:
            raise
    return _planned(layout, work, times, rules, {}, room, state)


def _most_held(layout: ParallelLayout, work: StepWork, slow: Slowness, room: float | None) -> float:
    """Return the samples times layers that a worker may hold in flight.

    They are ``room`` times what the first stage of the launch holds, which is a slot for each
    stage. None: one slot more, a slot being the part of one micro-batch a replica that a usual
    worker of the weakest stage runs; with interleaved stages at least what their order holds, which
    cannot be reduced.
    """
    num_stages, vpp = len(layout.stages), layout.vpp
    at_launch = work.microbatch_size * layout.num_layers
    if room is not None:
        return room * at_launch
    slot = ceil(layout.dp / min(map(fair_width, slowness_of(layout, slow))))
    # Chunks: one of each for every stage, and those that the warm-up of the last one adds.
    chunks = num_stages * vpp + max(vpp, num_stages - 1)
    return slot * chunks * at_launch / (num_stages * vpp)


def _as_at_launch(
    layout: ParallelLayout, num_microbatches: int, micro_batch_size: int, times: LayerTimes
) -> PipelineFlow:
    """Let every replica run its own micro-batches, in 1F1B order."""
    replicas = tuple(
        _own(order, layout.dp, num_microbatches, micro_batch_size) for order in range(layout.dp)
    )
    return PipelineFlow(
        layout=layout,
        num_microbatches=num_microbatches,
        micro_batch_size=micro_batch_size,
        policy=AS_LAUNCHED,
        pieces=tuple(replicas for _ in layout.stages),
        windows=window_sizes(len(layout.stages)),
        times=times,
    )


def _samples(pieces: Assignment) -> list[list[list[tuple[int, int]]]]:
    """List the samples of every worker."""
    return [[sorted((one.start, one.stop) for one in own) for own in stage] for stage in pieces]


def _own(
    replica: int, num_replicas: int, num_microbatches: int, micro_batch_size: int
) -> tuple[Piece, ...]:
    own = replica_microbatches(
        replica, num_replicas=num_replicas, num_microbatches=num_microbatches
    )
    return tuple(Piece(slot, *Samples.of(k, size=micro_batch_size)) for slot, k in enumerate(own))


def _intervals(stage: Sequence[Sequence[Piece]]) -> list[list[tuple[int, int]]]:
    return [[(piece.start, piece.stop) for piece in pieces] for pieces in stage]


# The work of each worker in a step: whole micro-batches, shares of each, or a pipeline's pieces.
Flow = Dataflow | Shares | PipelineFlow
