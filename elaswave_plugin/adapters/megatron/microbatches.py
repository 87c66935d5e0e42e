"""The samples that this worker runs in a step, and the forward-backward function that runs them."""

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

from megatron.core import parallel_state

from elaswave_plugin.adapters import reimplemented
from elaswave_plugin.adapters.cut_draws import CutDraws
from elaswave_plugin.adapters.megatron.bound_models import BoundModels
from elaswave_plugin.adapters.megatron.compat import rng
from elaswave_plugin.adapters.megatron.contract import ForwardBackward
from elaswave_plugin.adapters.megatron.first_step import FirstStep
from elaswave_plugin.adapters.megatron.framework import MegatronFramework
from elaswave_plugin.adapters.megatron.grid import Grid, element_bytes, state_bytes
from elaswave_plugin.adapters.megatron.step import executor
from elaswave_plugin.adapters.megatron.step.data import in_order
from elaswave_plugin.adapters.megatron.step.entry_proof import compare_losses, tell_losses
from elaswave_plugin.adapters.megatron.step.lonely_calls import without_collectives
from elaswave_plugin.adapters.megatron.step.ragged_pipeline import RaggedPipeline
from elaswave_plugin.adapters.megatron.step.reported_losses import KeptReports
from elaswave_plugin.adapters.megatron.step.weight_gradients import WeightGradients
from elaswave_plugin.adapters.megatron.sums.kept_sums import KeptSums
from elaswave_plugin.adapters.megatron.sums.tied_embeddings import TiedWeight
from elaswave_plugin.adapters.upstream_sources import Row, say_unknown
from elaswave_plugin.core.layout.layout import Coordinate
from elaswave_plugin.core.planner.costs import deal_within
from elaswave_plugin.core.planner.pipeline_flow import PipelineFlow
from elaswave_plugin.core.planner.redo_flow import redo_flow, saves_time
from elaswave_plugin.core.recovery_plan.placement import FlatPlacement
from elaswave_plugin.core.step.dataflow import Dataflow, Samples
from elaswave_plugin.core.step.sum_order import Contribution
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.recovery.worker import Worker
from elaswave_plugin.values.plain import gathered

# Called with (data iterator, model chunk, samples) before each forward step.
Begin = Callable[[Any, Any, Samples], None]


