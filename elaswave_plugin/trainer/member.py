"""A trainer's membership in the job, as its node's agent tells it (standard library only)."""

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, Self

import elaswave_plugin.ipc.frames as said
from elaswave_plugin.core.agreement.hang import COMMIT, OUTSIDE
from elaswave_plugin.core.agreement.limits import ANNOUNCED_LIMIT_S
from elaswave_plugin.core.agreement.messages import (
    AllSealed,
    Begun,
    Deliver,
    Notice,
    Replan,
    Ring,
    Settled,
    Severed,
    Stop,
    read_payload,
)
from elaswave_plugin.core.agreement.view import MembershipView, WorkerId
from elaswave_plugin.core.codec import UnreadableMessageError, WireMessage, from_json, to_json
from elaswave_plugin.core.layout.worker_facts import SealedShard, WorkerFacts
from elaswave_plugin.errors import AgreementError, ConfigurationError, EpochChanged, JobStopped
from elaswave_plugin.ipc.environment import (
    AGENT,
    HOST,
    INCARNATION,
    LOOPBACK,
    SLOT,
    SNAPSHOT_FDS,
)
from elaswave_plugin.ipc.progress_page import ProgressPage, page_fd
from elaswave_plugin.ipc.secret import Secret
from elaswave_plugin.ipc.title import set_title
from elaswave_plugin.ipc.wire import Frame
from elaswave_plugin.trainer.control_link import AgentContact, ControlLink, Dial
from elaswave_plugin.trainer.signals import SharedSignals, await_lease, guard_continuing

# How long a planned arrival is waited for: a test setting.
PLANNED_ARRIVAL_S = 60.0
# The share of the time to answer in which a worker may complete what it is in.
_COMPLETED_WITHIN = 0.5
# So often within the time to answer does a worker in an announced phase say that it lives.
_SIGNS_OF_LIFE = 4
# Beyond the announced phase and the time to answer: finding lost nodes, a new leader.
_COMMIT_SLACK_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """A decided view with the facts of all its trainers (by slot) and all sealed records.

    `path` are the views to apply in order; its last one is `view`. It is longer than one only
    where an earlier commit did not reach this trainer.
    """

    view: MembershipView
    facts: dict[int, WorkerFacts]
    inventory: list[SealedShard]
    path: tuple[MembershipView, ...]


