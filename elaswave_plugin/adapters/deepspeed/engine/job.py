"""An engine whose forward, backward and step absorb the loss of workers.

The engine object stays the user's; three of its methods, and the loader, go through ``UserLoop``.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from elaswave_plugin.adapters.cut_draws import CutDraws, parts_of
from elaswave_plugin.adapters.deepspeed.compat.patches import detached_patches
from elaswave_plugin.adapters.deepspeed.compat.unsupported import (
    check_engine,
    check_schedules,
    check_shares,
    refuse_batch_of_its_own,
    refuse_boundary,
    refuse_coalescing,
    refuse_late_load,
    refuse_no_sync,
    refuse_pass,
    refuse_step_alone,
)
from elaswave_plugin.adapters.deepspeed.engine.attached import AttachedEngine, abandoning
from elaswave_plugin.adapters.deepspeed.engine.checkpoint import load_checked, save_whole
from elaswave_plugin.adapters.deepspeed.engine.framework import DeepSpeedFramework
from elaswave_plugin.adapters.deepspeed.engine.loader import (
    ElasticLoader,
    Position,
    Reader,
    tokens_of,
)
from elaswave_plugin.adapters.deepspeed.engine.loss_kinds import named, rows_of
from elaswave_plugin.adapters.deepspeed.engine.monitor import ElasticMonitor, Holders
from elaswave_plugin.adapters.deepspeed.engine.newcomer import Loads, News, check_together
from elaswave_plugin.adapters.deepspeed.engine.own_loss import OwnLoss, Served
from elaswave_plugin.adapters.deepspeed.engine.pass_timer import PassTimer
from elaswave_plugin.adapters.deepspeed.engine.placeholder_output import StandIn, detached, unkept
from elaswave_plugin.adapters.deepspeed.engine.reads import BATCH, END
from elaswave_plugin.adapters.deepspeed.engine.resumed import Resumed
from elaswave_plugin.adapters.deepspeed.engine.rounds import portions_of
from elaswave_plugin.adapters.deepspeed.zero.zero3_external import finding_external
from elaswave_plugin.adapters.patching import PatchSet
from elaswave_plugin.core.step.loss_parts import Interval
from elaswave_plugin.core.step.rng import draw_key
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.framework import StepReport
from elaswave_plugin.loops.guarded_steps import GuardedSteps
from elaswave_plugin.loops.user import UserLoop
from elaswave_plugin.loss_terms import weigh_by
from elaswave_plugin.recovery.worker import Worker
from elaswave_plugin.step_state.engine_parts import Buffers, Frozen, Generators, Settings, Weights
from elaswave_plugin.step_state.step_state import Part, StepState


class EngineJob(AttachedEngine):
    """One worker's engine in an elastic job."""

    # The loop that drives the engine, and whether what is between two of its steps runs again.
    _loop_kind: type[UserLoop] = UserLoop
    _repeats_bodies = True

    def __init__(self, worker: Worker, engine: Any, *, patches: PatchSet, seed: int) -> None:
        """Take the engine into care and seal its state; raises ConfigurationError."""
        check_engine(engine)
        framework = DeepSpeedFramework(engine)
        super().__init__(
            worker, engine, framework, width=len(worker.launch_slots), patches=patches, seed=seed
        )
        self.portions = portions_of(worker, engine, width=self._width, announce=self._announce)
        worker.bind(framework, deal=self.portions.deal, whole=self.portions.keeps_micro_batches)
        self._buffers = Buffers(engine.module, refused=self.portions.why_buffers_stay)
        parts: Sequence[Part] = (
            Settings(engine.basic_optimizer),
            Weights(engine.module, whole=int(engine.zero_optimization_stage()) < 3),
            Generators(),
            self._buffers,
            Frozen(engine.module),
            *self._own_parts(),
        )
        self._state = StepState(worker, parts, repeats_bodies=self._repeats_bodies)
        steps = GuardedSteps(
            worker,
            self._framework,
            on_commit=self._record,
            on_recovered=self._told_recovery,
            state=self._state,
            counted_by="engine.global_steps",
        )
        self._drafts = steps.drafts
        self._loop = self._loop_kind(steps, after_recovery=self._recovered)
        # Whether what counts the micro-batches of a step knows where a redone one begins.
        self.boundaries_follow = False
        self.reactions: list[Callable[[], None]] = []
        self.draws = CutDraws(self.own_loops.draws_together)
        self.at_leave.append(self.draws.close)
        self._own_loss = self._make_own_loss()
        self._stand_in = StandIn(engine.module)
        self._inputs: Any = None
        self._weight = self._share_weight = 1.0
        # This worker's samples of the iteration that was served last, and how many all have.
        self._share: tuple[Interval, int] = ((0, 0), 0)
        self._began_at = Position()
        self._losses: list[torch.Tensor] = []
        self.losses: list[float] = []
        self._tokens = self._iterations = 0
        self._resumed: Resumed | None = None
        # Whether a call of ours runs now, that can absorb a loss.
        self._guarded = self._sealed = False
        self._monitor = engine.monitor = ElasticMonitor(engine, self._loop)
        self.news = News(worker, self._framework, monitor=self._monitor, stand_in=self._stand_in)
        self._loads = Loads(worker)
        framework.on_pause = self.portions.interrupted
        self._framework.watch(self._announce, self._check, hooks=self._hooks)
        self._timer: PassTimer | None = None
        if int(engine.zero_optimization_stage()) < 3:
            self._timer = PassTimer(engine.module, worker.stopwatch, self._hooks)
        self._take_over(
            {
                "forward": self._forward,
                "backward": self._backward,
                "step": self._step,
                "set_gradient_accumulation_boundary": self._set_boundary,
                "no_sync": self._no_sync,
                "coalesce_grad_reduction": self._coalesce,
                "save_checkpoint": self._save_checkpoint,
                "save_16bit_model": self._save,
                "load_checkpoint": self._load,
                "destroy": self._destroy,
            }
        )
        self._attached()

    def _make_own_loss(self) -> OwnLoss | None:
        """Weigh the losses of a loop that the script owns; None for another loop."""
        if self.portions.keeps_micro_batches or not self._repeats_bodies:
            return None
        made = OwnLoss(
            self._worker, self._engine, self.draws, width=self._width, compute=self._compute
        )
        self.at_leave.append(weigh_by(made.terms))
        return made

    def _own_parts(self) -> Sequence[Part]:
        """Return what belongs to the state of a step beside the engine's own."""
        return ()

    @property
    def loop(self) -> UserLoop:
        """The position of the script's loop."""
        return self._loop

    @property
    def batch_shape(self) -> tuple[int, int]:
        """Workers of the launch, and samples of each in an iteration."""
        return self._width, self._micro_batch_size

    # ---- announcements --------------------------------------------------------------------------

    def _announce(self, phase: str) -> None:
        if not self._loop.dead:
            self._worker.phases.enter(phase)

    def _check(self, module: torch.nn.Module) -> None:
        """A module's pass begins: look for a change of the view, where that can be absorbed."""
        if self._absorbs_losses:
            if not self._loop.dead:
                self._worker.member.check()
        elif self._sealed and (
            self._needs_others_to_compute or (module.training and torch.is_grad_enabled())
        ):
            self._refuse_pass(module)

    @property
    def _absorbs_losses(self) -> bool:
        """True if what runs now is made again after a loss."""
        return self._guarded or self._working

    @abandoning
    def _refuse_pass(self, module: torch.nn.Module) -> NoReturn:
        refuse_pass(type(module).__name__)

    # ---- the engine's methods -------------------------------------------------------------------

    def _forward(self, native: Callable[..., Any], *inputs: Any, **kwargs: Any) -> Any:
        if self._engine.module.training and self._loop.iteration == 0 and not self._loop.dead:
            refuse_batch_of_its_own()
        counts = not self._engine.module.training

        def work() -> Any:
            if not (counts or self._loop.dead):
                # Before the first gather of ZeRO-3, which is no reading of data.
                self._worker.phases.announce("forward")
                if not self._working:
                    self._state.enter_passes()
                if self._resumed is not None:
                    self._resumed.use()
            if self.portions.known is not None and not counts:
                return self._dead_output(inputs, kwargs, counts=False)
            if self._needs_others_to_compute:
                self._inputs = (inputs, kwargs)
            if counts or self._loop.dead or self._own_loss is None:
                output = native(*inputs, **kwargs)
            else:
                output = self._own_loss.forward(native, inputs, kwargs)
            if self._needs_others_to_compute:
                self._stand_in.remember((inputs, kwargs), output)
                self._inputs = None
            return output

        instead = partial(self._dead_output, inputs, kwargs, counts=counts)
        output = self.call(work, instead=instead, counts=counts)
        # Accelerate's own loaders are divided again for each evaluation; its part warns otherwise.
        if counts and not (self._working or self.boundaries_follow):
            self.own_loops.evaluates()
        return output

    def call(self, work: Callable[[], Any], **how: Any) -> Any:
        """A part of the iteration; in work that starts again as a whole, a part of that."""
        with self._passes():
            return work() if self._working else self._loop.call(work, **how)

    @contextmanager
    def _passes(self) -> Iterator[None]:
        """Passes of the model in this block are ours."""
        before, self._guarded = self._guarded, True
        try:
            yield
        finally:
            self._guarded = before

    @property
    def _needs_others_to_compute(self) -> bool:
        return int(self._engine.zero_optimization_stage()) == 3

    def _recovered(self) -> None:
        if self._resumed is not None:
            self._resumed.check_redo(self._worker.completed)
        self.news.exchange()
        loader, script = self._framework.loader, self.news.script
        if script is not None:
            script.catch_up()
        elif loader is not None:
            loader.reads.compare(loader.place)
        self._framework.resume()
        self._learn_output()
        if self._own_loss is not None:
            self._own_loss.agree()
        for react in self.reactions:
            react()

    def _learn_output(self) -> None:
        """Learn the form of an output in ZeRO-3's first step, which no worker may know yet."""
        inputs, self._inputs = self._inputs, None
        if self._needs_others_to_compute and self._worker.completed == 0:
            self._stand_in.learn(
                inputs,
                lambda both: unkept(partial(self._compute, *both[0], **both[1])),
                device=self._engine.device,
            )

    def _compute(self, *inputs: Any, **kwargs: Any) -> Any:
        """A pass of ZeRO-3 that the script did not ask the engine for."""
        beside = detached_patches() if self._worker.detached else None
        if beside is not None:
            beside.apply()
        try:
            with self._hooks.uncompiled(), self._passes(), finding_external(self._engine.module):
                return self._engine.module(*inputs, **kwargs)
        finally:
            if beside is not None:
                beside.undo()

    def _dead_output(self, inputs: tuple[Any, ...], kwargs: dict[str, Any], *, counts: bool) -> Any:
        if self._needs_others_to_compute:
            return self.placeholder((inputs, kwargs), counts=counts)
        with self._hooks.uncompiled():
            output = unkept(partial(self._engine.module, *inputs, **kwargs))
        self._framework.drop_activations()
        with torch.enable_grad():
            return detached(output)

    def placeholder(self, inputs: tuple[Any, Any], *, counts: bool = False) -> Any:
        """An output of the form that these inputs give; ``counts``: whether its values matter."""
        if not self._stand_in.shapes:
            # Only a worker that comes later: it computes one with what it was built with.
            output = unkept(partial(self._compute, *inputs[0], **inputs[1]))
            self._stand_in.remember(inputs, output)
        with torch.enable_grad():
            return self._stand_in.make(inputs, self._engine.device, counts=counts)

    def _backward(
        self,
        native: Callable[..., torch.Tensor],
        loss: torch.Tensor,
        retain_graph: bool = False,
        scale_wrt_gas: bool = True,
    ) -> torch.Tensor:
        self._check_no_work("engine.backward")
        weight = self._weight if self._own_loss is None else self._own_loss.due(loss)

        def work() -> torch.Tensor:
            known, scaled = self.portions.known, loss.detach()
            self._losses += [scaled.double().sum() * weight] if known is None else known
            if known is None:
                how = {"retain_graph": retain_graph, "scale_wrt_gas": scale_wrt_gas}
                with self.portions.passing(self._losses[-1]):
                    scaled = native(loss if weight == 1.0 else loss * weight, **how)
            self.portions.reduce()
            return scaled if weight == 1.0 else scaled / weight

        result = self.call(work, instead=loss.detach)
        if not self._loop.dead:
            self._worker.observe("passed")
            self._worker.observe("reported", (), [loss])
        return result

    def _step(self, native: Callable[..., None], lr_kwargs: dict[str, Any] | None = None) -> None:
        self._check_no_work("engine.step")
        made = self._engine.global_steps
        if not self._engine.is_gradient_accumulation_boundary():
            self._loop.call(lambda: native(lr_kwargs), instead=lambda: None)
        elif self.portions.is_last:
            self._update(native, lr_kwargs)
        else:
            self._loop.call(self._follow, instead=lambda: None)
        if self._engine.global_steps <= made:
            # What `was_step_applied` says; a step that was lost is none.
            self._engine._step_applied = False

    @property
    def micro_batch(self) -> int:
        """Batches that were served of the step, or of its present round."""
        return self._loop.iteration - self.portions.before

    def _follow(self) -> None:
        """Begin the next round of the step."""
        portions, loader = self.portions, self._framework.loader
        assert loader is not None
        portions.go(portions.number + 1, batches=self._loop.iteration, losses=self._losses)
        self._losses, loader.position = [], self._began_at

    def _update(self, native: Callable[..., None], lr_kwargs: dict[str, Any] | None) -> None:
        """The end of a step."""

        def update() -> StepReport:
            if not self._losses:
                refuse_step_alone()
            self._state.check(self._worker.completed)
            self._worker.state.begin_update()
            # The collective that shows that everyone has come here; see ``await_copies``.
            loss, tokens, holders = self._mean_loss()
            self._monitor.release(holders=holders)
            self._buffers.agree()
            with self._unbound.bound_step():
                native(lr_kwargs)
            self._monitor.add_step()
            return StepReport(
                loss=loss,
                grad_norm=self._framework.grad_norm(),
                lr=self._framework.learning_rate(),
                tokens=tokens,
            )

        self._loop.complete_step(update)
        self.draws.end()
        self._end_where_all_leave()

    def _check_no_work(self, call: str) -> None:
        """Raise ConfigurationError in work between two steps, which is no part of any."""
        if self._working:
            raise ConfigurationError(
                f"{call} is called inside of run(engine, work), whose work is no step and may be"
                " made again: call it in the loop"
            )

    def _set_boundary(self, native: Callable[[bool], None], is_boundary: bool) -> None:
        if not self.boundaries_follow:
            refuse_boundary(is_boundary)
        native(is_boundary)

    def _no_sync(self, native: Callable[[], Any]) -> Any:
        """`engine.no_sync()`, which Accelerate enters by the count that follows the job."""
        if not self.boundaries_follow:
            refuse_no_sync()
        return native()

    def _coalesce(self, native: Callable[[], Any]) -> NoReturn:
        refuse_coalescing()

    def _save_checkpoint(self, native: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        write = partial(self._framework.save, native)
        return self._save(partial(save_whole, self._drafts, write, self._engine), *args, **kwargs)

    def _save(self, native: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self._run(lambda: native(*args, **kwargs), phase="save")

    @abandoning
    def run(self, work: Callable[[], Any], *, phase: str) -> Any:
        """Work between steps that every worker calls; it starts again after a loss."""
        return self._given("run", partial(self._run, self._monitor.restarting(work), phase=phase))

    def _given(self, call: str, make: Callable[[], Any]) -> Any:
        """Return what a call gives the script, which may have it behind it elsewhere."""
        script = self.news.script
        return make() if script is None else script.of(call, make)

    def _run(self, work: Callable[[], Any], *, phase: str) -> Any:
        return self._loop.run(self._as_one(work), phase=phase)

    def _load(self, native: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._sealed:
            refuse_late_load()
        engine = self._engine
        loaded = self._loads.load(engine, partial(load_checked, native, engine, *args, **kwargs))
        if steps := int(engine.global_steps):
            samples = int(engine.global_samples)
            self.own_loops.loaded(steps=steps, samples=samples, batch=engine.train_batch_size())
            if self._repeats_bodies:
                self._resumed = Resumed.behind(engine, self._worker, whole=self.boundaries_follow)
        return loaded

    @abandoning
    def mean(self, value: Any) -> torch.Tensor:
        """The mean over all samples of the iteration; ``value`` where the iteration is lost."""
        self._check_no_work("elaswave_plugin.deepspeed.mean")
        if not (self._iterates or self._loop.dead):
            raise ConfigurationError(
                "elaswave_plugin.deepspeed.mean is called between two steps, where a loss would"
                " take the value of a worker: call it behind engine(batch), before engine.step()"
            )
        own = torch.as_tensor(value).detach().to(self._engine.device, torch.float64)

        def work() -> torch.Tensor:
            is_behind = len(self._losses) >= self.micro_batch
            return self.portions.mean(own, weight=self._share_weight, is_behind=is_behind)

        return self._given("mean", partial(self.call, work, instead=lambda: own, counts=True))

    @property
    def _iterates(self) -> bool:
        """True in an iteration, which a loss has made again."""
        return self._loop.iteration > 0

    def _mean_loss(self) -> tuple[float, int, Holders]:
        """Return the mean over the step's samples, its tokens, and the holders of open monitors.

        They are alike on every worker, or it ends here for some.
        """
        assert self._framework.loader is not None
        mine = torch.stack(self._losses).sum() if self._losses else torch.zeros(())
        position, monitor = self._framework.loader.position, self._monitor
        here = position.epoch, position.iteration
        own = [float(mine), self._tokens, monitor.writes, monitor.holds, *here]
        own.append(self._own_loss is not None and self._own_loss.meets_unknown)
        ranks = self._worker.ranks
        paces = torch.zeros(len(ranks), 2, dtype=torch.float64)
        pace = self._worker.stopwatch.times.told_pace()
        paces[ranks.index(self._worker.slot)] = torch.tensor(pace or (0.0, 0), dtype=torch.float64)
        # Every pace has one contributor, so that the sum only adds zeros to it.
        sums = torch.cat([torch.tensor(own, dtype=torch.float64), paces.view(-1)])
        dist.all_reduce(sums)
        told = zip(ranks, sums[len(own) :].view(-1, 2).tolist(), strict=True)
        self._worker.slow_workers.compare({slot: (one, int(n)) for slot, (one, n) in told if one})
        check_together(self._worker, here, (float(sums[4]), float(sums[5])))
        if self._own_loss is not None:
            self._own_loss.end_step(somebody_asks=bool(sums[6]))
        self._iterations = self.micro_batch
        mean = float(sums[0]) / (self._iterations * dist.get_world_size())
        losses = self.portions.losses(self._losses)
        if losses is not None:
            self.losses, mean = losses, sum(losses) / self._iterations
        return mean, int(sums[1]), Holders(bool(sums[2]), bool(sums[3]))

    # ---- the data -------------------------------------------------------------------------------

    @property
    def _reader(self) -> Reader:
        return self

    def _took_loader(self, loader: ElasticLoader) -> None:
        if reserve := self._worker.reserve:
            check_shares(reserve, width=self._width, num_samples=loader.fewest_samples)
        loader.on_void = self.own_loops.leaves_first_epoch
        loader.on_mixed = self.own_loops.mixes
        loader.on_collated = self.own_loops.collates
        loader.launch = self.portions.launch_intervals
        self.news.expect(loader)

    @abandoning
    def next_batch(self, loader: ElasticLoader) -> Any:
        """The next batch of this worker's share; the first one is preceded by the first seal."""
        self._check_no_work("next(loader)")
        if not self._sealed:
            self.own_loops.check_count()
        self._begin()
        if self._resumed is not None and not self._loop.dead and self._resumed.passes_over(loader):
            self._loop.iteration -= 1
        if not loader.lagging:
            self._loop.enter()
        self._loop.set_lagging(loader.lagging)
        if loader.lagging:
            loader.skip_epoch()
        serve, void = partial(self._serve, loader), partial(self._void, loader)
        try:
            batch = self._loop.next_batch(serve, void=void)
        except StopIteration:
            loader.took(END)
            raise
        loader.took(BATCH)
        return batch

    def arrive(self) -> None:
        """Enter the job before the first batch, in a script that passes over others' calls."""
        self._begin()
        self._loop.enter()

    def _begin(self) -> None:
        """Before its first step, have the state whole, and the first seal of it."""
        if self._sealed:
            return
        check_schedules(self._engine)
        self._framework.begin()
        if not self._worker.detached:
            self._loop.call(self._framework.share, instead=lambda: None)
        self._loop.start()
        self.own_loops.begin()
        self._sealed = True

    def _void(self, loader: ElasticLoader) -> Any:
        """Return a void batch for a call that others made before a loss; None if there is none."""
        if loader.reads.due == END:
            raise StopIteration
        if loader.reads.due != BATCH and not self._loop.is_lagging:
            return None
        return loader.void_batch(self.portions.interval)

    def _serve(self, loader: ElasticLoader, step: int, iteration: int) -> Any:
        worker, portions = self._worker, self.portions
        if iteration == 0:
            self._losses, self._tokens, self._began_at = [], 0, loader.position
        iteration = portions.begin(iteration)
        portions.select(iteration)
        items = loader.items()
        interval = portions.interval(len(items))
        self._weight = self._share_weight = portions.weight(len(items))
        self._share = interval, len(items)
        launch = portions.launch_intervals(len(items))
        # Any worker that runs these samples in this step draws the same.
        key = partial(draw_key, self._seed, step, iteration)
        self.draws.begin(
            parts_of(interval, launch, key),
            watched=step == iteration == 0 and not portions.keeps_micro_batches,
        )
        self._engine.tput_timer.start()
        first = loader.position.served
        if portions.is_void:
            return loader.read(items, interval)[1]
        worker.observe("pass_begun", first + interval[0], first + interval[1])
        with self.draws.paused():
            mine, batch = loader.read(items, interval)
        self.draws.blocks = (rows_of(named(batch)) or 0) // len(mine.items) or 1
        self.own_loops.reads(named(batch))
        worker.observe("batch", batch)
        if self._own_loss is not None:
            self._own_loss.serve(Served(batch, interval, portions.every(len(items)), launch))
        tokens = tokens_of(batch, len(mine.items))
        self._tokens += tokens
        if self._timer is not None:
            self._timer.serve(len(mine.items), tokens)
        where = {"epoch": worker.view.epoch, "step": step, "k": iteration, "items": [*mine.items]}
        consume = partial(worker.ledger.emit, "consumed", slot=worker.slot, **where)
        if step or self._resumed is None:
            consume(samples=list(mine.ids))
        else:
            self._resumed.serve(loader, items, mine.ids, consume, begins=iteration == 0)
        return batch

    # ---- the end --------------------------------------------------------------------------------

    def _record(self, step: int, report: StepReport, seconds: float) -> None:
        self._recording.step(step, report, seconds, num_microbatches=self._iterations, last=False)
        if self._framework.loader is not None:
            self.news.remember_epoch(self._framework.loader.epoch)
            self._framework.loader.reads.completed_step()

    def _leave_together(self) -> None:
        self._loop.complete_state()
        self._dump_last()
        self._monitor.await_closed()
        self._loop.finish(before_leaving=self._close_files)

    def _close_files(self) -> None:
        self._monitor.close()
        self._recording.tracker.close()
