"""The loop of a framework's own script, whose pieces can be called again one by one.

A script's loop calls its steps, its logging, its evaluations and saves in an order of its own.
Every one of them that contains a collective goes through here: it starts again after a recovery,
and all workers leave it together, so that after a recovery all workers are in the same piece.

A worker that comes later, in the place of a lost one or beyond the launch, runs the script from its
start, and enters before its loop begins.
What its loop does before its first step, the others have behind them.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from elaswave_plugin.errors import ElasWaveError
from elaswave_plugin.framework import StepReport
from elaswave_plugin.loops.guarded_steps import GuardedSteps
from elaswave_plugin.recovery.guarded import guarded
from elaswave_plugin.recovery.handshake import Handshake

Result = TypeVar("Result")


class LoopVariables(Protocol):
    """The loop's own variables, which only workers that have run the loop know."""

    def tell(self) -> Any:
        """Return what a worker that comes later has to learn, alike on all; a plain value."""
        ...

    def follow(self, step: int, states: Any) -> None:
        """Have the loop begin with this step, as it goes on for the workers that told."""
        ...


class ScriptLoop:
    """Runs the pieces of one worker's loop."""

    def __init__(self, steps: GuardedSteps, *, variables: LoopVariables) -> None:
        self.worker = steps.worker
        self._steps = steps
        self._variables = variables
        self._attempt: Callable[[int], StepReport | None] | None = None
        self._reached = self.worker.completed
        self._inside = False
        knows = not self.worker.detached
        self._handshake = Handshake(
            self.worker.notes, knows=knows, tell=variables.tell, follow=self._follow
        )
        # Whether it has come later, and the script has not come to its first step yet.
        self._is_ahead = False

    def start(self) -> None:
        """Seal the initial state; no worker trains before all have done so.

        A worker that comes later enters the job instead. Raises ElasWaveError where none
        is left that could tell it where the loop is.
        """
        self._reached = self.worker.completed
        if self.worker.detached:
            self.worker.ask_to_enter()
            self._recover()
        else:
            self.run(self._steps.sealed_everywhere)

    def step(self, attempt: Callable[[int], StepReport | None]) -> None:
        """Complete the next step; ``attempt(step)`` runs once, and again for every redo.

        It may be called for the step before as well: to redo that one after a roll-back. None, on
        all workers alike: the script gives the step up before its update, and ends; it then is no
        step of the job. Raises ElasWaveError where it gives an earlier one up, which was made.
        """
        self._attempt = attempt
        self._is_ahead = False
        done = self._steps.works_done

        def once() -> None:
            if self._steps.works_done == done:
                self._redo()
                if self.worker.completed == self._reached:
                    self.worker.relief.step(lambda: self._attempt_step(is_next=True))

        self._inside = True
        try:
            guarded(once, self._recover, blame=self._steps.blame)
        finally:
            self._inside = False
        if self._steps.works_done == done:
            self._reached += 1

    def run(self, work: Callable[[], Result], *, phase: str | None = None) -> Result | None:
        """Run work between steps; it starts again after a recovery.

        ``phase`` announces work that a proposal waits for. Within other work it is a part of it.
        None for a worker that came later, before its first step: it has no part in it; and for a
        save that failed.
        """
        if self._is_ahead:
            return None
        if self._inside:
            return self._announced(work, phase)
        results: list[Result | None] = []
        state, done, epoch = self._steps.state, self._steps.works_done, self.worker.view.epoch
        before = after = state.keep()

        def once() -> None:
            nonlocal after
            if self._steps.works_done == done:
                self._redo()
                if self.worker.view.epoch != epoch:
                    state.put_back(before)
                results.append(self._worked(work, phase))
                after = state.keep()
                self._steps.finish_work()
                self._steps.note_recovery()

        self._inside = True
        try:
            guarded(once, self._recover, blame=self._steps.blame)
        finally:
            self._inside = False
        if self.worker.view.epoch != epoch:
            state.put_back(after)
        return results[-1]

    def _worked(self, work: Callable[[], Result], phase: str | None) -> Result | None:
        """One attempt; raises EpochChanged where it is interrupted."""
        self.worker.phases.step = self.worker.completed
        self.worker.state.complete()
        return self._announced(work, phase)

    def _announced(self, work: Callable[[], Result], phase: str | None) -> Result | None:
        return work() if phase is None else self._steps.announced(work, phase)

    def _redo(self) -> None:
        """Complete the steps up to the one reached; raises EpochChanged where it is interrupted."""
        while self.worker.completed < self._reached:
            self.worker.relief.step(self._attempt_step)

    def _attempt_step(self, *, is_next: bool = False) -> None:
        assert self._attempt is not None
        self._steps.begin()
        report = self._attempt(self.worker.completed)
        if report is not None:
            self._steps.complete(report)
        elif is_next:
            self._steps.finish_work()
        else:
            raise ElasWaveError(
                f"step {self.worker.completed} was complete before a loss of workers, and the "
                "script gives it up where it is redone; restart from the last checkpoint"
            )

    # ---- those who come later -------------------------------------------------------------------

    def _recover(self) -> None:
        self._steps.recover()
        guarded(self._handshake.exchange, self._steps.recover)

    def _follow(self, states: Sequence[Any]) -> None:
        if states[dist.get_rank()] is None:
            self._is_ahead = True
            self._reached = self.worker.completed
            self._variables.follow(self._reached, next(one for one in states if one is not None))
