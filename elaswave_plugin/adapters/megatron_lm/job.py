"""Megatron-LM's own training loop in an elastic job: one worker's part of it."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.rerun_state_machine import (
    RerunDataIterator,
    RerunState,
    get_rerun_state_machine,
)

from elaswave_plugin.adapters import reimplemented
from elaswave_plugin.adapters.megatron.bound_models import BoundModels
from elaswave_plugin.adapters.megatron.compat import rng
from elaswave_plugin.adapters.megatron.compat.whole_saves import WholeSaves
from elaswave_plugin.adapters.megatron.contract import num_microbatches_of
from elaswave_plugin.adapters.megatron.framework import MegatronFramework, make_room
from elaswave_plugin.adapters.megatron.microbatches import Microbatches
from elaswave_plugin.adapters.megatron.own_numbers import OwnNumbers
from elaswave_plugin.adapters.megatron.state.model_buffers import ModelBuffers
from elaswave_plugin.adapters.megatron.state.optimizer_state import FlatShard
from elaswave_plugin.adapters.megatron.state.param_gathers import guard_gathers
from elaswave_plugin.adapters.megatron.step.positions import Positions
from elaswave_plugin.adapters.megatron.step_parts import step_state
from elaswave_plugin.adapters.megatron.unsupported import check_supported
from elaswave_plugin.adapters.megatron.world import join
from elaswave_plugin.adapters.megatron_lm.batch_size import global_batch_sizes
from elaswave_plugin.adapters.megatron_lm.external_loader import ExternalLoader, share_batches
from elaswave_plugin.adapters.megatron_lm.legacy_optimizer import LegacyOptimizer
from elaswave_plugin.adapters.megatron_lm.legacy_saves import LegacySaves
from elaswave_plugin.adapters.megatron_lm.loader import MicrobatchLoader
from elaswave_plugin.adapters.megatron_lm.losses import LossTotals
from elaswave_plugin.adapters.megatron_lm.newcomer import LoopVariables
from elaswave_plugin.adapters.megatron_lm.params_norm import params_norm
from elaswave_plugin.adapters.megatron_lm.plain_optimizer import PlainCheckpoints
from elaswave_plugin.adapters.megatron_lm.router_losses import RouterLosses
from elaswave_plugin.adapters.megatron_lm.script_arguments import ScriptArguments
from elaswave_plugin.adapters.megatron_lm.script_writers import ScriptWriters
from elaswave_plugin.adapters.megatron_lm.side_state import SideState
from elaswave_plugin.adapters.recording import Recording, tracker_of
from elaswave_plugin.adapters.upstream_sources import say_unknown
from elaswave_plugin.config import ElasticConfig
from elaswave_plugin.core.layout.layout import sizes_of
from elaswave_plugin.core.step.dataflow import Samples
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.framework import StepReport
from elaswave_plugin.ipc.console import say
from elaswave_plugin.loops.call_log import CallLog
from elaswave_plugin.loops.guarded_steps import GuardedSteps
from elaswave_plugin.values.plain import gathered

Result = TypeVar("Result")
Loader = MicrobatchLoader | ExternalLoader
# The place in what train_step returns, behind the losses.
_SHOULD_EXIT = 2


class LmJob:
    """One worker's part of the loop."""

    # Once the optimizer is made.
    _shard: FlatShard

    def __init__(
        self, config: ElasticConfig, args: Any, saves: WholeSaves, script: ScriptArguments
    ) -> None:
        """Join the job; ``saves`` is told when checkpoints are the job's.

        ``script``: what the script had given of the arguments that are adjusted.
        Raises ConfigurationError outside an agent, and for uneven batches.
        """
        workers = int(os.environ.get("WORLD_SIZE", "1"))
        model_parallel = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
        self.width = sizes_of(workers, tp=model_parallel[0], pp=model_parallel[1])
        counts = [
            num_microbatches_of(
                global_batch_size=size, micro_batch_size=args.micro_batch_size, width=self.width
            )
            for size in global_batch_sizes(args)
        ]
        self._num_microbatches = counts[-1]
        if config.wandb != "off" and args.wandb_project:
            raise ConfigurationError(
                f"wandb is {config.wandb!r} and --wandb-project is {args.wandb_project!r}, and the"
                " script's own run is logged to; leave --elaswave-wandb out"
            )
        self._args = args
        self._script = script
        self._saves = saves
        self._seed = args.seed if config.seed is None else config.seed
        self.worker = join(
            config,
            width=self.width,
            model_parallel=model_parallel,
            num_microbatches=counts[0],
            last_checkpoint="the script writes one where it has --save",
        )
        self._tracker = tracker_of(self.worker)
        self._own_numbers = OwnNumbers(
            self.worker,
            flow=lambda: self._microbatches.flow,
            share=self._num_microbatches // self.width,
            advice="report what a micro-batch has by itself, which the log has the mean of "
            "(docs/megatron_lm.md)",
        )
        self._positions = Positions()
        self._loop: CallLog | None = None
        self.reads_external = args.dataloader_type == "external"
        """Whether the script brings loaders of its own."""
        # What the last training step has read: so many samples of each of these.
        self._trained_from: list[Loader] = []
        self._trained_samples = 0
        # The iterators of all training steps.
        self._train_data: Any = None
        # Megatron-LM's iterators of the present call, which can replay a step's batches.
        self._replays: list[RerunDataIterator] = []
        # Whether it runs a step again whose samples are counted already.
        self._rereads = False
        self.router_losses = RouterLosses(
            num_layers=0 if args.num_experts is None else args.num_layers, num_replicas=self.width
        )

    def take_writers(self, openers: Mapping[str, Callable[[Any], None]]) -> None:
        """Open the script's TensorBoard and W&B writers where the last rank is, now and later."""
        self._writers = ScriptWriters(self._args, openers, self.worker.run_id)
        if not self.worker.detached:
            self._writers.follow(is_last_rank=self._is_last_rank, waits=True)

    @property
    def _is_last_rank(self) -> bool:
        return self.worker.ranks[-1] == self.worker.slot

    def make_world(self) -> None:
        """Make WORLD ours, which needs no store and no rendezvous."""
        dist.init_process_group(**self.worker.groups.install(self.worker.view.ranks))
        # Who comes beyond the launch was started before anybody knew for which stage.
        self._args.rank = dist.get_rank()

    def say(self, adjusted: Sequence[str]) -> None:
        """Tell once, at launch, in one line what of the script's arguments is adjusted."""
        if adjusted and self.worker.slot == 0 and not self.worker.detached:
            say(f"adjusted: {'; '.join(adjusted)}")

    # ---- what Megatron-LM builds ----------------------------------------------------------------

    def take_optimizer(self, chunks: Sequence[Any], optimizer: Any, overrides: Any) -> None:
        """Cut the state again before a checkpoint is loaded into it."""
        distributed = check_supported(chunks, optimizer)
        PlainCheckpoints(optimizer, distributed)
        self._legacy = LegacyOptimizer(
            optimizer, distributed, is_named=self._script.names_distributed_optimizer
        )
        spare = self.worker.spare_width
        self._shard = make_room(chunks, distributed, overrides, spare_width=spare)
        self._legacy.bind(self._shard)

    def make_loader(
        self, dataset: Any, position: int, make: Callable[[int, int], Any]
    ) -> MicrobatchLoader:
        """The loader of a dataset from a position on; ``make`` as MicrobatchLoader has it."""
        loader = MicrobatchLoader(
            dataset,
            position,
            make=make,
            num_replicas=self.width,
            micro_batch_size=self._args.micro_batch_size,
            on_batch=self._consume,
            seed=self._seed,
        )
        self._positions.follow(loader)
        return loader

    def make_external_loader(self, stream: Any, position: int) -> ExternalLoader:
        """The loader of a stream that the script has made; None where it makes none."""
        self.worker.state.seal_each_step(
            "--dataloader-type external reads streams, of which a lost worker's batches are gone"
        )
        loader = ExternalLoader(
            stream,
            position,
            replica=self.worker.slot // self._args.tensor_model_parallel_size % self.width,
            num_replicas=self.width,
            micro_batch_size=self._args.micro_batch_size,
            on_batch=self._consume,
        )
        self._positions.follow(loader)
        return loader

    def _consume(self, microbatch: int, ids: Sequence[int]) -> None:
        if not self._rereads:
            self._microbatches.consume(self.worker.completed, microbatch, tuple(ids))

    def bind(
        self,
        chunks: list[Any],
        optimizer: Any,
        scheduler: Any,
        train_data: Any,
        *,
        patched: Sequence[str],
    ) -> None:
        """Take what was built into care and seal it: training begins.

        A worker that comes later enters here, and gets the state of the others.
        ``train_data``: the iterator of the training, or one a model chunk; ``patched``: what the
        patch records have set, for the events.
        Raises ConfigurationError for a model that it could not get.
        """
        args, worker, self._train_data = self._args, self.worker, train_data
        # As Megatron-LM's train() sets it a moment later.
        chunks[0].config.finalize_model_grads_func = finalize_model_grads
        model = MegatronFramework(
            worker,
            chunks=chunks,
            optimizer=optimizer,
            distributed_optimizer=check_supported(chunks, optimizer),
            scheduler=scheduler,
            prepare=self._prepare,
            shard=self._shard,
        )
        self._framework = BoundModels([model])
        if worker.owns_rank_0:
            say_unknown(reimplemented.MEGATRON_LM)
        worker.completed = args.iteration
        self.variables = LoopVariables(args, chunks)
        self._state = step_state(
            worker,
            self._framework,
            buffers=ModelBuffers(chunks, exact=True, refused="not in Megatron-LM's scripts"),
            beside=[SideState(), self._positions],
        )
        self._microbatches = Microbatches(
            worker,
            self._framework,
            num_microbatches=self._num_microbatches,
            micro_batch_size=args.micro_batch_size,
            seed=self._seed,
            passes_undone=self._passes_undone,
            is_as_begun=None if self._deals_streams else self._state.is_as_begun,
            why_whole="Megatron-LM's scripts take batches of micro_batch_size samples only",
        )
        self._losses = LossTotals(self._microbatches, num_replicas=self.width)
        self._recording = Recording(worker, self._tracker, pieces=self._framework.named_pieces)
        steps = GuardedSteps(
            worker,
            self._framework,
            on_commit=self._record,
            on_recovered=self._recovered,
            state=self._state,
            counted_by="args.curr_iteration",
        )
        self._saves.drafts = steps.drafts
        self._loop = CallLog(steps, knowledge=self.variables)
        guard_gathers(chunks, self._loop, run=self.run, sealed=self._state.sealed)
        self._save_last()
        self._loop.start()
        self._loop.enter()
        self._tell_rank()
        self._recording.patched(patched)
        sizes = {"num_microbatches": self._num_microbatches}
        self._recording.attached(micro_batch_size=args.micro_batch_size, **sizes)

    def _save_last(self) -> None:
        """Tell that all workers save where they have to leave, if the script saves at all.

        With --exit-signal-handler it would do so as well, wherever a worker hears the signal.
        """
        member, args = self.worker.member, self._args
        if args.save:
            member.saves_last()
            if args.exit_signal_handler:
                member.signals.take_over(args.exit_signal)

    def _tell_rank(self) -> None:
        """Tell Megatron-LM of the rank in this view; who came later has no profiler begun."""
        args = self._args
        self._know_rank()
        is_profiled = args.rank in args.profile_ranks and not self.worker.detached
        args.profile = args.profile and is_profiled

    def _know_rank(self) -> None:
        """Have the script's arguments say it, of which a save writes the number of workers."""
        self._args.rank, self._args.world_size = dist.get_rank(), dist.get_world_size()

    def _prepare(self, module: Any) -> None:
        """A chunk of the model, or a layer that has come to it, is about to train."""
        rng.install_keyed_draws(module, seed=self._seed)
        self.router_losses.watch(module)

    @contextmanager
    def _passes_undone(self) -> Iterator[None]:
        """Put back what passes inside change beside gradients."""
        replays = [(one, dict(one.state_dict())) for one in self._replays]
        batches = [list(kept["saved_microbatches"]) for _, kept in replays]
        with self._state.passes_undone():
            yield
        for (one, kept), read in zip(replays, batches, strict=True):
            one.load_state_dict({**kept, "saved_microbatches": read})
        self.router_losses.begin()

    @property
    def _deals_streams(self) -> bool:
        """True where batches of the script's own loaders are sent to who is dealt them."""
        args = self._args
        model_parallel = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
        return bool(self.reads_external) and model_parallel > 1

    # ---- the pieces of the loop -----------------------------------------------------------------

    def step(self, train_step: Callable[[int], tuple[Any, ...]]) -> tuple[Any, ...]:
        """Complete a step through any number of recoveries; returns what ``train_step`` does.

        ``train_step(iteration)`` is Megatron-LM's, for this step or the one before it.
        """
        results: list[tuple[Any, ...]] = []

        def attempt(iteration: int) -> StepReport | None:
            self._know_rank()
            self._own_numbers.begin()
            self._args.curr_iteration = iteration
            rng.settle(self._seed, rng.STEP, iteration)
            if iteration in self._args.iterations_to_skip:
                return self._pass_over(iteration)
            with self._framework.modes_kept():
                losses, *others = train_step(iteration)
            # The last rank logs them, and need not be in the last stage after a loss.
            results.append((losses or self._losses.means, *others))
            if others[_SHOULD_EXIT]:
                # The rerun machine ends the script in the step, whose update is left out.
                return None
            for loader in self._trained_from:
                loader.advance(self._trained_samples)
            grad_norm = results[-1][5]
            return StepReport(
                loss=self._losses.loss,
                grad_norm=0.0 if grad_norm is None else float(grad_norm),
                lr=self._framework.learning_rate(),
                tokens=self._losses.count,
            )

        assert self._loop is not None
        self.variables.first_step()
        self._loop.step(attempt)
        return results[-1]

    def pass_over(self) -> None:
        """Complete a step that the script skips: its samples are read, and nothing is trained."""
        assert self._loop is not None
        self.variables.first_step()
        self._loop.step(self._pass_over)

    def _is_judged_anew(self) -> bool:
        """Return whether the step that the rerun machine runs again has gone on from kept sums.

        Its results are then not those of the redo, of which part was not read either: all of it is
        run as at first. Collective over WORLD, as some workers may have kept none.
        """
        if not any(gathered(self._microbatches.has_kept)):
            return False
        machine = get_rerun_state_machine()
        machine.state, machine.rerun_requested = RerunState.INITIAL_RUN, False
        for one in self._replays:
            one.advance()
        return True

    def _pass_over(self, iteration: int) -> StepReport:
        self._args.curr_iteration = iteration
        machine, count = get_rerun_state_machine(), self.width * get_num_microbatches()
        iterators = self._train_data if isinstance(self._train_data, list) else [self._train_data]
        loaders = [_loader_of(one) for one in iterators]

        def read(microbatch: int) -> None:
            for loader in loaders:
                loader.deliver(microbatch)
                next(loader)

        while machine.should_run_forward_backward(self._train_data):
            for loader in loaders:
                loader.begin(count)
            self._microbatches.pass_over(read, num_microbatches=count)
        for loader in loaders:
            loader.advance(count * self._args.micro_batch_size)
        nan, lr = float("nan"), self._framework.learning_rate()
        return StepReport(loss=nan, grad_norm=nan, lr=lr, tokens=0)

    def forward_backward(self, native: Callable[..., Any], **kwargs: Any) -> list[Any]:
        """Megatron-Core's forward-backward function, for whatever this worker runs now."""
        forward_only = kwargs.pop("forward_only", False)
        # It is asked for those of one replica of the launch.
        num_microbatches = self.width * kwargs.pop("num_microbatches")
        samples = num_microbatches * self._args.micro_batch_size
        iterators = kwargs["data_iterator"]
        iterators = iterators if isinstance(iterators, list) else [iterators]
        loaders = [_loader_of(one) for one in iterators]
        for loader in loaders:
            loader.begin(num_microbatches)
        external = [one for one in loaders if isinstance(one, ExternalLoader)]
        uneven = self._microbatches.uneven_runs(num_microbatches) if external else ()
        if uneven:
            if not forward_only:
                self.worker.phases.enter("data")
            share_batches(external, uneven, self.worker)
        self._replays = [one for one in iterators if isinstance(one, RerunDataIterator)]
        # Alike on all workers, of which some may read nothing.
        reruns = get_rerun_state_machine().state == RerunState.RERUNNING_IN_PLACE
        self._rereads = reruns and self._is_judged_anew()
        if not forward_only:
            self._trained_from, self._trained_samples = loaders, samples
            self.router_losses.begin()
        step = self.worker.completed

        def begin(iterator: Any, chunk: Any, samples: Samples) -> None:
            (whole,) = samples.rows(size=self._args.micro_batch_size)
            _loader_of(iterator).deliver(whole.microbatch)

        reports = self._microbatches.forward_backward(
            native,
            begin,
            moment=step,
            forward_only=forward_only,
            num_microbatches=num_microbatches,
            # Which batches those are that the rerun machine reads again follows from their order.
            # A stream of the script's gives others to whoever runs a micro-batch.
            rehearses=not (self.reads_external or any(one.replaying for one in self._replays)),
            **kwargs,
        )
        # What a script draws next follows from no micro-batch that was run here last.
        rng.settle(self._seed, rng.PASSES, step, int(forward_only))
        if not forward_only:
            self._state.check(step)
            self.router_losses.agree(num_microbatches)
        for loader in loaders if forward_only else ():
            loader.advance(samples)
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        pace = None if forward_only else self.worker.stopwatch.times.told_pace()
        by_microbatch = forward_only and bool(self._args.sft)
        agreed = list(self._losses.agree(reports, group, pace=pace, by_microbatch=by_microbatch))
        self._own_numbers.tell()
        ranks = self.worker.ranks
        self.worker.slow_workers.compare(
            {ranks[rank]: one for rank, one in self._losses.paces.items()}
        )
        return agreed

    def run(self, work: Callable[[], Result], *, phase: str | None = None) -> Result | None:
        """A piece of the loop other than a step; before training, it is just called.

        None for a worker that came later, where the others have it behind them.
        """
        if self._loop is None:
            return work()

        def whole() -> Result:
            self._know_rank()
            with self._framework.modes_kept():
                return work()

        return self._loop.run(whole, phase=phase)

    def save_legacy(self, saves: LegacySaves, place: Path, write: Callable[[], None]) -> None:
        """Save in the format torch, whose files are those of the launch's stages."""
        if self.has_place:
            self._legacy.gather()
        if self._saves.drafts is None:
            write()
        else:
            saves.write(self._saves.drafts, place, write)

    def params_norm(self) -> float | None:
        """Return the norm of all weights; None, which is not logged, for a worker to come."""
        placed = self.has_place
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        return params_norm(
            self._framework.chunks if placed else (),
            self._shard,
            is_first=placed and group.rank() == 0,
        )

    def settle_generators(self) -> None:
        """Set the random generators to what follows from the completed steps."""
        rng.settle(self._seed, self.worker.completed)

    @property
    def trains(self) -> bool:
        """True once training has begun; workers are recovered and leave together from then on."""
        return self._loop is not None

    @property
    def last_call(self) -> bool:
        """True if every worker was told to leave, so that the job saves and ends."""
        return self.worker.last_call and self.worker.member.has_last_checkpoint

    @property
    def stops_here(self) -> bool:
        """True if the job ends by itself after this step, by the setting ``stop_after``."""
        stop_after = self.worker.config.stop_after
        return stop_after is not None and self.worker.completed >= stop_after

    @property
    def has_place(self) -> bool:
        """True if this worker holds a part of the model, and is not free."""
        return self._loop is None or self._microbatches.coordinate is not None

    # ---- the end --------------------------------------------------------------------------------

    def _recovered(self, record: dict[str, object]) -> None:
        if self._args.profile:
            self._args.profile_ranks = [dist.get_rank()]
        self._recording.recovered(record)
        self._writers.follow(is_last_rank=self._is_last_rank, waits=False)
        self._writers.event("recovered", self.worker.completed, record)

    def _record(self, step: int, report: StepReport, seconds: float) -> None:
        metrics = self._recording.step(
            step,
            report,
            seconds,
            num_microbatches=len(self._microbatches.executed),
            last=self.stops_here or step + 1 == self._args.train_iters,
        )
        self._writers.step(step + 1, metrics)

    def finish(self) -> None:
        """Leave with the others."""
        self.run(dist.barrier)
        self._tracker.close()
        self._own_numbers.end()
        self.worker.close()
        self.worker.groups.uninstall()


def _loader_of(iterator: Any) -> Loader:
    """Megatron-LM wraps every iterator into one that can replay a batch."""
    loader = iterator.iterable if isinstance(iterator, RerunDataIterator) else iterator
    assert isinstance(loader, Loader)
    return loader