class Member:
    """A trainer's membership: its proposals, commits, seals and its end."""

    def __init__(
        self,
        *,
        dial: Dial,
        slot: int,
        incarnation: int,
        snapshot_fds: tuple[int, ...],
        secret: Secret,
        say: Callable[[WireMessage], bool] = lambda message: False,
        host: str = LOOPBACK,
        progress_fd: int | None = None,
    ) -> None:
        """`dial(epoch)` opens the control link; `host` is where other workers reach this node.

        `say(message)`: waits until the agent has heard it, beside the link.
        """
        self.slot = slot
        self.incarnation = incarnation
        self.snapshot_fds = snapshot_fds
        self.secret = secret
        self.host = host
        self._say = say
        self.progress_page = ProgressPage(progress_fd)
        self.progress_page.begin(incarnation)
        self.signals = SharedSignals(self.progress_page)
        self.has_last_checkpoint = False
        self._on_propose: Callable[[int, str], None] = lambda epoch, reason: None
        self._changed = threading.Condition()
        self._proposed_epoch = 0
        self._proposed_reason = ""
        self._proposed_at_s = 0.0
        self._goes_on = False
        self._answer_within_s = 0.0
        self._answered_epoch = 0
        self._returned_epoch = 0
        self._boundary: tuple[int, str] = (0, "")
        self._before_step: int | None = None
        self._begun_step = -1
        self._arrivals: tuple[int, ...] = ()
        self._detached: said.StartDetached | None = None
        self._started = False
        self.told_to_leave = False
        self._commits: list[Commit] = []
        self._stop_reason: str | None = None
        self._stop_code = 1
        # The layers of each stage that somebody has asked this worker for.
        self.cuts_wanted: tuple[int, ...] | None = None
        # Who is still to acknowledge its copy of an own snapshot, by the epoch and step of that.
        self._missing: dict[tuple[int, int], set[int]] = {}
        # When bytes of a copy last moved, by who is to hold it.
        self._moving_s: dict[int, float] = {}
        self._told_epoch = 0
        self._link = ControlLink(
            dial,
            slot=slot,
            epoch=lambda: self._told_epoch,
            on_frame=self._on_frame,
            on_end=self._ended,
        )

    @classmethod
    def from_environment(cls, env: Mapping[str, str]) -> Self:
        """The member that the agent described; raises ConfigurationError without one."""
        if AGENT not in env:
            raise ConfigurationError(
                f"{AGENT} is not set: this process has no elaswave agent; start the script with"
                " `elaswave run` or `torchrun ... -m elaswave_plugin.run`"
            )
        set_title(f"worker {env[SLOT]}")
        contact = AgentContact.from_environment(env)
        return cls(
            dial=contact.dial,
            say=contact.say,
            secret=contact.secret,
            slot=int(env[SLOT]),
            incarnation=int(env[INCARNATION]),
            snapshot_fds=tuple(map(int, env[SNAPSHOT_FDS].split(","))),
            host=env.get(HOST, LOOPBACK),
            progress_fd=page_fd(env),
        )

    @property
    def worker(self) -> WorkerId:
        """Slot and incarnation."""
        return WorkerId(slot=self.slot, incarnation=self.incarnation)

    def start(self, on_propose: Callable[[int, str], None]) -> None:
        """Listen in a thread of its own, which calls `on_propose(epoch, reason)` at once.

        It is called once more when the job is told to stop, so that blocked work unwinds: every
        method raises JobStopped from then on. After a stop (SIGCONT) the main thread does nothing
        before it may act for the job again. Signals to all processes of a job do not end this one.
        """
        self._on_propose = on_propose
        self._link.listen(silence_s=self._sign_of_life_s, on_silence=self._keep_alive)
        guard_continuing(self.progress_page, lambda: self._stopped() if self._stop_reason else None)
        self.signals.take()

    def join(
        self, facts: WorkerFacts, timeout_s: float, *, respawn: int = 0
    ) -> Commit | said.StartDetached:
        """Report ready, and wait for the first view; in a job that runs, for what to build from.

        `respawn`: times that this slot is started again. Raises AgreementError after `timeout_s`.
        """
        self._link.send(said.Join(facts=to_json(facts), respawn=respawn))
        deadline_s = time.monotonic() + timeout_s
        with self.progress_page.waiting(COMMIT), self._changed:
            while not self._commits:
                if self._detached is not None:
                    return self._detached
                self._wait(deadline_s, f"the first view, {timeout_s:g} s after joining")
            return self._take_commit()

    def remember(self, what: said.JobConstants) -> None:
        """Have the agent keep this for a trainer that replaces this one."""
        self._link.send(said.SetConstants(what=what))

    def saves_last(self) -> None:
        """Tell that this worker, where all have to leave, saves a checkpoint with them and ends."""
        self.has_last_checkpoint = True
        self.ends_last()

    def ends_last(self) -> None:
        """Tell that this worker, where all have to leave, ends by itself."""
        self._link.send(said.SavesLast())

    def ready(self, facts: WorkerFacts) -> None:
        """All is built: ask to be let in. The proposal that does so is answered by `quiesce`."""
        self._link.send(said.Ready(facts=to_json(facts)))

    def plan_arrivals(self, steps: Collection[int]) -> None:
        """Let no worker in before the next of these steps: a test setting, alike on all."""
        self._arrivals = tuple(steps)

    def begin_step(self, step: int, *, awaits_arrival: bool = False) -> None:
        """A step begins; raises EpochChanged instead where the others change the view before it.

        Nothing is interrupted then: a worker that is still in the step before can finish it.
        Where a change is due and it is not known yet before which step, this waits to be told, as
        it does for an arrival that is planned before this step.
        """
        deadline_s = time.monotonic() + ANNOUNCED_LIMIT_S
        with self._changed:
            # After a roll-back a step is begun again.
            self._begun_step = min(self._begun_step, step - 1)
            if awaits_arrival:
                self._await_boundary(time.monotonic() + PLANNED_ARRIVAL_S)
            while self._boundary[0] > max(self._proposed_epoch, self._returned_epoch):
                epoch, reason = self._boundary
                if self._before_step is None:
                    with self.progress_page.waiting(COMMIT):
                        self._wait(deadline_s, f"the step before which view {epoch} begins")
                elif step < self._before_step:
                    break
                else:
                    self._proposed_epoch, self._proposed_reason = epoch, reason
            self.check()
            self._begun_step = step

    def stops_before(self, step: int) -> bool:
        """Return whether all stop before this step for the view that is proposed."""
        return (self._boundary[0], self._before_step) == (self._proposed_epoch, step)

    def _await_boundary(self, deadline_s: float) -> None:
        with self.progress_page.waiting(OUTSIDE):
            while self._boundary[0] <= self._returned_epoch:
                self.check()
                self._wait(deadline_s, f"a planned arrival within {PLANNED_ARRIVAL_S:g} s")

    def check(self) -> None:
        """Raise EpochChanged where a newer view is proposed, JobStopped where the job ends."""
        if self._stop_reason is not None:
            raise self._stopped()
        if self._proposed_epoch > self._returned_epoch and not self._passes_over:
            raise EpochChanged(self._proposed_epoch, self._proposed_reason)

    def go_on(self, wanted: bool) -> None:
        """Complete what begins here before a proposal is heard, if that does not take too long."""
        self._goes_on = wanted

    @contextlib.contextmanager
    def going_on(self) -> Iterator[None]:
        """Inside, an interruption is passed over as long as ``check`` would not hear it."""
        try:
            yield
        except EpochChanged:
            if not self._passes_over:
                raise

    @property
    def _passes_over(self) -> bool:
        limit_s = self._answer_within_s * _COMPLETED_WITHIN
        return self._goes_on and time.monotonic() - self._proposed_at_s < limit_s

    def await_lease(self) -> None:
        """Wait until the others are sure to count this worker in; raises EpochChanged, JobStopped.

        It comes before what the worker does for the job, since it may have been stopped meanwhile.
        """
        if self.progress_page.may_act:
            return
        with self.progress_page.waiting(OUTSIDE):
            await_lease(self.progress_page, self.check)

    def quiesce(self, facts: WorkerFacts, timeout_s: float | None = None) -> Commit:
        """Answer the open proposal (or the next one) and wait for its commit.

        Without `timeout_s`, as long as another worker may stay in an announced phase.
        Raises EpochChanged where a newer proposal replaces it, AgreementError after `timeout_s`.
        """
        if timeout_s is None:
            timeout_s = ANNOUNCED_LIMIT_S + 2 * self._answer_within_s + _COMMIT_SLACK_S
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while self._proposed_epoch <= self._returned_epoch and not self._commits:
                self._wait(deadline_s, f"a proposal of the next view within {timeout_s:g} s")
            epoch = self._answered_epoch = self._proposed_epoch
        self._link.send(said.Quiesced(epoch=epoch, facts=to_json(facts)))
        with self._link.receiving_here():
            if self._link.closed:
                raise self._stopped()
            while not self._commits:
                if self._proposed_epoch > epoch:
                    raise EpochChanged(self._proposed_epoch, self._proposed_reason)
                self._receive_next(deadline_s, f"the commit of view {epoch} within {timeout_s:g} s")
            return self._take_commit()

    def sealed(self, record: SealedShard, copy_to: Iterable[int]) -> None:
        """An own snapshot is final; have the slots `copy_to` hold it.

        Slots of this node hold it from then on, whatever is sealed into it.
        """
        with self._changed:
            # A fresh set: after a roll-back the same step is sealed again, in a newer epoch, and
            # what was acknowledged of the older one says nothing about these bytes. Later steps
            # were sealed before that roll-back, and the one before the last is overwritten.
            earlier = [age for age in self._missing if age[1] < record.step]
            last = {age: self._missing[age] for age in earlier[-1:]}
            self._missing = {**last, record.age: set(copy_to)}
        self._link.send(said.Sealed(record=record, copy_to=tuple(copy_to)))

    def release(self, epoch: int) -> None:
        """Tell that all of `epoch` is sealed twice: what others sealed before it may go."""
        self._link.send(Settled(slot=self.slot, epoch=epoch))

    def wait_copied(self, step: int, timeout_s: float) -> None:
        """Wait until every target holds its copy of the own snapshot of `step`.

        Raises EpochChanged meanwhile, AgreementError where nothing of one moves for `timeout_s`.
        """
        began_s = time.monotonic()
        with self._changed:
            missing = next((who for age, who in self._missing.items() if age[1] == step), None)
            if missing is None:
                raise AgreementError(f"no snapshot of step {step} was sealed by worker {self.slot}")
            while missing:
                self.check()
                moved_s = {n: max(began_s, self._moving_s.get(n, 0.0)) for n in missing}
                late = min(moved_s, key=lambda slot: (moved_s[slot], slot))
                what = f"the copy of step {step} at worker {late}: nothing of it moved within"
                what += f" transfer_timeout_s ({timeout_s:g} s), by a broken or very slow network"
                self._wait(moved_s[late] + timeout_s, f"{what}; raise it, or lower snapshot_copies")

    def wait_started(self, timeout_s: float) -> None:
        """Wait until the own agent knows that every worker has sealed its first snapshot.

        A loss before that ends the job. Raises EpochChanged meanwhile, AgreementError when late.
        """
        deadline_s = time.monotonic() + timeout_s
        with self.progress_page.waiting(OUTSIDE), self._changed:
            while not self._started:
                self.check()
                self._wait(deadline_s, f"the first snapshots of all within {timeout_s:g} s")

    def await_proposal(self, timeout_s: float) -> NoReturn:
        """Wait for the next view to be proposed: raises EpochChanged, AgreementError when late."""
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while True:
                self.check()
                self._wait(deadline_s, f"a proposal of the next view within {timeout_s:g} s")

    def announce(self, phase: str | None) -> None:
        """Enter a phase (a save, an evaluation) that a proposal has to wait for; None ends it.

        While it lasts, at most ANNOUNCED_LIMIT_S after a proposal, the doorbell thread keeps the
        time to answer alive. An interpreter that is stuck cannot do that, and is fenced.
        """
        if phase is None:
            self.progress_page.end_announced()
        else:
            self.progress_page.announce(phase)
        self._keep_alive()

    def describe(self, layout: dict[str, Any]) -> None:
        """Tell the places of all workers.

        `elaswave status` shows them, and they say which workers the job cannot do without.
        """
        self._link.send(said.Layout(layout=layout))

    def tell_slow(self, slow: Mapping[int, str]) -> None:
        """Say which workers are slow, with the evidence, for `elaswave status`."""
        self._link.send(said.SlowSeen(slow=tuple(sorted(slow.items()))))

    def progress(self, text: str) -> None:
        """Say that work goes on: the deadline to answer a proposal starts again."""
        self._link.send(said.Progress(text=text))

    def replan(self, reason: str) -> None:
        """Ask for a view of the same members between two steps: facts name what it is for."""
        self._link.send(Replan(epoch=self._returned_epoch, reason=reason))

    def severed(self, epoch: int, evidence: str) -> None:
        """A link to another worker broke in this epoch while it was needed."""
        self._link.send(Severed(epoch=epoch, evidence=evidence))

    def leave(self, reason: str, *, returns: bool = False) -> None:
        """This worker goes, as planned: the others go on without it, and it may exit.

        `returns`: another is started in its place.
        """
        self._say_at_the_end(said.Leave(reason=reason, returns=returns))

    def finish(self, completed: int = 0) -> None:
        """Tell that the work is done after these steps: exit code 0 is no failure any more."""
        self._say_at_the_end(said.Finish(completed=completed))

    def _say_at_the_end(self, message: WireMessage) -> None:
        """Say what an exit may follow: the agent, or its next life, has it in the end."""
        self._link.send(message)
        self._say(message)

    # ---- inside -------------------------------------------------------------------------------

    def _take_commit(self) -> Commit:
        """The newest commit, with the views of those before it that were not taken."""
        path = tuple(view for commit in self._commits for view in commit.path)
        commit = self._commits[-1]
        self._commits.clear()
        self._returned_epoch = commit.view.epoch
        return Commit(view=commit.view, facts=commit.facts, inventory=commit.inventory, path=path)

    def _wait(self, deadline_s: float, what: str) -> None:
        """Wait for news; the condition is held. Raises JobStopped, or AgreementError when late."""
        if self._stop_reason is not None:
            raise self._stopped()
        left_s = deadline_s - time.monotonic()
        if left_s <= 0 or not self._changed.wait(left_s):
            raise AgreementError(f"worker {self.slot} did not get {what}")

    def _stopped(self) -> JobStopped:
        reason = self._stop_reason or "the agent is gone"
        return JobStopped(reason, exit_code=self._stop_code)

    def _ended(self, why: str) -> None:
        """Tell all that wait, here or for another worker, that nothing can come any more."""
        with self._changed:
            self._stop_reason = self._stop_reason or why
            self._changed.notify_all()
        self._on_propose(self._proposed_epoch + 1, self._stop_reason)

    def _receive_next(self, deadline_s: float, what: str) -> None:
        """Wait for news here. Raises JobStopped, or AgreementError when late."""
        if self._stop_reason is not None:
            raise self._stopped()
        if not self._link.receive(deadline_s - time.monotonic()):
            raise AgreementError(f"worker {self.slot} did not get {what}")

    def _sign_of_life_s(self) -> float | None:
        """Return how long the agent may hear nothing of this worker; None: for ever."""
        return self._answer_within_s / _SIGNS_OF_LIFE if self._awaited() else None

    def _awaited(self) -> bool:
        """Return whether a proposal is open that this worker has not answered."""
        return self._proposed_epoch > max(self._answered_epoch, self._returned_epoch)

    def _keep_alive(self) -> None:
        """Keep the time to answer alive where an announced phase is open, and not for too long."""
        phase = self.progress_page.announced
        if phase is None or not self._awaited():
            return
        if time.monotonic() < self._proposed_at_s + ANNOUNCED_LIMIT_S:
            # Where the agent is gone, the listening side says so.
            with contextlib.suppress(JobStopped):
                self.progress(phase)

    def _on_frame(self, frame: Frame) -> None:
        try:
            self._take(from_json(said.FromAgent, frame))
        except UnreadableMessageError as error:
            self._ended(f"the agent of worker {self.slot} {error}")

    def _take(self, message: said.FromAgent) -> None:
        match message:
            case Ring():
                if not self._can_wait(message):
                    self._interrupt(message)
            case Stop():
                self._stop_reason, self._stop_code = message.reason, message.exit_code
                self._on_propose(self._proposed_epoch + 1, message.reason)
            case _:
                with self._changed:
                    self._note(message)
        with self._changed:
            self._changed.notify_all()

    def _interrupt(self, proposal: Ring) -> None:
        epoch = proposal.ballot.epoch
        if not self._awaited():
            self._proposed_at_s = time.monotonic()
        self._answer_within_s = proposal.within_s
        # The flag before the bell: threads that the doorbell wakes must find it set.
        self._proposed_reason = proposal.reason
        self._proposed_epoch = epoch
        self._on_propose(epoch, proposal.reason)

    def _note(self, message: said.FromAgent) -> None:
        """Keep what a thread waits for; the condition is held."""
        match message:
            case Deliver():
                commit = _read_commit(message)
                if commit.view.epoch > self._told_epoch:
                    self._commits.append(commit)
                    self._told_epoch = commit.view.epoch
            case AllSealed():
                self._started = True
            case said.Copied():
                # Of the newest snapshot of its step, or of one that counts no more.
                self._missing.get((message.epoch, message.step), set()).discard(message.slot)
            case said.Copying():
                self._moving_s[message.slot] = time.monotonic()
            case said.StartDetached():
                self._detached = message
            case Notice():
                self.told_to_leave = True
            case said.CutsWanted():
                self.cuts_wanted = message.cuts

    def _can_wait(self, proposal: Ring) -> bool:
        """Decide whether a proposal waits for a boundary between steps, and note it for then.

        It does not wait where no step runs, nor where the others stand before one that has begun
        here.
        """
        epoch, before_step = proposal.ballot.epoch, proposal.before_step
        with self._changed:
            # A commit ends its proposal when it arrives: a thread that took it is in its recovery,
            # and waits there for this worker.
            settled = self._commits[-1].view.epoch if self._commits else self._returned_epoch
            idle = self._proposed_epoch > settled or not settled
            begun = before_step is not None and self._begun_step >= before_step
            if not proposal.boundary or idle or begun:
                return False
            self._boundary, self._before_step = (epoch, proposal.reason), before_step
            self._answer_within_s = proposal.within_s
            step = self._begun_step
            step = max(step, min((one for one in self._arrivals if one > step), default=0) - 1)
        if before_step is None:
            # Where the agent is gone, the listening side says so.
            with contextlib.suppress(JobStopped):
                self._link.send(Begun(ballot=proposal.ballot, step=step))
        return True


def _read_commit(message: Deliver) -> Commit:
    try:
        told = read_payload(message.committed.payload)
    except ValueError as error:
        raise UnreadableMessageError("deliver", f" with a payload: {error}") from error
    view = message.committed.proposal.view
    path = (*message.skipped, view)
    return Commit(view=view, facts=told.facts, inventory=told.inventory, path=path)