class Microbatches:
    """One worker's part of a step under the flow that the view of the job asks for."""

    def __init__(
        self,
        worker: Worker,
        models: BoundModels,
        *,
        num_microbatches: int,
        micro_batch_size: int,
        seed: int,
        passes_undone: Callable[[], AbstractContextManager[None]],
        is_as_begun: Callable[[int], bool] | None = None,
        why_whole: str | None = None,
        whole_replicas: bool = False,
    ) -> None:
        """Bind the worker to the models and their deal; collective over WORLD.

        There is one, with tensor or pipeline parallelism. ``num_microbatches`` of the whole batch,
        for which views are planned; ``seed``: of the draws; ``passes_undone()``: inside, passes run
        whose changes of the step's state are undone; ``why_whole``: why the script gives whole
        micro-batches only, if so. ``whole_replicas``: in a data-parallel job a
        worker runs nothing less, until ``deal_freely`` is called.
        Raises ConfigurationError for what tensor and pipeline parallel jobs do not carry.
        """
        self._worker = worker
        self._models = models
        self._num_microbatches = num_microbatches
        self._micro_batch_size, self._seed = micro_batch_size, seed
        # What was run last, which losses of the batch its reports are, and how many there are.
        self.executed: tuple[Samples, ...] = ()
        self.reports: tuple[int, ...] = ()
        self.num_reports = 0
        self._earlier: tuple[int, ...] = ()
        self._cut_draws = CutDraws(sequence_first=True)
        self._weight_gradients = WeightGradients()
        self._tied: dict[int, TiedWeight] = {}
        # Flows without some replicas: one object for each.
        self._reduced: dict[tuple[int, int, frozenset[int]], Dataflow | PipelineFlow] = {}
        self._in_step, self._enters = False, True
        # A step, and the samples of the micro-batches that it has used here.
        self._used: tuple[int, dict[int, tuple[int, ...]]] = (-1, {})
        if worker.owns_rank_0:
            say_unknown(_reimplemented(models))
        tp = parallel_state.get_tensor_model_parallel_world_size()
        if (tp, parallel_state.get_pipeline_model_parallel_world_size()) == (1, 1):
            worker.config.check_without_stages()
            lengths = models.bucket_lengths()
            state = state_bytes(
                worker.config,
                dict(enumerate(lengths)),
                element_bytes=element_bytes(models.chunks[0]),
                largest=sum(lengths),
                width=len(worker.launch_slots),
            )
            dealt = partial(deal_within, state, num_microbatches=num_microbatches)
            worker.bind(models, deal=dealt, whole=whole_replicas)
        else:
            (model,) = models.models
            grid = Grid(
                worker,
                model,
                num_microbatches=num_microbatches,
                micro_batch_size=micro_batch_size,
                why_whole=why_whole,
            )
            self._tied = grid.tied
            worker.bind(models, deal=grid.deal, placement=grid.placement)
        self._placed = worker.dataflow
        models.take_place(worker.dataflow)
        self._first_step = FirstStep(worker, models, seed=seed, passes_undone=passes_undone)
        if worker.promises_bits and _add_gradients_only(models):
            models.models[0].reduction.kept.is_as_begun = is_as_begun

    @property
    def flow(self) -> Dataflow | PipelineFlow:
        """The samples that each worker runs now, as this adapter deals them."""
        flow = self._worker.dataflow
        assert isinstance(flow, Dataflow | PipelineFlow)
        return flow

    @property
    def coordinate(self) -> Coordinate | None:
        """This worker's place; None for a free one."""
        flow, slot = self.flow, self._worker.slot
        if isinstance(flow, PipelineFlow):
            return flow.coordinate(slot)
        return Coordinate(stage=0, order=self._worker.view.ranks.index(slot), tp=0)

    def is_placed(self, slot: int) -> bool:
        """Return whether a worker that is there has a part of the model."""
        flow = self.flow
        return isinstance(flow, Dataflow) or flow.coordinate(slot) is not None

    @property
    def hosted(self) -> tuple[int, ...]:
        """The replicas of which this worker runs micro-batches, in a data-parallel job."""
        flow = self.flow
        assert isinstance(flow, Dataflow)
        return tuple(sorted({part.replica for part in flow.contributions(self._worker.slot)}))

    def deal_freely(self) -> None:
        """Allow the next view and later ones to deal other parts than whole replicas."""
        placement = self._worker.placement
        if isinstance(placement, FlatPlacement):
            self._worker.placement = replace(placement, whole=False)

    @property
    def has_kept(self) -> bool:
        """True if the last call has gone on from micro-batches that a struck step had."""
        return bool(self._earlier)

    @property
    def reports_losses(self) -> bool:
        """True if the losses of what this worker runs are counted here: once for each."""
        coordinate = self.coordinate
        return coordinate is not None and coordinate.tp == 0 and self._has_losses

    @property
    def _has_losses(self) -> bool:
        """True on the last stage."""
        coordinate, flow = self.coordinate, self.flow
        last = len(flow.layout.stages) - 1 if isinstance(flow, PipelineFlow) else 0
        return coordinate is not None and coordinate.stage == last

    def consume(self, step: int, microbatch: int, ids: tuple[int, ...]) -> None:
        """Write to the ledger that the samples of a micro-batch are about to be used."""
        coordinate = self.coordinate
        if self._in_step:
            self._worker.phases.enter("data")
        # The samples of a micro-batch are counted where they enter the pipeline.
        counts = (
            self._enters and coordinate is not None and (coordinate.stage, coordinate.tp) == (0, 0)
        )
        if counts and self._in_step and not self._first_step.is_running:
            self._use(step, microbatch, ids)

    def _use(self, step: int, microbatch: int, ids: tuple[int, ...], *, kept: bool = False) -> None:
        """``kept``: whether this attempt does not read them again."""
        if step != self._used[0]:
            self._used = step, {}
        self._used[1][microbatch] = ids
        self._worker.ledger.emit(
            "consumed",
            slot=self._worker.slot,
            epoch=self._worker.view.epoch,
            step=step,
            k=microbatch,
            samples=list(ids),
            **({"kept": True} if kept else {}),
        )

    def forward_backward(
        self,
        function: ForwardBackward,
        begin: Begin,
        *,
        moment: int,
        forward_only: bool,
        in_step: bool | None = None,
        num_microbatches: int | None = None,
        left_out: frozenset[int] = frozenset(),
        rehearses: bool = True,
        **kwargs: Any,
    ) -> list[Any]:
        """Healthy: Megatron-Core's own ``function``. After a loss: what this worker has to run.

        ``moment``: of the draws; ``in_step``: whether a step makes it, by default where it trains;
        ``num_microbatches``: of all replicas, if not the whole batch; ``left_out``: replicas that
        are not run; ``rehearses``: whether the first step may run twice. Returns losses, one for
        each of ``reports``, where they are known. Raises ConfigurationError for models not bound.
        """
        worker, flow = self._worker, self.dealt(num_microbatches, left_out)
        executor.check_arguments(kwargs)
        bound = self._models.of(kwargs["model"])
        if bound is None and isinstance(flow, PipelineFlow):
            raise ConfigurationError(
                "forward_backward is given a model that is not bound, and with tensor or pipeline "
                "parallelism it runs the bound one after a loss: call that model in forward_step"
            )
        self._in_step = not forward_only if in_step is None else in_step
        sums = bound.reduction.kept if bound is not None and self._in_step else None
        if sums is not None and (forward_only or sums.is_as_begun is None):
            sums = None
        flow, self._earlier = self._gone_on(flow, sums)
        self._patch(flow)
        if not forward_only and flow is not self._placed:
            self._models.take_place(flow)
            worker.begin_flow(flow)
            self._placed = flow

        def run(dealt: Dataflow | PipelineFlow) -> list[Any]:
            kept = KeptReports()
            self._order(dealt, self._earlier)
            ordered = in_order(
                forward_step, self.executed, starting, partial(worker.observe, "passed")
            )
            step: Callable[..., Any] = partial(kept.note, ordered)
            step = step if sums is None else self._adding(sums, dealt, kept, step)
            told.clear()
            step = partial(tell_losses, told, step) if worker.untried else step
            given = {**kwargs, "forward_step_func": step}
            reports = self._run(function, dealt, bound, forward_only=forward_only, **given)
            reports = kept.take() or reports  # none are kept of a step without a loss function
            return reports if sums is None else sums.reported(reports, self._ran, self.reports)

        forward_step = partial(without_collectives, worker.links, kwargs.pop("forward_step_func"))
        starting, told = partial(self._start, begin, bound, moment, forward_only), list[int]()
        again = partial(self._again, function, bound, starting, forward_step, kwargs)
        # A model beside the bound ones has no gradients to put back.
        rehearses = rehearses and self._in_step and self._first_step.is_due(flow)
        if rehearses and bound is not None:
            train = not forward_only
            reports = self._first_step.call(bound, flow, run, self._numbered, trains=train)
        else:
            reports = run(flow)
        if not forward_only:
            compare_losses(worker, flow, told, again)
            if self.reports_losses:
                worker.observe("reported", self.reports, reports)
        return reports

    def _again(
        self,
        function: ForwardBackward,
        bound: MegatronFramework | None,
        starting: Begin,
        forward_step: Callable[..., Any],
        kwargs: dict[str, Any],
        microbatches: tuple[int, ...],
    ) -> list[int]:
        """Run forward passes of this step once more; returns what its losses are told by."""
        self._in_step, retold = False, list[int]()
        pieces = [Samples.of(k, size=self._micro_batch_size) for k in microbatches]
        ordered = in_order(forward_step, pieces, starting, partial(self._worker.observe, "passed"))
        step = partial(tell_losses, retold, ordered)
        repeated = {**kwargs, "forward_step_func": step, "num_microbatches": len(pieces)}
        assert bound is not None
        with bound.passes_repeated():
            function(forward_only=True, **repeated)
        return retold

    def _gone_on(
        self, flow: Dataflow | PipelineFlow, sums: KeptSums | None
    ) -> tuple[Dataflow | PipelineFlow, tuple[int, ...]]:
        """Return the flow of a call and what this worker has of a struck step's already.

        With stages, collective over WORLD in a step that is redone: all go on from what all have.
        """
        worker = self._worker
        if sums is None:
            return flow, ()
        offered, why_not, again = sums.offered(), None, frozenset[int]()
        if isinstance(flow, PipelineFlow) and worker.phases.replaying and not flow.is_healthy:
            kept = dict(zip(worker.ranks, gathered([*offered]), strict=True))
            redo = redo_flow(flow, kept) if any(kept.values()) else flow
            if saves_time(redo, flow):
                flow = redo
                again = frozenset(k for slot in worker.ranks for k in flow.microbatches(slot))
            else:
                why_not = "all of the step takes no longer"
        earlier = sums.take_stand(why_not)
        step, used = self._used
        for microbatch in earlier if step == worker.completed else ():
            # In this view, too, they are used once; they are not read again.
            if microbatch in used and microbatch not in again:
                self._use(step, microbatch, used[microbatch], kept=True)
        return flow, earlier

    def _adding(
        self,
        sums: KeptSums,
        dealt: Dataflow | PipelineFlow,
        kept: KeptReports,
        step: Callable[..., Any],
    ) -> Callable[..., Any]:
        """Return the forward step of passes, whose sums are kept as far as they come."""
        if self._first_step.is_running:
            return step
        own = self._contributions(dealt) if dealt.is_healthy else ()
        if own:
            sums.begin(*own)
        report_of = (lambda number: kept.take()[number]) if self._has_losses else None
        return sums.noted(step, self._ran, report_of)

    def _contributions(self, flow: Dataflow | PipelineFlow) -> tuple[Contribution, ...]:
        """List what this worker adds up; nothing without a place."""
        place, slot = self.coordinate, self._worker.slot
        if isinstance(flow, PipelineFlow):
            return (
                () if place is None else flow.shard_group(place.stage, place.tp).contributions(slot)
            )
        return flow.contributions(slot)

    def _order(self, flow: Dataflow | PipelineFlow, kept: Collection[int] = ()) -> None:
        """Have what this worker runs of a flow, in order, without what is ``kept``."""
        slot, size = self._worker.slot, self._micro_batch_size
        if isinstance(flow, PipelineFlow):
            self.executed, self.reports = flow.samples(slot), flow.reports(slot)
            self.num_reports = flow.num_reports
            return
        parts = (part.microbatches for part in flow.contributions(slot))
        self.reports, self.num_reports = tuple(chain(*parts)), flow.num_microbatches
        missing = (k for k in self.reports if k not in kept)
        self.executed = tuple(Samples.of(k, size=size) for k in missing)

    @property
    def _ran(self) -> tuple[int, ...]:
        """The micro-batches that were run last, in order; of pieces of them, the first."""
        return tuple(piece.start // self._micro_batch_size for piece in self.executed)

    def _start(
        self,
        begin: Begin,
        bound: MegatronFramework | None,
        moment: int,
        forward_only: bool,
        iterator: Any,
        chunk: Any,
        samples: Samples,
    ) -> None:
        """A forward pass begins."""
        self._enters = bound is not None and chunk is bound.chunks[0]
        begin(iterator, chunk, samples)
        size = self._micro_batch_size
        rng.set_key(self._seed, moment, samples, size=size, forward_only=forward_only)
        self._worker.observe("pass_begun", *samples, chunk, iterator, forward_only)

    def uneven_runs(self, num_microbatches: int) -> tuple[tuple[int, int], ...]:
        """List (micro-batch, slot) of the workers that read it, one a TP group.

        Of a job with model parallelism whose stages are not as at launch; else nothing.
        """
        flow = self.dealt(num_microbatches)
        if not isinstance(flow, PipelineFlow) or flow.is_healthy:
            return ()
        places = ((slot, flow.coordinate(slot)) for slot in self._worker.ranks)
        return tuple(
            (microbatch, slot)
            for slot, place in places
            if place is not None and place.tp == 0
            for microbatch in flow.microbatches(slot)
        )

    def pass_over(self, read: Callable[[int], object], *, num_microbatches: int) -> None:
        """Have this worker's micro-batches of a step that is skipped read, by ``read(number)``."""
        self._in_step = self._enters = True
        flow, size = self.dealt(num_microbatches), self._micro_batch_size
        if self.coordinate is not None:
            self._order(flow)
            for piece in self.executed:
                for row in piece.rows(size=size):
                    read(row.microbatch)

    def _numbered(self, reports: list[Any]) -> Mapping[int, Any]:
        """Return the losses reported here, by their numbers in the step."""
        return dict(zip(self.reports, reports, strict=True)) if self.reports_losses else {}

    def _run(
        self,
        function: ForwardBackward,
        flow: Dataflow | PipelineFlow,
        bound: MegatronFramework | None,
        *,
        forward_only: bool,
        **kwargs: Any,
    ) -> list[Any]:
        """Run what this worker has to of a flow; ``bound``: the model, None for one beside them."""
        worker = self._worker
        if self.coordinate is None:
            return []
        if isinstance(flow, PipelineFlow) and not flow.is_healthy:
            assert bound is not None
            return self._run_pipeline(flow, bound, forward_only=forward_only, **kwargs)
        if flow.is_healthy:
            count = len(self.executed)
            return function(num_microbatches=count, forward_only=forward_only, **kwargs)
        assert isinstance(flow, Dataflow)
        passes = executor.ForwardPasses(
            **{name: kwargs[name] for name in ("forward_step_func", "data_iterator", "model")},
            replica_microbatches=flow.num_microbatches // flow.num_replicas,
        )
        if forward_only:
            for number, _ in enumerate(self.executed):
                passes.run(number)
            return passes.reports
        assert bound is not None
        executor.run_contributions(
            passes,
            contributions=flow.contributions(worker.slot),
            reduction=bound.reduction,
            model=bound.chunks[0],
        )
        return passes.reports

    def dealt(
        self, num_microbatches: int | None, left_out: frozenset[int] = frozenset()
    ) -> Dataflow | PipelineFlow:
        """Return the flow of a call, by the number of its micro-batches; some replicas left out."""
        flow = self._worker.flow_of(num_microbatches or self._num_microbatches)
        assert isinstance(flow, Dataflow | PipelineFlow)
        key = self._worker.view.epoch, flow.num_microbatches, left_out
        if left_out and key not in self._reduced:
            self._reduced[key] = self._without(flow, left_out)
        return self._reduced.get(key, flow)

    def _without(
        self, flow: Dataflow | PipelineFlow, left_out: frozenset[int]
    ) -> Dataflow | PipelineFlow:
        if isinstance(flow, Dataflow):
            return flow.without(left_out)
        count, width = flow.num_microbatches, flow.layout.dp
        numbers = [number for number in range(count) if number % width not in left_out]
        fewer = self._worker.flow_of(len(numbers))
        assert isinstance(fewer, PipelineFlow)
        return fewer.renumbered(numbers, num_microbatches=count)

    def is_rehearsed(self, num_microbatches: int) -> bool:
        """Return whether others run some of a call's micro-batches as well, as in a first step."""
        return bool(self._worker.untried) or self._first_step.is_due(self.dealt(num_microbatches))

    def finish(self) -> None:
        """Nothing is run any more."""
        self._patch(None)

    def _patch(self, flow: Dataflow | PipelineFlow | None) -> None:
        """Have in place what a flow needs, and nothing else."""
        ragged = flow if isinstance(flow, PipelineFlow) else None
        self._worker.stopwatch.is_split = ragged is not None and ragged.is_split
        self._cut_draws.close()
        if ragged is not None and ragged.is_resized:
            rng.cut_by(self._cut_draws)
        if self._worker.stopwatch.is_split:
            self._weight_gradients.patches.apply()
        else:
            self._weight_gradients.patches.undo()

    def _run_pipeline(
        self,
        flow: PipelineFlow,
        bound: MegatronFramework,
        *,
        forward_step_func: Callable[..., Any],
        data_iterator: Any,
        forward_only: bool,
        seq_length: int,
        micro_batch_size: int,
        **_: Any,
    ) -> list[Any]:
        pipeline = RaggedPipeline(
            flow=flow,
            slot=self._worker.slot,
            chunks=bound.chunks,
            reduction=bound.reduction,
            tied=self._tied,
            weight_gradients=self._weight_gradients,
            stopwatch=self._worker.stopwatch,
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
        )
        return pipeline.run(forward_step_func, data_iterator, forward_only=forward_only)


def _add_gradients_only(models: BoundModels) -> bool:
    """Return whether passes add up gradients in one chunk a worker, and count nothing beside."""
    return len(models.chunks) == 1 and models.chunks[0].config.num_moe_experts is None


def _reimplemented(models: BoundModels) -> list[Row]:
    """List what a job of these models uses of the functions that are re-implemented."""
    config = models.chunks[0].config
    rows = [*reimplemented.MEGATRON]
    if config.tensor_model_parallel_size > 1 or config.pipeline_model_parallel_size > 1:
        rows += reimplemented.MEGATRON_STAGES
    if config.num_moe_experts is not None:
        rows += reimplemented.MEGATRON_EXPERTS
    return rows
