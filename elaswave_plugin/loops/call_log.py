"""The calls of a script's loop that are made again after a loss; each returns once.

    calls.part(passes)              # a call inside of the next step
    calls.step(attempt)             # makes that step: the last call of it, or all of it
    calls.run(save, phase="save")   # work between two steps, which every worker calls

A recovery takes the state back to a seal. From there each worker makes again what its script has
called since, up to the call in which it stands, so that after a recovery all workers are in the
same call. Every piece of a loop that contains a collective goes through here.

A worker that comes later, in the place of a lost one or beyond the launch, runs its script from the
start. What that does before it has come to the others' step, they have behind them.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from elaswave_plugin.errors import ConfigurationError, ElasWaveError
from elaswave_plugin.framework import StepReport
from elaswave_plugin.loops.guarded_steps import GuardedSteps
from elaswave_plugin.recovery.handshake import Handshake
from elaswave_plugin.recovery.recover import guarded
from elaswave_plugin.values.set_within import set_within

Result = TypeVar("Result")
# Makes a step, by its number; None where the script gives it up before its update.
Attempt = Callable[[int], StepReport | None]


def _in_own_mode(function: Callable[..., Result]) -> Callable[..., Result]:
    """Have gradients, whatever the script has set where a loss meets it, as in an evaluation."""
    made: Callable[..., Result] = torch.inference_mode(False)(torch.enable_grad()(function))
    return made


class Knowledge(Protocol):
    """The knowledge that a later worker needs, except the state and the number of the step."""

    def tell(self) -> Any:
        """Return what goes to every worker; a plain value, and not None."""

    def follow(self, step: int, told: Sequence[Any]) -> None:
        """Teach the workers who know nothing, before ``step``; called on every worker.

        ``told``: by rank, None for those, and behind the last rank what was noted, if nobody knows.
        """


class _Part:
    """A call inside of a step, which was made first after ``life`` recoveries of this worker."""

    def __init__(
        self, work: Callable[[], Any], put_back: Callable[[], object], *, life: int
    ) -> None:
        """``put_back()`` has what the script had set before it."""
        self._work, self._put_back = work, put_back
        self._first = life
        self._made = -1
        self.is_of_its_step = False
        """Whether it is no part of another step."""
        self.result: Any = None

    @classmethod
    def done(cls, put_back: Callable[[], object], *, life: int) -> "_Part":
        """Return what stands for work amid a step that is not made again: what it has left."""
        part = cls(put_back, lambda: None, life=life)
        part._made, part.is_of_its_step = life, True
        return part

    def as_first(self) -> "_Part":
        """Return the same call, as one of a step before its own."""
        return _Part(self._work, self._put_back, life=self._first)

    def reenter(self, life: int) -> None:
        """Have what the script had set, where a recovery has come since."""
        if life != self._first and life != self._made:
            self._put_back()

    def make(self, life: int) -> None:
        """Make the call, unless it was made since the last recovery."""
        if life != self._made:
            self.result = self._work()
            self._made = life


class CallLog:
    """The calls of one worker's script."""

    def __init__(
        self, steps: GuardedSteps, *, knowledge: Knowledge | None = None, passes: bool = False
    ) -> None:
        """``knowledge``: what is told to a worker that comes later; without it, nothing is.

        ``passes``: its script counts its steps by itself, and so passes over those that the others
        have behind them, one by one. Otherwise it begins with the step that comes next.
        """
        self.worker = steps.worker
        self._steps = steps
        self._passes = passes
        # Steps that the script has behind it, and those that the others had when it came.
        self._passed = self._reached = self.worker.completed
        self.is_lagging = self.worker.detached
        """Whether the script is at what the others have behind them, where it meets nobody."""
        self.is_inside = False
        """True while a call is being made, of which others are a part."""
        # By the number of the step: its calls, and what makes it.
        self._parts: dict[int, list[_Part]] = {}
        self._attempts: dict[int, Attempt] = {}
        # Recoveries so far, and after which of them which step was begun last.
        self._life = 0
        self._begun = (-1, -1)
        self._report: StepReport | None = None
        self.after_recovery: list[Callable[[], object]] = []
        """Called on every worker behind each recovery; these may communicate, and begin again."""
        self._handshake: Handshake | None = None
        if knowledge is not None:
            self._handshake = Handshake(
                self.worker.notes,
                knows=not self.is_lagging,
                tell=lambda: [self._passed, knowledge.tell()],
                follow=lambda told: self._follow(knowledge, told),
            )

    @property
    def works_done(self) -> int:
        """The number of pieces of work between steps that all workers have completed."""
        return self._steps.works_done

    def start(self) -> None:
        """Seal the initial state; no worker trains before all have done so."""
        if not self.worker.detached:
            self._until(self._steps.sealed_everywhere)

    def enter(self) -> None:
        """A worker that comes later enters the job, before its first step."""
        if self.worker.detached:
            self.worker.ask_to_enter()
            self._recover()
            if self._handshake is None:
                self._reached = self.worker.completed
            if not self._passes:
                self._passed = self._reached

    def step(self, attempt: Attempt) -> StepReport | None:
        """Complete the script's next step; ``attempt(step)`` runs once, and again for every redo.

        After a roll-back the steps before it are made first. None for a step that the others have
        behind them, and for one that the script gives up, on all workers alike, before its update:
        it then is no step of the job. Raises ElasWaveError where that one was made before.
        """
        self.arrive()
        if self.is_lagging:
            self._pass()
            return None
        return self._make(attempt)

    def part(
        self, work: Callable[[], Result], *, keep: Callable[[], Callable[[], object]]
    ) -> Result | None:
        """Make a call of the next step before the one that makes it; again where that is redone.

        ``keep()`` returns what puts back what the script has set before it. None where the others
        have that step behind them. Within another call it is a part of that.
        """
        if self.is_inside:
            return work()
        self.arrive()
        if self.is_lagging:
            return None
        part = _Part(work, keep(), life=self._life)
        self._parts.setdefault(self._passed, []).append(part)
        try:
            self._guard(self._come_here)
        except BaseException:
            # The script may go on behind an error of its own, as at the end of its data.
            self._parts[self._passed].remove(part)
            raise
        result: Result = part.result
        return result

    def arrive(self) -> None:
        """Enter the job where this worker has not; its script may have come to the others' step.

        Comes before each call of a step.
        """
        self.enter()
        if self.is_lagging and self._passed == self._reached:
            self.is_lagging = self.worker.links.detached = False

    def _pass(self) -> None:
        """A step is passed over; a recovery has not to wait for the last one of these."""
        guarded(partial(self.worker.phases.enter, "passing"), self._recover)
        self._passed += 1

    def _make(self, attempt: Attempt) -> StepReport | None:
        done = self.works_done
        self._attempts[self._passed] = attempt
        oldest = self._passed - self.worker.state.remembered_steps
        for known in (self._attempts, self._parts):
            for old in [one for one in known if one <= oldest]:
                del known[old]

        @_in_own_mode
        def once() -> None:
            while self.works_done == done and self.worker.completed <= self._passed:
                self.worker.relief.step(self._attempt_step)
            self.worker.phases.step = self.worker.completed

        self._guard(once)
        if self.works_done != done:
            return None
        self._passed += 1
        return self._report

    def run(
        self,
        work: Callable[[], Result],
        *,
        phase: str | None = None,
        detached: Result | None = None,
    ) -> Result | None:
        """Run work between steps; it starts again after a recovery, and all leave it together.

        ``phase`` announces work that a proposal waits for. Within other work it is a part of it.
        ``detached``: the result on a worker that came later, where the others have it behind them.
        None for a save that failed.
        """
        if self.is_lagging:
            return detached
        if self.is_inside:
            return self._announced(work, phase)
        results: list[Result | None] = []
        state, done, epoch = self._steps.state, self.works_done, self.worker.view.epoch
        before = after = state.keep()

        def once() -> None:
            nonlocal after
            if self.works_done != done:
                # A recovery has come behind it, for another reason.
                state.put_back(after)
                return
            if self.worker.view.epoch != epoch:
                state.put_back(before)
            results.append(self._announced(work, phase))
            after = state.keep()
            self._steps.finish_work()

        self._until(once)
        if amid := self._parts.get(self._passed):
            # As an evaluation between the passes and the update, which reads on in the data.
            amid.append(_Part.done(partial(state.put_back, after), life=self._life))
        return results[-1]

    def beside(self, work: Callable[[], Result]) -> Result:
        """Do what some workers do where others are elsewhere, and again after every recovery."""
        if self.is_inside:
            return work()
        results: list[Result] = []
        state, life = self._steps.state, self._life
        before = state.keep()

        @_in_own_mode
        def once() -> None:
            self._come_here()
            if self._life != life:
                state.put_back(before)
            results.append(work())

        self._guard(once)
        return results[-1]

    def finish(self, *, before_leaving: Callable[[], object]) -> None:
        """Leave when all workers have completed their last step.

        Raises ConfigurationError where the script ends earlier than those of the others,
        JobStopped where the job has ended.
        """
        if self._passes and self.is_lagging:
            # Its script may have ended because the job has, before this worker was let in.
            self.worker.member.check()
            raise ConfigurationError(
                f"the script of this worker, which came later, has ended after {self._passed} steps"
                f" of {self._reached} that the others have behind them; begin every worker's script"
                " with the same step, or set respawn to 0"
            )
        self._until(dist.barrier)
        before_leaving()
        self.worker.close()

    def _announced(self, work: Callable[[], Result], phase: str | None) -> Result | None:
        return work() if phase is None else self._steps.announced(work, phase)

    # ---- what is made again ---------------------------------------------------------------------

    def _until(self, work: Callable[[], object]) -> None:
        """Have ``work`` done where the script stands, with all of the state."""

        def attempt() -> None:
            self._come_here()
            self.worker.state.complete()
            self.worker.phases.step = self.worker.completed
            work()
            self._steps.note_recovery()

        self._guard(attempt)

    @_in_own_mode
    def _come_here(self) -> None:
        """Make all again that the script has behind it, also of the step in which it stands."""
        while self.worker.completed < self._passed:
            self.worker.relief.step(self._attempt_step)
        if self._parts.get(self._passed):
            self.worker.relief.step(partial(self._make_parts, self._passed))

    def _guard(self, work: Callable[[], None]) -> None:
        """Run ``work``, and again after every recovery that interrupts it."""
        with set_within(self, "is_inside", True):
            guarded(work, self._recover, blame=self._steps.blame)

    def _attempt_step(self) -> None:
        """Make the step that comes next in the job; raises EpochChanged where interrupted."""
        step = self.worker.completed
        # A worker that came behind it has not made it, and makes it as its own first one.
        attempt = self._attempts.get(step) or next(iter(self._attempts.values()))
        self._make_parts(step)
        report = attempt(step)
        if report is not None:
            self._report = report
            self._meet_unless_updated()
            self._steps.complete(report)
        elif step == self._passed:
            self._steps.finish_work()
            self._begun = (-1, -1)
        else:
            raise ElasWaveError(
                f"step {step} was complete before a loss of workers, and the script gives it up "
                "where it is redone; restart from the last checkpoint"
            )

    def _make_parts(self, step: int) -> None:
        """Begin the step, and make the calls inside of it as far as the script has come."""
        if step not in self._parts and self._parts and step < min(self._parts):
            # Nor such a one its calls.
            first = self._parts[min(self._parts)]
            self._parts[step] = [one.as_first() for one in first if not one.is_of_its_step]
        parts = self._parts.get(step, ())
        for part in parts[:1]:
            part.reenter(self._life)
        if self._begun != (self._life, step):
            self._steps.begin()
            self._begun = self._life, step
        for part in parts:
            part.reenter(self._life)
            part.make(self._life)

    def _meet_unless_updated(self) -> None:
        """A step that skips its update proves that all have come here by a barrier.

        After a grad norm, or this, the older snapshot may be overwritten.
        """
        if not self.worker.state.is_updated:
            self.worker.state.begin_update()
            dist.barrier()

    # ---- those who come later -------------------------------------------------------------------

    @_in_own_mode
    def _recover(self) -> None:
        self._life += 1
        self._steps.recover()
        guarded(self._meet, self._steps.recover)
        self.worker.links.detached = self.is_lagging

    def _meet(self) -> None:
        if self._handshake is not None:
            self._handshake.exchange()
        for call in self.after_recovery:
            call()

    def _follow(self, knowledge: Knowledge, told: Sequence[Any]) -> None:
        reached = max(one[0] for one in told if one is not None)
        if told[dist.get_rank()] is None:
            self._reached = reached
        knowledge.follow(reached, [one and one[1] for one in told])
