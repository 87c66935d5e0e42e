"""The verbs of a script with the plugin on."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from elaswave_plugin.adapters.megatron.arguments import Sizes
from elaswave_plugin.adapters.megatron.bound_models import BoundModels
from elaswave_plugin.adapters.megatron.compat import rng
from elaswave_plugin.adapters.megatron.compat.whole_saves import WholeSaves
from elaswave_plugin.adapters.megatron.contract import ForwardBackward, TrainStep
from elaswave_plugin.adapters.megatron.framework import MegatronFramework
from elaswave_plugin.adapters.megatron.microbatches import Microbatches
from elaswave_plugin.adapters.megatron.own_numbers import OwnNumbers
from elaswave_plugin.adapters.megatron.own_timers import (
    say_without_barriers,
    stopped_where_interrupted,
)
from elaswave_plugin.adapters.megatron.plain import PlainJob
from elaswave_plugin.adapters.megatron.schedule_calls import without_known
from elaswave_plugin.adapters.megatron.state.model_buffers import ModelBuffers
from elaswave_plugin.adapters.megatron.state.param_gathers import guard_gathers
from elaswave_plugin.adapters.megatron.step.data import KeyedBatches, served
from elaswave_plugin.adapters.megatron.step.reported_losses import Reported
from elaswave_plugin.adapters.megatron.step_parts import step_state
from elaswave_plugin.adapters.megatron.sums.step_gradients import StepGradients
from elaswave_plugin.adapters.megatron.unsupported import (
    check_supported,
    why_buffers_stay,
)
from elaswave_plugin.adapters.megatron.world import (
    check_no_world,
    check_world,
    join,
    name_what_is_missing,
)
from elaswave_plugin.adapters.patching import PatchSet
from elaswave_plugin.adapters.recording import Recording, tracker_of
from elaswave_plugin.adapters.unbound import Unbound
from elaswave_plugin.config import ElasticConfig
from elaswave_plugin.core.layout.layout import Coordinate
from elaswave_plugin.core.step.dataflow import Samples
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.framework import StepReport
from elaswave_plugin.ipc.console import say
from elaswave_plugin.loops.call_log import CallLog
from elaswave_plugin.loops.guarded_steps import GuardedSteps
from elaswave_plugin.loops.loop_body import LoopBody
from elaswave_plugin.loops.script_end import leave_at_exit
from elaswave_plugin.recovery.worker import Worker
from elaswave_plugin.trainer.fatal import ends_in_a_sentence


class ElasticJob(PlainJob):
    """The verbs with the plugin on."""

    # Of the numbers that the script makes by itself, for the sentence that names their lines.
    _advice = (
        "show report.loss and what job.evaluate returns, and count args.global_batch_size samples a"
        " step (docs/megatron_core.md)"
    )
    # Why micro-batches stay whole, if so.
    _why_whole: str | None = None

    def __init__(
        self,
        config: ElasticConfig,
        sizes: Sizes,
        *,
        patches: PatchSet,
        saves: WholeSaves,
        worker: Worker | None = None,
    ) -> None:
        """Join the job, unless ``worker`` has; ``saves`` is told of its loop.

        Raises ConfigurationError outside an agent, for workers that do not factor, and for
        uneven batches.
        """
        super().__init__(sizes, patches=patches)
        self._worker = worker or join(
            config,
            width=self.width,
            model_parallel=sizes.model_parallel,
            num_microbatches=self._num_microbatches,
            last_checkpoint="give a function of yours to train(), as last_checkpoint",
        )
        self._seed = sizes.seed if config.seed is None else config.seed
        self._stop_after = config.stop_after
        name_what_is_missing(self._worker.groups)
        self._tracker = tracker_of(self._worker)
        # In the order of their binding, until the first verb.
        self._bound: list[MegatronFramework] = []
        # The identity of the iterator that the present step reads first, whose samples the ledger
        # has; 0 before any.
        self._first_read = 0
        self._has_started = False
        self._saves = saves
        saves.comes_later = lambda: self._worker.detached

    @ends_in_a_sentence
    def process_group(self) -> dict[str, Any]:
        """Our communicator, which needs no store and no rendezvous."""
        check_no_world()
        return self._worker.groups.install(self._worker.view.ranks)

    def _begin_at(self, step: int, batch: int) -> tuple[int, int]:
        """Begin where the job began, also on a later worker whose script finds a checkpoint."""
        worker = self._worker
        if not worker.detached:
            worker.remember(begins=[step, batch])
        worker.completed, batch = worker.job_constants["begins"]
        return worker.completed, batch

    def _take(self, chunks: Sequence[Any], optimizer: Any, scheduler: Any) -> None:
        """Its state is sealed before the first step, or the first work between steps."""
        check_world(self._worker.groups, model_parallel=self._sizes.model_parallel)
        number = len(self._bound)
        if self._worker.owns_rank_0:
            say_without_barriers([*(one.config for one in chunks), optimizer.config])
        self._bound.append(
            MegatronFramework(
                self._worker,
                chunks=chunks,
                optimizer=optimizer,
                distributed_optimizer=check_supported(chunks, optimizer),
                scheduler=scheduler,
                prepare=partial(rng.install_keyed_draws, seed=self._seed, number=number),
            )
        )

    def _guard(self) -> None:
        """Have all models guarded as one state, before anything of them is sealed."""
        self._framework = BoundModels(self._bound)
        chunks = self._framework.chunks
        self._buffers = ModelBuffers(
            chunks,
            exact=self._worker.config.consistency == "exact",
            refused=why_buffers_stay(self._sizes.model_parallel, self._worker.reserve),
        )
        self._state = step_state(
            self._worker, self._framework, buffers=self._buffers, beside=[self._positions]
        )
        self._microbatches = Microbatches(
            self._worker,
            self._framework,
            num_microbatches=self._num_microbatches,
            micro_batch_size=self._micro_batch_size,
            seed=self._seed,
            passes_undone=self._state.passes_undone,
            is_as_begun=self._is_as_begun,
            why_whole=self._why_whole,
            whole_replicas=self._buffers.by_replica,
        )
        self._gradients = StepGradients(
            chunks, has_place=lambda: self._microbatches.coordinate is not None
        )
        self._framework.before_updates(self._gradients.check_update)
        self._recording = Recording(
            self._worker, self._tracker, pieces=self._framework.named_pieces
        )
        steps = GuardedSteps(
            self._worker,
            self._framework,
            on_commit=self._record,
            on_recovered=self._recording.recovered,
            state=self._state,
            counted_by="the iteration that job.train yields, or job.iteration",
        )
        self._saves.drafts = steps.drafts
        self._loop, self._body = self._made_loop(steps)
        guard_gathers(chunks, self._loop, run=self._gather, sealed=self._state.sealed)
        self._own_numbers = OwnNumbers(
            self._worker,
            flow=lambda: self._microbatches.flow,
            share=self._num_microbatches // self.width,
            advice=self._advice,
            concerns=self._is_concerned,
        )
        self._unbound = Unbound(
            self._framework.updates,
            advice="wrap its model as the others are, call job.bind with both before the first "
            "step, and give forward_backward the model that a call trains",
        )
        self._recording.patched(self._patches.places)
        self._recording.attached(
            num_microbatches=self._num_microbatches, micro_batch_size=self._micro_batch_size
        )

    def _gather(self, gather: Callable[[], object]) -> None:
        with self._body.closed():
            self._loop.run(gather)

    def _made_loop(self, steps: GuardedSteps) -> tuple[CallLog, LoopBody]:
        loop = CallLog(steps)
        return loop, LoopBody(loop)

    def _is_as_begun(self, step: int) -> bool:
        """Return whether passes of a step have left nothing behind but gradients and reports."""
        return self._state.is_as_begun(step)

    def _is_concerned(self) -> bool:
        """Return whether numbers of the script's own may be wrong now."""
        return not self._turns.is_working

    def _start(self) -> None:
        """Seal the present state, once: no worker trains before all have done so."""
        if self._has_started:
            return
        self._has_started = True
        self._framework.take_loaded()
        loaded = self._framework.applied_steps
        if loaded and not self._worker.completed and self._worker.owns_rank_0:
            say(
                f"the optimizer has made {loaded} steps, as a checkpoint has it, and the job begins"
                " at step 0 and at the first sample: to go on behind the checkpoint, give job.bind "
                "the completed steps as start_step"
            )
        self._loop.start()
        self._sealed_weights = self._framework.weights_digest()

    def _consume(self, batches: KeyedBatches, microbatch: int, ids: tuple[int, ...]) -> None:
        """Each micro-batch is written to the ledger, once a step, before it is used."""
        if self._first_read in (0, id(batches)):
            self._microbatches.consume(self._worker.completed, microbatch, ids)

    def _check_replicas(self, model: Any) -> None:
        """Raise ConfigurationError where the replicas of a model differ within a step."""
        bound = self._framework.of(model)
        assert bound is not None
        self._state.check_digest(
            bound.weights_digest(),
            "train_step has changed weights since its last call of forward_backward, and otherwise"
            " on each replica, so that a loss would change the next call's losses: gradients are"
            " whole in each worker's own shard only (the distributed optimizer), and what follows"
            " from main_grad elsewhere is that worker's alone; change weights by what is alike on"
            " all replicas",
        )

    def _run(
        self, function: ForwardBackward, *, forward_only: bool, data_iterator: Any, **kwargs: Any
    ) -> list[Any]:
        """One call of a forward-backward function, which reads the next batch of its iterator."""
        in_step, call = self._turns.is_training, len(self._turns.returned)
        if in_step:
            self._state.enter_passes()
        numbers = self._positions.take(data_iterator)
        if in_step and not call:
            self._first_read = next(iter(numbers))
        # What a step draws follows from its number, and that of the call in it.
        moment = self._worker.completed + (call << 32) if in_step else max(numbers.values())

        def begin(batches: Any, chunk: Any, samples: Samples) -> None:
            served(batches).deliver(numbers[id(batches)], samples)
            self._buffers.enter(samples.start // self._micro_batch_size % self.width)

        with self._buffers.passes(forward_only=not in_step):
            losses = self._microbatches.forward_backward(
                function,
                begin,
                moment=moment,
                forward_only=forward_only,
                in_step=in_step,
                data_iterator=data_iterator,
                **without_known(kwargs),
            )
        if in_step and not forward_only:
            self._state.check(self._worker.completed)
        return losses

    def _given(self, losses: list[Any]) -> list[Any]:
        # What the script draws next follows from no micro-batch that was run here last.
        moment = self._worker.completed, self._loop.works_done, len(self._turns.returned)
        rng.settle(self._seed, rng.PASSES, *moment)
        return self._own_numbers.given(losses)

    @property
    def iteration(self) -> int:
        """The step that is made now, from 0 on; between two steps, the one that comes next."""
        return self._worker.completed

    @ends_in_a_sentence
    def finish(self) -> None:
        """Leave with the others, before the script ends; the second call does nothing."""
        self._check_bound("finish")
        if self._finished:
            return
        self._finished = True
        with self._body.closed():
            self._loop.finish(before_leaving=self._tracker.close)
        self._own_numbers.end()
        self._worker.groups.uninstall()
        self._microbatches.finish()
        self._unbound.stop()
        self._patches.undo()

    @ends_in_a_sentence
    def _begin(self, train_step: object, last_checkpoint: object) -> None:
        super()._begin(train_step, last_checkpoint)
        self._start()
        if self._framework.weights_digest() != self._sealed_weights:
            raise ConfigurationError(
                "the weights were changed in or after the first job.evaluate or job.run, before "
                "which those from before were sealed, so that a loss in the first steps would "
                "bring these back; load a checkpoint before that call"
            )
        if last_checkpoint is not None:
            self._worker.member.saves_last()

    @ends_in_a_sentence
    def _step(self, train_step: TrainStep) -> StepReport:
        """Complete it through any number of recoveries.

        A step that a recovery rolled back is redone before the next one is reported.
        """

        def attempt(step: int) -> StepReport:
            self._own_numbers.begin()
            rng.settle(self._seed, rng.STEP, step)
            with self._framework.modes_kept(), stopped_where_interrupted(train_step):
                return self._made(train_step)

        report = self._loop.step(attempt)
        assert report is not None  # as none is passed over or given up
        rng.settle(self._seed, rng.BODY, self._worker.completed)
        return report

    def _report(self, losses: Sequence[Reported], grad_norm: float) -> StepReport:
        if self._buffers.is_carried:
            self._buffers.agree(self._microbatches.hosted, replicas=self.width)
            if not self._buffers.changing:
                self._microbatches.deal_freely()
        pace = self._worker.stopwatch.times.told_pace()
        loss, tokens, norm = self._agree(losses, grad_norm, pace=pace)
        lr = self._framework.learning_rate()
        return StepReport(loss=loss, grad_norm=norm, lr=lr, tokens=tokens)

    def _in_body(self) -> AbstractContextManager[None]:
        return self._body.open()

    @property
    def _is_told_to_leave(self) -> bool:
        return self._worker.last_call

    def _leave_at_exit(self) -> None:
        """Have what follows run like the loop's body."""
        self._body.begin()
        self._worker.groups.before_the_end = self.finish
        leave_at_exit(self.finish, abandon=self._abandon)

    def _abandon(self) -> None:
        """Leave without waiting for others, as the script fails after its last step."""
        self._finished = True

    def _agree(
        self,
        losses: Sequence[Reported],
        grad_norm: float = 0.0,
        *,
        pace: tuple[float, int] | None = None,
    ) -> tuple[float, int, float]:
        """Mean loss, tokens and gradient norm, alike on every worker; paces are compared.

        Losses are summed in ascending order of samples and divided by their weights.
        """
        worker, count = self._worker, self._microbatches.num_reports
        ranks = worker.ranks
        # A row for each loss of the step, for the norm, and for each worker.
        table = torch.zeros(count + 1 + len(ranks), 3, dtype=torch.float64)
        table[count + 1 + ranks.index(worker.slot)] = torch.tensor(
            (*(pace or (0.0, 0)), len(self._own_numbers.new)), dtype=torch.float64
        )
        if self._microbatches.reports_losses:
            for row, one in zip(self._microbatches.reports, losses, strict=True):
                table[row] = torch.tensor(one, dtype=torch.float64)
        table[count, 0] = grad_norm if self._microbatches.coordinate == Coordinate(0, 0, 0) else 0.0
        # Every row has one contributor, so that the sum only adds zeros to it.
        dist.all_reduce(table)
        *reports, (norm, _, _) = table[: count + 1].tolist()
        paces = zip(ranks, table[count + 1 :, :2].tolist(), strict=True)
        worker.slow_workers.compare({slot: (pace, int(n)) for slot, (pace, n) in paces if pace})
        total, weight, tokens = map(sum, zip(*reports, strict=True))
        if table[count + 1 :, 2].any():
            self._own_numbers.tell()
        return total / weight, int(tokens), norm

    def _agreed(self, losses: Sequence[Reported]) -> tuple[float, int]:
        return self._agree(losses)[:2]

    def _name(self, tracker: Path, text: str) -> None:
        assert self._saves.drafts is not None
        self._saves.drafts.name(tracker, text)

    @ends_in_a_sentence
    def _between_steps(
        self, work: Callable[[], Any], verb: str, *, phase: str, detached: Any
    ) -> Any:
        """It starts again after a recovery, and all workers leave it together."""
        if self._finished and self._worker.last_call:
            # The script goes on behind its loop, as at the end of a whole training.
            if self._worker.owns_rank_0:
                say(f"the job has ended with its last checkpoint, and left out: {phase}")
            return detached
        # A checkpoint is loaded before the first seal.
        if phase != "load":
            self._start()

        def whole() -> Any:
            rng.settle(self._seed, rng.WORK, self._loop.works_done)
            with self._framework.modes_kept():
                return self._work(work, verb)

        with self._body.closed():
            result = self._loop.run(whole, phase=phase, detached=detached)
        rng.settle(self._seed, rng.BODY, self._worker.completed, self._loop.works_done)
        return result

    def _record(self, step: int, report: StepReport, seconds: float) -> None:
        """Write a completed step to the files and trackers."""
        self._recording.step(
            step,
            report,
            seconds,
            num_microbatches=len(self._microbatches.executed),
            last=step + 1 == self._train_iters,
        )
