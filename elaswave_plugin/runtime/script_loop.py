"""The loop of a framework's own script, whose pieces can be called again one by one.

A script's loop calls its steps, its logging, its evaluations and saves in an order of its own.
Every one of them that contains a collective goes through here: it starts again after a recovery,
and everyone leaves it together, so that after a recovery all workers are in the same piece.

A worker that comes later, in the place of a lost one or beyond the launch, runs the script from its
start, and enters before its loop begins.
What its loop does before its first step, the others have behind them.
"""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from elaswave_plugin.errors import ElasWaveError, EpochChanged
from elaswave_plugin.runtime.loop import GuardedSteps, StepReport

Result = TypeVar("Result")
# A recovery goes back to the last step that is sealed everywhere: the present one or the last.
_REMEMBERED_STEPS = 2


class LoopState(Protocol):
    """What the pieces of a loop change besides the framework's state."""

    def keep(self) -> Any:
        """A copy of it."""
        ...

    def put_back(self, kept: Any) -> None:
        """Make it as it was kept; any number of times."""
        ...

    def shared(self, kept: Any) -> Any:
        """The part of what was kept that another worker can put back, too; picklable."""
        ...

    def tell(self) -> Any:
        """What a worker has to learn that comes into the loop later, alike on all; picklable."""
        ...

    def follow(self, step: int, told: Any, before: Any) -> None:
        """Have the loop begin with this step, as it goes on for those who told.

        ``before``: what they had kept before that step, as ``shared`` has it.
        """
        ...


class ScriptLoop:
    """Runs the pieces of one worker's loop."""

    def __init__(self, steps: GuardedSteps, *, state: LoopState) -> None:
        self.worker = steps.worker
        self._steps = steps
        self._state = state
        self._attempt: Callable[[int], StepReport] | None = None
        self._reached = self.worker.completed
        self._inside = False
        # What there was before each of the last steps, and after the last piece.
        self._before: dict[int, Any] = {}
        self._after = state.keep()
        self._is_told = not self.worker.alone
        self._told: dict[int, Any] = {}

    def start(self) -> None:
        """Seal the initial state; nobody trains before everyone has done so.

        A worker that comes later enters the job instead. Raises ElasWaveError where nobody
        is left who could tell it where the loop is.
        """
        self._reached = self.worker.completed
        if self.worker.alone:
            self.worker.ask_to_enter()
            self._recover()
        else:
            self.run(self._steps.sealed_everywhere)

    def step(self, attempt: Callable[[int], StepReport]) -> None:
        """Complete the next step; ``attempt(step)`` runs once, and again for every redo.

        It may be called for the step before as well: to redo that one after a roll-back.
        """
        self._attempt = attempt
        self._take_up()
        self._before[self._reached] = self._state.keep()
        self._before.pop(self._reached - _REMEMBERED_STEPS, None)
        self._reached += 1
        self._inside = True
        try:
            while not self._redone():
                self._recover()
        finally:
            self._inside = False
        self._state.put_back(self._after)

    def run(self, work: Callable[[], Result], *, phase: str | None = None) -> Result | None:
        """Run work between steps; it starts again after a recovery.

        ``phase`` announces work that a proposal waits for. Within other work it is a part of it.
        None for a worker that came later, before its first step: it has no part in it; and for a
        save that failed.
        """
        if self._told:
            return None
        if self._inside:
            return self._announced(work, phase)
        results: list[Result | None] = []
        before, done = self._state.keep(), self._steps.works_done
        self._inside = True
        try:
            while self._steps.works_done == done:
                if not (self._redone() and self._worked(work, before, results, phase)):
                    self._recover()
        finally:
            self._inside = False
        self._state.put_back(self._after)
        return results[-1]

    def _worked(
        self,
        work: Callable[[], Result],
        before: Any,
        results: list[Result | None],
        phase: str | None,
    ) -> bool:
        """One attempt, up to where everyone has done it; false where it is interrupted."""
        self._state.put_back(before)
        self.worker.phases.step = self.worker.completed
        try:
            self.worker.state.complete()
            results.append(self._announced(work, phase))
            self._after = self._state.keep()
            self._steps.finish_work()
            self._steps.note_recovery()
            return True
        except EpochChanged:
            # Outside of the handler: its traceback would keep a step's autograd graph alive.
            return False

    def _announced(self, work: Callable[[], Result], phase: str | None) -> Result | None:
        return work() if phase is None else self._steps.announced(work, phase)

    def _redone(self) -> bool:
        """Complete the steps up to the one reached; false where that is interrupted."""
        try:
            while self.worker.completed < self._reached:
                assert self._attempt is not None
                self._state.put_back(self._before[self.worker.completed])
                self._steps.begin()
                report = self._attempt(self.worker.completed)
                self._after = self._state.keep()
                self._steps.complete(report)
            return True
        except EpochChanged:
            return False

    # ---- those who come later -------------------------------------------------------------------

    def _recover(self) -> None:
        while True:
            self._steps.recover()
            try:
                return self._tell()
            except EpochChanged:
                pass

    def _tell(self) -> None:
        """Those who have been there tell those who come later (collective over WORLD)."""
        asks = torch.tensor(int(not self._is_told))
        dist.all_reduce(asks, op=dist.ReduceOp.MAX)
        if not int(asks):
            return
        mine = None
        if self._is_told:
            # Workers come between two steps, where everyone is about to begin one.
            before = {step: self._state.shared(kept) for step, kept in self._before.items()}
            mine = max(before), before, self._state.tell()
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        told = next((one for one in everyone if one is not None), None)
        if told is None:
            raise ElasWaveError(
                "everybody who knew where the script's loop was is lost, before this worker had"
                " come; restart from the last checkpoint"
            )
        if not self._is_told:
            self._reached, self._told, variables = told
            self._is_told = True
            self._state.follow(self._reached, variables, self._told[self._reached])

    def _take_up(self) -> None:
        """What the others had before their last steps is what there was here."""
        for step, shared in sorted(self._told.items()):
            self._state.put_back(shared)
            self._before[step] = self._state.keep()
        self._told = {}
