"""The loop of a framework's own script, whose pieces can be called again one by one.

A script's loop calls its steps, its logging, its evaluations and saves in an order of its own.
Every one of them that contains a collective goes through here: it starts again after a recovery,
and everyone leaves it together, so that after a recovery all workers are in the same piece.
"""

from collections.abc import Callable
from typing import TypeVar

from elaswave_plugin.errors import EpochChanged
from elaswave_plugin.runtime.loop import GuardedSteps, StepReport

Result = TypeVar("Result")
PutBack = Callable[[], None]
# A recovery goes back to the last step that is sealed everywhere: the present one or the last.
_REMEMBERED_STEPS = 2


class ScriptLoop:
    """Runs the pieces of one worker's loop."""

    def __init__(self, steps: GuardedSteps, *, remember: Callable[[], PutBack]) -> None:
        """``remember()`` keeps what a piece changes besides the framework's state.

        It returns the function that puts it back, which may be called any number of times.
        """
        self.worker = steps.worker
        self._steps = steps
        self._remember = remember
        self._attempts: dict[int, tuple[Callable[[], StepReport], PutBack]] = {}
        self._reached = self.worker.completed
        self._inside = False
        self._put_back: PutBack = remember()

    def start(self) -> None:
        """Seal the initial state; nobody trains before everyone has done so."""
        self._reached = self.worker.completed
        self.run(self._steps.sealed_everywhere)

    def step(self, attempt: Callable[[], StepReport]) -> None:
        """Complete the next step; ``attempt()`` runs once, and again for every redo.

        It may be called in a later step as well: to redo this one after a roll-back.
        """
        self._attempts[self._reached] = attempt, self._remember()
        self._attempts.pop(self._reached - _REMEMBERED_STEPS, None)
        self._reached += 1
        self._inside = True
        try:
            while not self._redone():
                self._steps.recover()
        finally:
            self._inside = False
        self._put_back()

    def run(self, work: Callable[[], Result], *, phase: str | None = None) -> Result:
        """Run work between steps; it starts again after a recovery.

        ``phase`` announces work that a proposal waits for. Within other work it is a part of it.
        """
        if self._inside:
            return self._announced(work, phase)
        results: list[Result] = []
        before, done = self._remember(), self._steps.works_done
        self._inside = True
        try:
            while self._steps.works_done == done:
                if not (self._redone() and self._worked(work, before, results, phase)):
                    self._steps.recover()
        finally:
            self._inside = False
        self._put_back()
        return results[-1]

    def _worked(
        self,
        work: Callable[[], Result],
        before: PutBack,
        results: list[Result],
        phase: str | None,
    ) -> bool:
        """One attempt, up to where everyone has done it; false where it is interrupted."""
        before()
        self.worker.phases.step = self.worker.completed
        try:
            results.append(self._announced(work, phase))
            self._put_back = self._remember()
            self._steps.finish_work()
            self._steps.note_recovery()
            return True
        except EpochChanged:
            # Outside of the handler: its traceback would keep a step's autograd graph alive.
            return False

    def _announced(self, work: Callable[[], Result], phase: str | None) -> Result:
        if phase is None:
            return work()
        # A proposal waits for announced work; silence inside a step is fenced.
        self.worker.member.announce(phase)
        try:
            self.worker.phases.enter(phase)
            return work()
        finally:
            self.worker.member.announce(None)

    def _redone(self) -> bool:
        """Complete the steps up to the one reached; false where that is interrupted."""
        try:
            while self.worker.completed < self._reached:
                attempt, before = self._attempts[self.worker.completed]
                before()
                self._steps.begin()
                report = attempt()
                self._put_back = self._remember()
                self._steps.complete(report)
            return True
        except EpochChanged:
            return False
