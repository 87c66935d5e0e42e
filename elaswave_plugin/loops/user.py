"""The loop that the user owns: an interruption is absorbed by whichever of our calls it meets.

    for batch in loader:         # next_batch()
        loss = engine(batch)     # call()
        engine.backward(loss)    # call()
        engine.step()            # call(), or complete_step() where it ends a step

That body cannot be called again. So a call that is interrupted takes part in the recovery, and the
rest of the iteration is dead: every further call returns what stands in for its result, without any
communication, until the loop asks for its next batch. That is the first one of the step that all
survivors redo. Work between steps that every worker calls, as a save, is the exception: it is ours
to call, and starts again.

A worker that comes later, in the place of a lost one or beyond the launch, runs the script from its
start: dead, until its loop has come to where the others are.
"""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch.distributed as dist

from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.framework import StepReport
from elaswave_plugin.loops.guarded_steps import GuardedSteps
from elaswave_plugin.recovery.recover import guarded

Result = TypeVar("Result")


class UserLoop:
    """The position of a user's loop, and whether its present work counts."""

    def __init__(
        self, steps: GuardedSteps, *, after_recovery: Callable[[], None] = lambda: None
    ) -> None:
        """``after_recovery()`` is called on every worker once a recovery has restored its state.

        It may communicate; an interruption there leads to the next recovery.
        """
        self.worker = steps.worker
        self.worker.state.seal_each_step(
            "the loop is the script's own, which is taken back by one step at most"
        )
        self._steps = steps
        self._after_recovery = after_recovery
        # Batches that were served since the step began.
        self.iteration = 0
        self.dead = steps.worker.detached
        self.is_lagging = False
        """Whether the script is at what the others have behind them."""
        self.meets = False
        """Whether after a recovery all scripts come to the same call, and make it together."""
        # Where it is dead: whether no batch of the step that is redone had been served here.
        self.between = True

    def start(self) -> None:
        """Seal the initial state; no worker trains before all have done so."""
        self._completed(self._steps.sealed_everywhere)

    def enter(self) -> None:
        """A worker that comes later enters the job, before its first batch."""
        if self.worker.detached:
            self.worker.ask_to_enter()
            self._recover()

    def set_lagging(self, lagging: bool) -> None:
        """Set whether the script is at what the others have completed, where it meets none."""
        self.is_lagging = lagging
        self.worker.links.detached = lagging or self.worker.detached

    def pass_over(self) -> None:
        """A batch that the others have behind them: no recovery has to wait for the last one."""
        guarded(partial(self.worker.phases.enter, "passing"), self._recover)

    def next_batch(
        self,
        serve: Callable[[int, int], Result],
        *,
        void: Callable[[], Result | None] = lambda: None,
    ) -> Result:
        """The next batch: ``serve(step, iteration)``, called again after a recovery.

        ``void()``: a batch that the others had before the recovery, and none trains on; or None.
        """

        def begin() -> Result:
            passed = void()
            if passed is not None:
                self.between = False
                return passed
            if self.iteration == 0:
                self._steps.begin()
            self.worker.phases.enter("data")
            batch = serve(self.worker.completed, self.iteration)
            self.iteration += 1
            self.dead = False
            return batch

        self.enter()
        return self._again_after(begin)

    def call(
        self, work: Callable[[], Result], *, instead: Callable[[], Result], counts: bool = False
    ) -> Result:
        """A part of the iteration; ``instead()`` is the result where it is or becomes dead.

        ``counts``: the script may go by its result, so that it is made where all scripts meet.
        """

        def made() -> Result:
            is_dead = self.is_lagging or (self.dead and not (counts and self.meets))
            return instead() if is_dead else work()

        return self._again_after(made)

    def complete_step(self, update: Callable[[], StepReport]) -> None:
        """The end of a step: ``update()`` applies it."""

        def work() -> None:
            report = update()
            self.iteration = 0
            self._steps.complete(report)

        self.call(work, instead=lambda: None)

    def run(self, work: Callable[[], Result], *, phase: str) -> Result | None:
        """Work between steps that every worker calls, announced as ``phase``.

        It starts again after a recovery, unless that rolled a step back: then the loop comes here
        again once it has redone it, and None is returned. All workers leave it together.
        Raises ConfigurationError in the middle of a step, whose first part a loss takes back.
        """
        if self.iteration and not self.dead:
            raise ConfigurationError(
                f"{phase} between two steps is asked for in the middle of step"
                f" {self.worker.completed}, after {self.iteration} of its batches: call it behind"
                " the engine.step() by which engine.global_steps has grown"
            )
        if self.worker.detached or self.is_lagging or (self.dead and not self.between):
            return None
        step, done = self.worker.completed, self._steps.works_done
        result: Result | None = None
        before = self._steps.state.keep()

        def once() -> None:
            nonlocal result
            if (self.worker.completed, self._steps.works_done) == (step, done):
                self.worker.state.complete()
                self.worker.phases.step = step
                result = self._steps.announced(work, phase)
                self._steps.finish_work()
                self.dead = False
                self._steps.note_recovery()

        def recover() -> None:
            self._recover()
            self._steps.state.put_back(before)

        guarded(once, recover, blame=self._steps.blame)
        return result if self.worker.completed == step else None

    def complete_state(self) -> None:
        """Have all of the state here, as it is about to be read."""
        self._completed(self.worker.state.complete)

    def finish(self, *, before_leaving: Callable[[], object]) -> None:
        """Leave when all workers have completed their last step."""
        self.set_lagging(False)
        self.worker.phases.step = self.worker.completed
        self._completed(dist.barrier)
        before_leaving()
        self.worker.close()

    def _again_after(self, work: Callable[[], Result]) -> Result:
        step = partial(self.worker.relief.step, work)
        return guarded(step, self._recover, blame=self._steps.blame)

    def _completed(self, work: Callable[[], object]) -> None:
        """Run ``work``, and again after every recovery, which is over once it has run."""

        def complete() -> None:
            work()
            if self.iteration == 0:
                self._steps.note_recovery()

        self._again_after(complete)

    def _recover(self) -> None:
        between, completed = self.iteration == 0, self.worker.completed
        if self.iteration and not self.dead and self._steps.state.repeats_bodies:
            # What the script has set behind its first batch, where a loss meets its next call.
            self._steps.state.find()
        # One that comes has begun no step that could have been rolled back.
        comes = self.worker.detached
        self.dead = True
        self.iteration = 0

        def restore() -> None:
            self._steps.recover()
            self.between = comes or (between and completed == self.worker.completed)

        restore()
        guarded(self._after_recovery, restore, blame=self._steps.blame)
        self.worker.links.detached = self.is_lagging
