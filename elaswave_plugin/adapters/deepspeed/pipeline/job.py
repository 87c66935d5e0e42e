"""A `PipelineEngine` whose `train_batch` absorbs the loss of workers.

`train_batch` is ours to call again, so a step that was interrupted is run again from its start.
Whole micro-batches move: a pipeline that is lost leaves its own to the others, each of which runs
its part of the step through DeepSpeed's own schedule.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from deepspeed.runtime.dataloader import RepeatingLoader
from deepspeed.runtime.pipe import schedule

from elaswave_plugin.adapters.deepspeed.compat.unsupported import (
    check_engine,
    check_last_batch,
    check_pipeline,
    check_pipelines,
    check_schedules,
)
from elaswave_plugin.adapters.deepspeed.engine.attached import AttachedEngine, abandoning
from elaswave_plugin.adapters.deepspeed.engine.checkpoint import load_checked, save_whole
from elaswave_plugin.adapters.deepspeed.engine.loader import (
    ElasticLoader,
    Reader,
    Request,
    tokens_of,
)
from elaswave_plugin.adapters.deepspeed.engine.newcomer import Loads
from elaswave_plugin.adapters.deepspeed.engine.resumed import Resumed
from elaswave_plugin.adapters.deepspeed.pipeline.framework import PipelineFramework
from elaswave_plugin.adapters.deepspeed.pipeline.grid import launch_replicas
from elaswave_plugin.adapters.deepspeed.pipeline.newcomer import PipelineKnowledge
from elaswave_plugin.adapters.patching import PatchSet
from elaswave_plugin.core.recovery_plan.replica_placement import ReplicaPlacement, deal_replicas
from elaswave_plugin.core.step.dataflow import Dataflow
from elaswave_plugin.core.step.rng import draw_key
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.framework import StepReport
from elaswave_plugin.loops.call_log import CallLog
from elaswave_plugin.loops.guarded_steps import GuardedSteps
from elaswave_plugin.recovery.worker import Worker
from elaswave_plugin.step_state.engine_parts import (
    Buffers,
    Frozen,
    Generators,
    Settings,
    Weights,
)
from elaswave_plugin.step_state.step_state import StepState
from elaswave_plugin.values.plain import gathered

_GIVE_DATA = (
    "give the dataset to deepspeed.initialize as training_data, or take the batches from "
    "elaswave_plugin.deepspeed.loader(engine, dataset)"
)


class Microbatch(NamedTuple):
    """One micro-batch of a step: items of the dataset; ids number them over the job."""

    number: int
    request: Request
    ids: tuple[int, ...]


class Rereading:
    """An iterator whose items can be had again from the first on."""

    def __init__(self, items: Iterator[Any] | None) -> None:
        """None: a stage in the middle of a pipeline reads none."""
        self._items: Iterator[Any] = iter(()) if items is None else iter(items)
        self._read: list[Any] = []

    def from_the_first(self) -> Iterator[Any]:
        """Those that were read before, then those that come."""
        yield from self._read
        for item in self._items:
            self._read.append(item)
            yield item


class PipelineJob(AttachedEngine):
    """One worker's part of a pipeline in an elastic job."""

    # Where a job that is resumed begins.
    _resumed: Resumed | None = None

    def __init__(self, worker: Worker, engine: Any, *, patches: PatchSet, seed: int) -> None:
        """Take the engine into care and seal its state; raises ConfigurationError."""
        check_engine(engine)
        check_pipeline(engine)
        _check_untimed(worker)
        framework = self._pipeline = PipelineFramework(engine, worker)
        launch_slots = launch_replicas(engine.module, worker.launch_slots)
        count = len(launch_slots) * int(engine.gradient_accumulation_steps())
        check_pipelines(
            worker.reserve, module=engine.module, width=len(launch_slots), num_microbatches=count
        )
        super().__init__(
            worker, engine, framework, width=len(launch_slots), patches=patches, seed=seed
        )
        self._num_microbatches = count
        worker.bind(
            framework,
            deal=partial(deal_replicas, num_microbatches=self._num_microbatches),
            placement=ReplicaPlacement.at_launch(
                launch_slots,
                groups=worker.groups_at_launch(),
                buckets=self._buckets_by_stage(),
                reserve=worker.spare_width,
            ),
        )
        buffers = Buffers(engine.module, refused="a pipeline's stages do not average them")
        parts = (
            Settings(engine.basic_optimizer),
            Weights(engine.module, whole=True),
            Generators(),
            buffers,
            Frozen(engine.module),
        )
        self._state = StepState(worker, parts)
        steps = GuardedSteps(
            worker,
            framework,
            on_commit=self._record,
            on_recovered=self._told_recovery,
            state=self._state,
            counted_by="engine.global_steps",
        )
        self._drafts = steps.drafts
        self._loop = CallLog(steps, knowledge=PipelineKnowledge(worker, framework), passes=True)
        framework.hides_counters = self._loop.is_lagging
        self._loads = Loads(worker)
        self._sealed = self._evaluating = False
        self._data: Any = None
        # Of the present attempt of a step.
        self._step: list[Microbatch] = []
        self._passes = self._tokens = 0
        self._agreed = (0.0, 0)
        self._result: Any = None
        framework.watch(
            worker.phases.enter, lambda module: worker.member.check(), hooks=self._hooks
        )
        engine._INSTRUCTION_MAP = self._instructions(engine._INSTRUCTION_MAP)
        self._take_over(
            {
                "train_batch": self._train_batch,
                "_scale_loss_by_gas": self._scale_loss,
                "eval_batch": self._eval_batch,
                "set_dataiterator": self._set_iterator,
                "set_dataloader": self._set_data,
                "save_checkpoint": self._save_checkpoint,
                "load_checkpoint": self._load,
                "destroy": self._destroy,
            }
        )
        self._attached()

    def _buckets_by_stage(self) -> list[tuple[int, ...]]:
        worker = self._worker
        if not worker.detached:
            mine = self._engine.stage_id, self._framework.bucket_lengths()
            stages = sorted(dict(gathered(mine)).items())
            worker.remember(stages=[list(lengths) for _, lengths in stages])
        return [tuple(lengths) for lengths in worker.job_constants["stages"]]

    @property
    def _weight(self) -> float:
        """The weight of a micro-batch, where gradients are averaged over the pipelines."""
        return len(self._pipeline.placement.replicas) / self._width

    # ---- the engine's methods -------------------------------------------------------------------

    def _train_batch(self, native: Callable[[], Any], data_iter: Any = None) -> Any:
        if not torch.is_grad_enabled():
            raise RuntimeError("train_batch() needs gradients, and they are switched off")
        if data_iter is not None:
            self._set_data(None, data_iter)
        if self._data is None:
            raise ConfigurationError(f"engine.train_batch has no data on this worker; {_GIVE_DATA}")
        self._begin()
        if self._loop.step(lambda step: self._attempt(native)) is None:
            return self._passed()
        self._end_where_all_leave()
        return self._result

    def _passed(self) -> torch.Tensor:
        """A step that the others have behind them: the script counts it, and has no loss of it."""
        self._count_step()
        return torch.tensor(math.nan, device=self._engine.device)

    def _begin(self) -> None:
        if not self._sealed:
            check_schedules(self._engine)
            self._framework.begin()
            self._loop.start()
            self.own_loops.begin()
            self._sealed = True

    def _attempt(self, native: Callable[[], Any]) -> StepReport:
        worker, framework = self._worker, self._pipeline
        framework.show_counters()
        worker.phases.enter("data")
        self._passes = self._tokens = 0
        self._step = self._read_step()
        if framework.is_busy:
            self._engine.data_iterator = self._batches()
            self._result = native()
        else:
            self._begin_update()
        norm = torch.tensor([framework.grad_norm()], dtype=torch.float64)
        report = StepReport(
            loss=self._agreed[0],
            grad_norm=float(self._tell_free(norm)),
            lr=framework.learning_rate(),
            tokens=self._agreed[1],
        )
        return report if framework.is_busy else self._looked_on(report)

    def _took_loader(self, loader: ElasticLoader) -> None:
        check_last_batch(
            num_samples=loader.fewest_samples,
            whole=self._micro_batch_size * self._width,
            dynamic_shape=bool(self._engine.module.dynamic_shape),
        )

    def _looked_on(self, report: StepReport) -> StepReport:
        """The step of a worker without a pipeline: its script counts it as the others' do."""
        engine = self._engine
        self._count_step()
        if math.isinf(report.grad_norm):
            engine.skipped_steps += 1
        elif engine.lr_scheduler is not None:
            engine.lr_scheduler.step()
        self._result = torch.tensor(report.loss, dtype=torch.float32, device=engine.device)
        return replace(report, lr=self._framework.learning_rate())

    def _count_step(self) -> None:
        engine = self._engine
        engine.global_steps += 1
        engine.global_samples += engine.train_batch_size()

    def _begin_update(self) -> None:
        """Wait until all state is here and safe on every worker; see ``await_copies``."""
        self._worker.state.begin_update()
        engine, mine = self._engine, 0.0
        if self._pipeline.is_busy and engine.is_last_stage():
            mine = sum(float(loss) for loss in engine.fwd_outputs)
        sums = torch.tensor([mine, self._tokens], dtype=torch.float64)
        dist.all_reduce(sums)
        self._agreed = float(sums[0]) / self._num_microbatches, int(sums[1])

    def _scale_loss(
        self, native: Callable[..., Any], loss: Any, eval_micro_batches: int | None = None
    ) -> Any:
        """The mean that `train_batch` returns is over the global batch, too."""
        scaled = native(loss, eval_micro_batches)
        is_whole = eval_micro_batches is not None or self._weight == 1.0
        return scaled if is_whole else scaled * self._weight

    # ---- DeepSpeed's schedule -------------------------------------------------------------------

    def _instructions(self, native: Mapping[type, Callable[..., None]]) -> dict[type, Any]:
        """DeepSpeed's instructions, with what a change of the pipelines asks for around three."""

        def forward(engine: Any, buffer_id: int) -> None:
            self._key_draws()
            native[schedule.ForwardPass](engine, buffer_id)

        def backward(engine: Any, buffer_id: int) -> None:
            if engine.is_last_stage() and self._weight != 1.0:
                engine.loss = engine.loss * self._weight
            native[schedule.BackwardPass](engine, buffer_id)

        def step(engine: Any) -> None:
            self._state.check(self._worker.completed)
            self._begin_update()
            with self._unbound.bound_step():
                native[schedule.OptimizerStep](engine)

        return {
            **native,
            schedule.ForwardPass: forward,
            schedule.BackwardPass: backward,
            schedule.OptimizerStep: step,
        }

    def _key_draws(self) -> None:
        """Key the draws by step, micro-batch and stage, alike on any worker that runs them."""
        if not self._engine.module.training:
            return
        worker, engine = self._worker, self._engine
        number = self._own_microbatches()[self._passes]
        torch.manual_seed(draw_key(self._seed, worker.completed, number, engine.stage_id))
        # What `seed_layers` goes by: micro-batches that this pipeline of the launch has run.
        accumulation = self._num_microbatches // self._width
        engine.module.micro_offset = worker.completed * accumulation + number // self._width
        self._passes += 1

    def _own_microbatches(self) -> tuple[int, ...]:
        assert isinstance(self._worker.dataflow, Dataflow)
        return self._worker.dataflow.microbatches(self._worker.slot)

    # ---- the data -------------------------------------------------------------------------------

    @property
    def _reader(self) -> Reader:
        return self

    def next_batch(self, loader: ElasticLoader) -> NoReturn:
        """Raises ConfigurationError: `train_batch` reads the batches of a step itself."""
        raise ConfigurationError(
            "the training loader was iterated, and engine.train_batch reads from it by itself; "
            "give it to train_batch, or leave data_iter out"
        )

    def _set_iterator(self, native: Callable[[Any], None], iterator: Any) -> None:
        """`set_dataiterator`, by a script, or by an evaluation with the script's iterator."""
        if self._evaluating:
            native(iterator)
        else:
            self._set_data(None, iterator)

    def _set_data(self, native: object, data: Any) -> None:
        """Set the data of `train_batch`: given to it, `set_dataloader` or `set_dataiterator`."""
        loader = data
        while isinstance(loader, RepeatingLoader):
            loader = loader.loader
        if loader is not self._framework.loader or not isinstance(loader, ElasticLoader):
            raise ConfigurationError(
                f"engine.train_batch was given a {type(data).__name__}, whose samples could not "
                f"be read again; {_GIVE_DATA}"
            )
        self._data = self._engine.training_dataloader = data

    def _read_step(self) -> list[Microbatch]:
        """All micro-batches of the step; micro-batch j D + d is the j-th of pipeline d."""
        loader = self._framework.loader
        found: list[Microbatch] = []
        assert loader is not None
        if self._resumed is not None and self._worker.completed == 0:
            self._resumed.begin(loader, self._next_items(loader), are_read=False)
        for _ in range(self._num_microbatches // self._width):
            items, first = self._next_items(loader), loader.position.served
            size = len(items) // self._width
            for start in range(0, len(items), size):
                found.append(
                    Microbatch(
                        len(found),
                        loader.request(items, (start, start + size)),
                        tuple(range(first + start, first + start + size)),
                    )
                )
            loader.advance(len(items))
        return found

    def _next_items(self, loader: ElasticLoader) -> Sequence[int]:
        try:
            return loader.items()
        except StopIteration:
            if not isinstance(self._data, RepeatingLoader):
                raise
        iter(loader)
        return loader.items()

    def _batches(self) -> Iterator[Any]:
        """This pipeline's batches of the step, as its first and its last stage read them."""
        worker, loader = self._worker, self._framework.loader
        assert loader is not None
        for number in self._own_microbatches():
            one = self._step[number]
            batch, items = loader.batch(one.request), one.request.items
            if self._engine.is_first_stage():
                self._tokens += tokens_of(batch, len(items))
                worker.ledger.emit(
                    "consumed",
                    slot=worker.slot,
                    epoch=worker.view.epoch,
                    step=worker.completed,
                    k=number,
                    samples=list(one.ids),
                    items=list(items),
                    **(self._resumed.told(worker.completed) if self._resumed else {}),
                )
            yield batch

    # ---- between steps --------------------------------------------------------------------------

    def _eval_batch(
        self,
        native: Callable[..., Any],
        data_iter: Iterator[Any] | None,
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Evaluate; after a loss it starts again, with the same batches, on the workers left."""
        count = num_micro_batches or self._num_microbatches // self._width
        told_to_all = compute_loss and bcast_loss
        batches = Rereading(data_iter)
        if self._loop.is_lagging:
            self._skip_batches(batches.from_the_first(), count)
            passed = torch.tensor(math.nan, device=self._engine.device)
            return (passed, None) if return_logits else passed

        def work() -> Any:
            self._evaluating = True
            try:
                if not self._pipeline.is_busy:
                    seen = self._look_on_evaluation(batches.from_the_first(), count, told_to_all)
                    return (seen, None) if return_logits else seen
                result = native(
                    batches.from_the_first(),
                    return_logits,
                    compute_loss,
                    reduce_output,
                    bcast_loss,
                    count,
                )
                loss = result[0] if return_logits else result
                if told_to_all:
                    self._tell_free(loss.detach().float().reshape(1))
                return result
            finally:
                self._evaluating = False

        return self._between_steps(work, phase="evaluation")

    def _look_on_evaluation(self, batches: Iterator[Any], count: int, told: bool) -> Any:
        """Do, without a pipeline, what native code does with all workers, and as many batches."""
        dist.barrier()
        self._skip_batches(batches, count)
        if not told:
            return None
        return self._tell_free(torch.zeros(1, device=self._engine.device))[0]

    def _skip_batches(self, batches: Iterator[Any], count: int) -> None:
        """Read as many as the stage reads in an evaluation."""
        if self._engine.is_first_stage() or self._engine.is_last_stage():
            for _ in range(count):
                next(batches)

    def _tell_free(self, value: torch.Tensor) -> torch.Tensor:
        """Workers without a pipeline get the value of the first one's first stage."""
        worker, placement = self._worker, self._pipeline.placement
        if placement.free:
            dist.broadcast(value, src=worker.ranks.index(placement.replicas[0][0]))
        return value

    @abandoning
    def run(self, work: Callable[[], Any], *, phase: str) -> Any:
        """Work between steps that every worker calls; it starts again after a loss."""
        return self._between_steps(work, phase=phase)

    @abandoning
    def mean(self, value: Any) -> NoReturn:
        """Refused: `train_batch` returns the mean."""
        raise ConfigurationError(
            "elaswave_plugin.deepspeed.mean is called with the engine of a pipeline, which has no"
            " samples of a worker's own; take what engine.train_batch returns, the mean over all"
        )

    def _save_checkpoint(self, native: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        write = partial(self._framework.save, native)
        save = partial(save_whole, self._drafts, write, self._engine, *args, **kwargs)
        return self._between_steps(save, phase="save")

    def _between_steps(self, work: Callable[[], Any], *, phase: str) -> Any:
        """Inside of other such work a part of that, which starts again as a whole."""
        if self._working:
            return work()

        self._begin()
        return self._loop.run(self._as_one(work), phase=phase)

    def _load(self, native: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._sealed:
            raise ConfigurationError(
                "engine.load_checkpoint was called after the first batch, and the state that it "
                "replaces is in the snapshots already; load before the loop starts"
            )
        load = partial(load_checked, native, self._engine, *args, **kwargs)
        loaded = self._loads.load(self._engine, load)
        if self._engine.global_steps:
            self._resumed = Resumed.behind(self._engine, self._worker, whole=False)
        return loaded

    # ---- the end --------------------------------------------------------------------------------

    def _record(self, step: int, report: StepReport, seconds: float) -> None:
        count = len(self._own_microbatches()) if self._pipeline.is_busy else 0
        self._recording.step(step, report, seconds, num_microbatches=count, last=False)

    def _leave_together(self) -> None:
        if self._worker.config.dump_state == "last":
            self._loop.run(self._dump_last, phase="save")
        self._loop.finish(before_leaving=self._recording.tracker.close)


def _check_untimed(worker: Worker) -> None:
    """Raise ConfigurationError where slow workers are to get less."""
    if worker.config.slow_workers == "act":
        raise ConfigurationError(
            "slow_workers is 'act', and passes of DeepSpeed's pipelines are not timed; leave it out"
        )
