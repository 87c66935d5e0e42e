"""The loop of a framework that asks us for each step: an interrupted one is called again.

    loop.open(step)     # begins the step, which reads its batches
    loop.make()         # trains on them; the step is complete

Between two calls the framework does what it likes: it logs, steps its schedule, evaluates. Nothing
is ever dead here, unlike in a loop of the user's: a loss has the interrupted call done again before
it returns, after the steps that were rolled back.
"""

from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

import torch.distributed as dist

from elaswave_plugin.framework import StepReport
from elaswave_plugin.loops.guarded_steps import GuardedSteps
from elaswave_plugin.loops.user import UserLoop
from elaswave_plugin.recovery.recover import guarded
from elaswave_plugin.values.set_within import set_within

Result = TypeVar("Result")
# A recovery goes back to the last step that is sealed everywhere: the present one or the last.
_REMEMBERED_STEPS = 2


class CalledStep(Protocol):
    """One step; both parts may be called any number of times, in this order."""

    def read(self) -> None:
        """Read the batches of this worker's present share."""

    def train(self) -> None:
        """Run forward and backward passes over them, and the update."""


class CalledLoop(UserLoop):
    """The position of the loop; a call inside a step or a work is a part of that."""

    def __init__(
        self, steps: GuardedSteps, *, after_recovery: Callable[[], None] = lambda: None
    ) -> None:
        """``after_recovery()`` as in `UserLoop`."""
        super().__init__(steps, after_recovery=after_recovery)
        self.dead = False
        self._known: dict[int, CalledStep] = {}
        # The step whose batches have been read in this view.
        self._opened: int | None = None
        self.inside = False
        """True while a step or a work runs, which is called again after a loss."""

    def open(self, step: CalledStep) -> None:
        """Begin the next step and read its batches."""
        number = self.worker.completed
        self._known[number] = step
        for old in [one for one in self._known if one <= number - _REMEMBERED_STEPS]:
            del self._known[old]
        self._until(number, partial(self.worker.relief.step, partial(self._open, number)))

    def make(self, *, sealed: bool = False) -> None:
        """Complete the step that was opened.

        ``sealed``: and have every worker seal it, so that no later death of one takes it back.
        """
        self._steps.state.find()
        self._until(self.worker.completed + 1, self._await_seals if sealed else lambda: None)

    def next_batch(
        self,
        serve: Callable[[int, int], Result],
        *,
        void: Callable[[], Result | None] = lambda: None,
    ) -> Result:
        """The next batch of the step that is being opened."""
        self.worker.phases.enter("data")
        batch = serve(self.worker.completed, self.iteration)
        self.iteration += 1
        return batch

    def call(
        self, work: Callable[[], Result], *, instead: Callable[[], Result], counts: bool = True
    ) -> Result:
        """A part of a step; between two steps, ``work`` is called again after a recovery."""
        return work() if self.inside else self._again(work)

    def complete_step(self, update: Callable[[], StepReport]) -> None:
        """The end of a step: ``update()`` applies it."""
        report = update()
        self.iteration = 0
        self._opened = None
        self._steps.complete(report)

    def run(self, work: Callable[[], Result], *, phase: str) -> Result | None:
        """Work between steps that every worker calls, announced as ``phase``.

        It starts again after a recovery, and everyone leaves it together. None for a save that the
        storage has failed.
        """
        if self.inside:
            return work()
        steps, wanted = self._steps, self._steps.works_done + 1
        results: list[Result | None] = []

        def once() -> Result | None:
            self.worker.state.complete()
            if steps.works_done < wanted:
                results.append(steps.announced(work, phase))
                steps.finish_work()
            return results[-1]

        return self._again(once)

    def _again(self, work: Callable[[], Result]) -> Result:
        """Run ``work``, with what the loop has changed since the last step; again after a loss."""
        epoch, kept = self.worker.view.epoch, self._steps.state.keep()

        def once() -> Result:
            if self.worker.view.epoch != epoch:
                self._steps.state.put_back(kept)
            return work()

        return self._until(self.worker.completed, once)

    def _until(self, completed: int, work: Callable[[], Result]) -> Result:
        """Run ``work`` once ``completed`` steps are complete, whatever interrupts on the way."""

        def attempt() -> Result:
            with set_within(self, "inside", True):
                while self.worker.completed < completed:
                    self.worker.relief.step(self._attempt_step)
                self.worker.phases.step = self.worker.completed
                result = work()
                self._steps.note_recovery()
                return result

        return guarded(attempt, self._recover, blame=self._steps.blame)

    def _attempt_step(self) -> None:
        number = self.worker.completed
        self._open(number)
        self._known[number].train()

    def _await_seals(self) -> None:
        self.worker.state.finish_seal()
        dist.barrier()

    def _open(self, number: int) -> None:
        if self._opened != number:
            self.iteration = 0
            self._steps.begin()
            self._known[number].read()
            self._opened = number

    def _recover(self) -> None:
        self._opened = None
        super()._recover()
        self.dead = False
