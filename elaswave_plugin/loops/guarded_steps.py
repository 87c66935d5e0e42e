"""The work around each step, and around work between two, alike in every loop."""

import os
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist

from elaswave_plugin.config import SAVE_PHASE
from elaswave_plugin.errors import AgreementError, ConfigurationError, EpochChanged, LinkError
from elaswave_plugin.framework import Framework, StepReport
from elaswave_plugin.ipc.process_tree import exit_at_once
from elaswave_plugin.loops.own_signals import OwnSignals
from elaswave_plugin.recovery.drafts import Drafts, FailedSaves
from elaswave_plugin.recovery.recover import guarded, recover
from elaswave_plugin.recovery.worker import Worker
from elaswave_plugin.step_state.step_state import StepState

Result = TypeVar("Result")
_WORKS = "pieces of work between steps"


class GuardedSteps:
    """The work around each step, alike in every loop: begins the step, completes it."""

    def __init__(
        self,
        worker: Worker,
        framework: Framework,
        *,
        on_commit: Callable[[int, StepReport, float], None],
        on_recovered: Callable[[dict[str, object]], None],
        state: StepState | None = None,
        counted_by: str = "the step of the job",
    ) -> None:
        """``on_commit(step, report, seconds)`` is told of every completed attempt of a step.

        It may raise EpochChanged.

        ``on_recovered(record)`` is told of a recovery once work has been completed after it.
        ``state``: what a step changes beside the framework's shards; ``counted_by``: where a script
        finds how many steps the job has made.
        """
        self.worker = worker
        self.state = StepState(worker) if state is None else state
        self._framework = framework
        self._on_commit = on_commit
        self._on_recovered = on_recovered
        self._counted_by = counted_by
        self._changes = worker.config.changes()
        worker.member.plan_arrivals([one.step for one in self._changes if one.arrives])
        self._began_s = 0.0
        # Pieces of work between steps that everyone has completed.
        self.works_done = 0
        worker.notes.add(_WORKS, lambda step: self.works_done)
        self.drafts = Drafts(worker)
        self._signals = OwnSignals(worker)
        self._failed_saves = FailedSaves(worker, self.drafts)

    def sealed_everywhere(self) -> None:
        """Seal the initial state; no worker trains before all have done so."""
        if not self.worker.detached:
            self.worker.state.seal_initial(self._framework, self.worker.completed)
            self.state.sealed()
            self.state.check_alike()
            dist.barrier()
            self.worker.state.await_start()
            self.worker.phases.between_steps()

    def begin(self) -> None:
        """A step begins; a worker whose departure is planned leaves here.

        Raises EpochChanged where others come or go before it.
        """
        worker, step = self.worker, self.worker.completed
        self._signals.begin_step()
        self.state.begin(step)
        worker.observe("begun", step, self.state.repeats_bodies)
        absent = [one for one in self._changes if one.slot not in worker.view.ranks]
        arrives = any(one.arrives and one.step == step for one in absent)
        try:
            worker.member.begin_step(step, awaits_arrival=arrives)
        except EpochChanged as view:
            if worker.member.stops_before(step):
                worker.state.seal_at_boundary(self._framework, step)
                worker.notes.leave(step, view.epoch)
            raise
        worker.notes.leave_in(step)
        for change in self._changes:
            if change.step == step and change.slot in worker.view.ranks and not change.arrives:
                worker.state.seal_at_boundary(self._framework, step)
                worker.state.finish_seal()
                dist.barrier()
                if change.slot == worker.slot:
                    later = (one for one in self._changes if one.arrives and one.step > step)
                    returns = any(one.slot == worker.slot for one in later)
                    worker.events.emit("departed", slot=worker.slot, step=step, pid=os.getpid())
                    worker.member.leave("its departure was planned", returns=returns)
                    exit_at_once(0)
        self._began_s = time.monotonic()
        worker.stopwatch.operations.begin_step()
        worker.phases.begin_step(worker.completed)

    def complete(self, report: StepReport) -> None:
        """The step that began has been applied: seal it, and tell.

        Not where this worker was stopped for so long that it may have been given up.
        """
        worker = self.worker
        worker.member.await_lease()
        worker.completed += 1
        worker.state.seal(self._framework, worker.completed)
        worker.ask_for_interval()
        self.state.sealed()
        worker.phases.end_step()
        worker.stopwatch.step_over()
        elapsed_s = time.monotonic() - self._began_s
        self.note_recovery()
        self._on_commit(worker.completed - 1, report, elapsed_s)
        worker.phases.fire("body")

    def announced(self, work: Callable[[], Result], phase: str) -> Result | None:
        """Run work between steps, for which a proposal waits; None for a save that failed.

        ``phase`` names it. A save that the storage fails is told, and the job goes on.
        """
        # A proposal waits for announced work; silence inside a step is fenced.
        self.worker.member.announce(phase)
        self.worker.observe("announced", phase)
        result = None
        try:
            self.worker.phases.enter(phase)
            # It may change weights for a while, as averages of them do.
            self.worker.state.leave_seal()
            result = (
                self._failed_saves.attempt(work, self.works_done) if phase == SAVE_PHASE else work()
            )
            return result
        finally:
            self.worker.member.announce(None)
            self.worker.observe("returned", phase, result)

    def finish_work(self) -> None:
        """The own part of a work between steps is done: leave it together with the others."""
        dist.barrier()
        self.works_done += 1
        self.worker.observe("worked", self.works_done - 1)
        self.worker.phases.between_steps()

    def recover(self) -> None:
        """Take part in the recovery after an interruption."""
        self.worker.observe("interrupted")
        again = partial(recover, self.worker, self._framework)
        again()
        guarded(self._restored, again)

    def _restored(self) -> None:
        """Complete work that one worker has left: it left a barrier that met all workers."""
        self.state.restored(self.worker.completed)
        if self.worker.notes.were_read:
            self.works_done = self.worker.notes.read(_WORKS)
        done = torch.tensor([self.works_done, self._failed_saves.has_failed])
        dist.all_reduce(done, op=dist.ReduceOp.MAX)
        self.works_done = int(done[0])
        if int(done[1]):
            self._failed_saves.agree()

    def blame(self, error: LinkError) -> None:
        """Workers do not do the same: those that came last leave, and the others go on.

        Returns where they leave, which asks for a recovery. Raises ConfigurationError on one of
        them, and ``error`` where nobody has come later, or none of them leaves.
        """
        worker = self.worker
        if worker.untried and worker.is_latest:
            raise ConfigurationError(
                f"this worker came later and does not do in its first step what the others do"
                f" ({error}); have the script build the same model and do the same wherever it"
                " starts, or set respawn to 0 and leave --reserve out"
            ) from error
        if worker.is_latest:
            raise ConfigurationError(
                "this worker came later, and its script does something else after step"
                f" {worker.completed - 1} than those of the others: one that counts its steps"
                " itself has not seen those before it; count those that the job has made"
                f" ({self._counted_by}), keep the count by elaswave_plugin.keep, or set respawn to"
                f" 0 ({error})"
            ) from error
        if not worker.has_newcomers:
            raise error
        try:
            worker.member.await_proposal(worker.config.transfer_timeout_s)
        except EpochChanged:
            return
        except AgreementError:
            raise error from None

    def note_recovery(self) -> None:
        """Work was completed: a recovery that led to it is over."""
        record = self.worker.recovery_over()
        if record is not None:
            self._on_recovered(record)
