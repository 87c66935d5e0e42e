"""One supervisor's part in agreeing on the next view: inputs in, messages and orders out (pure).

The life of a proposal: `Propose` -> every trainer quiesces -> `Quiesced` -> `Committed`. A failure
while one is open supersedes it with a higher epoch. The leader is the lowest slot whose supervisor
lives. A new leader asks everybody (`Prepare`), needs a majority of the nodes, and builds on the
highest view that any of them accepted, since that one may have been committed somewhere.

Every supervisor calls the inputs as things happen and `settle` once after each batch of them;
several failures in one batch so become one proposal.

A failure cannot wait. Arrivals and departures can: their proposal waits for the trainers to come to
the next boundary between two steps: each says which step it has begun, and all stop before the
first that nobody has begun.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from elaswave_plugin.core.agreement_messages import (
    Accuse,
    AllSealed,
    Ballot,
    Begun,
    Committed,
    Deliver,
    Disconnect,
    Dismiss,
    Done,
    Effect,
    Facts,
    Fence,
    FirstSeal,
    Inventory,
    Message,
    News,
    Note,
    Notice,
    Over,
    Prepare,
    Promise,
    Proposal,
    Propose,
    Quiesced,
    Ready,
    Refuse,
    Report,
    Ring,
    Send,
    Settled,
    Severed,
    Stop,
    StopBefore,
    pack_payload,
)
from elaswave_plugin.core.due import boundary_of, due_view
from elaswave_plugin.core.ending import EXIT_FAILED, ending_of
from elaswave_plugin.core.membership import (
    Arrival,
    FailureEvent,
    MembershipView,
    WorkerId,
    first_view,
)
from elaswave_plugin.core.patience import Patience
from elaswave_plugin.core.reports import Reports


class Agreement:
    """The state machine of one supervisor; `nodes[s]` is the node of slot s."""

    def __init__(self, *, slot: int, nodes: tuple[int, ...], patience: Patience) -> None:
        self.slot = slot
        self.nodes = nodes
        self.patience = patience
        self.history = [first_view(nodes)]
        self.over = False
        self.incarnation = 0
        self._promised = Ballot(0, 0)
        self._accepted: Proposal | None = None
        self._lost: dict[int, str] = {}
        self._reports = Reports(link_grace_s=patience.link_grace_s)
        self._leading = slot == 0
        self._must_propose = slot == 0
        self._election: Ballot | None = None
        self._promises: dict[int, Promise] = {}
        self._highest_epoch = 0
        self._applied_epoch = 0
        self._behind_epoch = 0
        self._open: Proposal | None = None
        self._known_to_open = (0, 0)
        self._begun: dict[int, int] = {}
        self._stops_before: int | None = None
        self._dismissed = False
        self._outside: set[int] = set()
        self._answers: dict[int, Quiesced] = {}
        self._fence_at_s: float | None = None
        self._quorum_until_s: float | None = None
        self._news: list[News] = []
        self._effects: list[Effect] = []

    @property
    def committed(self) -> MembershipView:
        """The newest view known to be committed (epoch 0 before the first)."""
        return self.history[-1]

    @property
    def started(self) -> bool:
        """Whether every trainer has sealed its first snapshot."""
        return self._reports.started

    @property
    def leader(self) -> int:
        """The slot that leads as far as this supervisor can see."""
        return next(slot for slot in range(len(self.nodes)) if slot not in self._lost)

    # ---- inputs -------------------------------------------------------------------------------

    def receive(self, sender: int, message: Message, now_s: float) -> None:
        """A message from the supervisor of slot `sender`."""
        if self.over or sender in self._lost:
            return
        match message:
            case Prepare():
                self._on_prepare(sender, message)
            case Promise():
                if message.ballot == self._election:
                    self._promises[sender] = message
            case Propose():
                self._on_propose(sender, message.proposal, now_s)
            case Quiesced():
                self._take_answer(sender, message)
            case Begun():
                if self._open is not None and message.ballot == self._open.ballot:
                    self._begun[sender] = message.step
            case StopBefore():
                self._on_stop_before(message)
            case Committed():
                self._on_committed(message)
            case Refuse():
                self._on_refuse(message.promised)
            case Accuse():
                if self.leader == self.slot and message.slot != self.slot:
                    self.lost(message.slot, message.evidence)
            case AllSealed():
                self._news.append(message)
                self._learn_news(sender, message, now_s)
            case Report() | Severed() | FirstSeal() | Done() | Ready() | Notice() | Settled():
                self._learn_news(sender, message, now_s)
            case Stop():
                self._stop(message.reason, message.exit_code)

    def lost(self, slot: int, evidence: str) -> None:
        """The supervisor of `slot` is gone (its link closed, or it was silent too long)."""
        if self.over or slot in self._lost or slot == self.slot:
            return
        self._lost[slot] = evidence
        self._promises.pop(slot, None)
        # Nor does its answer count any more: the snapshots that it listed went with it.
        self._answers.pop(slot, None)
        self._outside.discard(slot)
        # Only the leader kills: to the others a kill looks like a link that broke by itself, and
        # the leader has to know what was seen.
        leads = self.leader == self.slot
        if not leads:
            self._send(self.leader, Accuse(slot=slot, evidence=evidence))
        self._effects.append(Disconnect(slot=slot, kill=leads))

    def quiesced(
        self,
        ballot: Ballot,
        facts: Facts | None,
        inventory: Inventory,
        *,
        entering: bool = False,
    ) -> None:
        """The own trainer has stopped for the proposal of `ballot` (facts None: there is none).

        `entering`: no view was delivered to it yet.
        """
        if self.over or self._accepted is None or self._accepted.ballot != ballot:
            return
        self._fence_at_s = None
        answer = Quiesced(ballot=ballot, facts=facts, inventory=inventory, entering=entering)
        if ballot.leader == self.slot:
            self._take_answer(self.slot, answer)
        else:
            self._send(ballot.leader, answer)

    def begun(self, ballot: Ballot, step: int) -> None:
        """The own trainer has begun `step`, and no other before `Ring` tells where all stop."""
        message = Begun(ballot=ballot, step=step)
        if ballot.leader == self.slot:
            self.receive(self.slot, message, 0.0)
        else:
            self._send(ballot.leader, message)

    def first_seal(self) -> None:
        """The own trainer has sealed its first snapshot."""
        if self.slot not in self._reports.sealed:
            self._tell_leader(FirstSeal(), 0.0)

    def progress(self, now_s: float) -> None:
        """The own trainer announced a phase: it gets the whole time again to answer a proposal."""
        if self._fence_at_s is not None:
            self._fence_at_s = now_s + self._answer_limit_s()

    def trainer_done(self, exit_code: int | None) -> None:
        """The own trainer finished its work, and with `exit_code` set, has exited too."""
        self._fence_at_s = None
        self._tell_leader(Done(exit_code=exit_code), 0.0)

    def trainer_failed(
        self, evidence: str, exit_code: int | None, now_s: float, *, kind: str = "exit"
    ) -> None:
        """The own trainer is gone; `exit_code` is None where a signal killed it, or it leaves."""
        self._fence_at_s = None
        self._tell_leader(
            Report(failure=self._own(kind, evidence, now_s), exit_code=exit_code), now_s
        )

    def trainer_starts(self, incarnation: int) -> None:
        """Another trainer has been started in the place of the one that failed."""
        self.incarnation = incarnation

    def trainer_ready(self, now_s: float) -> None:
        """The own trainer, a new incarnation, is built and waits to be let in."""
        worker = WorkerId(slot=self.slot, incarnation=self.incarnation)
        arrival = Arrival(worker=worker, node=self.nodes[self.slot])
        self._tell_leader(Ready(arrival=arrival), now_s)

    def give_notice(self, evidence: str, now_s: float) -> None:
        """The own trainer is to leave between two steps; `Dismiss` says when it may."""
        worker = WorkerId(slot=self.slot, incarnation=self.incarnation)
        self._tell_leader(Notice(worker=worker, evidence=evidence), now_s)

    def settled(self, epoch: int) -> None:
        """The own trainer needs nothing that was sealed before this epoch; who left may end."""
        left = (slot for slot in self._living() if slot not in self.committed.ranks)
        for slot in left:
            self._send(slot, Settled(epoch=epoch))

    def severed(self, epoch: int, evidence: str, now_s: float) -> None:
        """The own trainer's link to another one broke in this epoch while it was needed.

        Mostly that is how a death looks from afar, and news of it comes at once. Otherwise both
        live: the same workers get a new view, whose links are dialled anew, and redo the step.
        """
        self._tell_leader(Severed(epoch=epoch, evidence=evidence), now_s)

    def leave(self, evidence: str, now_s: float) -> None:
        """This worker is told to go (a signal): the others go on without it."""
        self._broadcast(Report(failure=self._own("leave", evidence, now_s), exit_code=None))
        self.over = True  # nobody asks this worker again: it tells all

    def abandon(self, reason: str, exit_code: int) -> None:
        """The own trainer found that the job cannot go on: stop all of it."""
        self._stop(reason, exit_code)

    def deadline_s(self) -> float | None:
        """When `settle` has to be called although nothing happened."""
        severed = self._reports.severed
        renew_at_s = None if severed is None or not self._leading else severed[1]
        deadlines = (self._fence_at_s, self._quorum_until_s, renew_at_s)
        times = [time_s for time_s in deadlines if time_s is not None]
        return min(times) if times and not self.over else None

    def settle(self, now_s: float) -> list[Effect]:
        """Act on all inputs since the last call; the orders to carry out, in order."""
        if not self.over:
            self._fence_when_due(now_s)
            if self.leader != self.slot:
                self._leading, self._election, self._open = False, None, None
            elif not self._leading:
                self._campaign(now_s)
            if self._leading and not self.over:
                self._lead(now_s)
            if self._dismissed and not self.over and self._reports.all_settled(self.committed):
                self.over = True
                self._effects.append(Over(reason="it left, as it was told to", exit_code=0))
        effects, self._effects = self._effects, []
        return effects

    # ---- as a member --------------------------------------------------------------------------

    def _on_prepare(self, sender: int, message: Prepare) -> None:
        if message.ballot <= self._promised:
            self._send(sender, Refuse(promised=self._promised))
            return
        self._promised = message.ballot
        self._leading, self._election, self._open = False, None, None
        if self._shut_out(message.lost):
            return
        promise = Promise(
            ballot=message.ballot,
            applied_epoch=self._applied_epoch,
            history=tuple(self.history),
            accepted=self._accepted,
            lost=tuple(self._lost),
            news=tuple(self._news),
        )
        self._send(sender, promise)

    def _on_propose(self, sender: int, proposal: Proposal, now_s: float) -> None:
        ballot = proposal.ballot
        # A change of leader goes through `Prepare`; only then can it know what was accepted before.
        if ballot < self._promised or ballot.leader != self._promised.leader:
            self._send(sender, Refuse(promised=self._promised))
            return
        if not self._shut_out(proposal.lost):
            self._accept(proposal, now_s)

    def _accept(self, proposal: Proposal, now_s: float) -> None:
        self._promised = proposal.ballot
        self._accepted = proposal
        self._highest_epoch = max(self._highest_epoch, proposal.ballot.epoch)
        ring = Ring(ballot=proposal.ballot, reason=proposal.view.reason, boundary=proposal.boundary)
        me = WorkerId(slot=self.slot, incarnation=self.incarnation)
        lives = me not in self._reports.failures and self.slot not in self._reports.done
        # A boundary may be far: who never comes to it hangs, which is found elsewhere.
        waits = lives and self.slot in proposal.view.ranks and not proposal.boundary
        self._fence_at_s = now_s + self._answer_limit_s() if waits else None
        self._effects.append(ring)

    def _on_stop_before(self, message: StopBefore) -> None:
        accepted = self._accepted
        if accepted is not None and accepted.ballot == message.ballot:
            ring = Ring(ballot=accepted.ballot, reason=accepted.view.reason, boundary=True)
            self._effects.append(replace(ring, before_step=message.step))

    def _answer_limit_s(self) -> float:
        first = self.committed.epoch == 0
        return self.patience.join_timeout_s if first else self.patience.quiesce_timeout_s

    def _fence_when_due(self, now_s: float) -> None:
        if self._fence_at_s is None or now_s < self._fence_at_s or self._accepted is None:
            return
        self._fence_at_s = None
        epoch = self._accepted.ballot.epoch
        limit_s = f"{self._answer_limit_s():g} s"
        if self.committed.epoch == 0:
            self._effects.append(Fence(evidence=f"did not join the job within {limit_s}"))
        else:
            evidence = f"did not answer the proposal of epoch {epoch} within {limit_s}"
            self._effects.append(Fence(evidence=evidence))

    def _on_committed(self, message: Committed) -> None:
        proposal = message.proposal
        if proposal.ballot != self._promised or proposal.view.epoch <= self.committed.epoch:
            return
        self._learn(proposal.lineage)
        # Not only what is new to us: a leader knows adopted views that its trainer was never told.
        skipped = tuple(view for view in self.history if view.epoch > self._applied_epoch)
        self.history.append(proposal.view)
        self._reports.entered(proposal.view)
        self._applied_epoch = proposal.view.epoch
        me = WorkerId(slot=self.slot, incarnation=self.incarnation)
        if me in proposal.view.workers:
            self._effects.append(Deliver(committed=message, skipped=skipped))
        elif me in self._reports.notices:
            self._dismissed = True
            self._effects.append(Dismiss())

    def _on_refuse(self, promised: Ballot) -> None:
        if promised > self._promised:
            self._promised = promised
            self._leading, self._election, self._open = False, None, None

    def _shut_out(self, lost: Iterable[int]) -> bool:
        """Take over the losses that a leader declares; true if it is this worker that is lost."""
        for slot in lost:
            self.lost(slot, "declared lost by the leader")
        if self.slot in lost:
            self._stop("this worker was declared lost by the others", EXIT_FAILED, tell=False)
        return self.slot in lost

    def _own(self, kind: str, evidence: str, now_s: float) -> FailureEvent:
        return FailureEvent(
            kind=kind,
            slot=self.slot,
            detected_at_s=now_s,
            evidence=evidence,
            incarnation=self.incarnation,
        )

    def _learn_news(self, slot: int, news: News, now_s: float) -> None:
        self._reports.learn(slot, news, epoch=self.committed.epoch, now_s=now_s)

    def _tell_leader(self, news: News, now_s: float) -> None:
        """Only the leader acts on it; the next one is told with the promise that elects it."""
        self._news.append(news)
        self._learn_news(self.slot, news, now_s)
        if self.leader != self.slot:
            self._send(self.leader, news)

    # ---- as the leader ------------------------------------------------------------------------

    def _campaign(self, now_s: float) -> None:
        """Gather promises from every supervisor that is left, then lead."""
        if self._election is None:
            if not self._has_quorum(self._living(), [self.committed], now_s):
                return
            epoch = max(self._highest_epoch, self._promised.epoch) + 1
            self._election = self._promised = Ballot(epoch, self.slot)
            self._promises = {}
            self._effects += [Disconnect(slot=slot, kill=True) for slot in self._lost]
            self._broadcast(Prepare(ballot=self._election, lost=tuple(self._lost)))
        if all(slot in self._promises for slot in self._living() if slot != self.slot):
            self._win(self._election, now_s)

    def _win(self, ballot: Ballot, now_s: float) -> None:
        promises = list(self._promises.values())
        for sender, promise in self._promises.items():
            for news in promise.news:
                self._learn_news(sender, news, now_s)
        for promise in promises:
            for slot in promise.lost:
                self.lost(slot, "its link to another worker is gone")
        self._behind_epoch = min([self._applied_epoch, *(p.applied_epoch for p in promises)])
        best = max(promises, key=lambda promise: promise.history[-1].epoch, default=None)
        if best is not None:
            self._learn(best.history)
        proposals = [p.accepted for p in promises if p.accepted is not None]
        if self._accepted is not None:
            proposals.append(self._accepted)
        accepted = max(proposals, key=lambda proposal: proposal.ballot, default=None)
        accepted_epoch = 0 if accepted is None else accepted.ballot.epoch
        self._must_propose = accepted_epoch > self._behind_epoch or self.committed.epoch == 0
        if accepted is not None:
            self._learn([*accepted.lineage, accepted.view])
        recent = [view for view in self.history if view.epoch >= self._behind_epoch]
        if not self._has_quorum(self._living(), recent, now_s):
            return
        self._highest_epoch = max(ballot.epoch - 1, self.committed.epoch)
        self._election, self._leading, self._open = None, True, None
        self._note("leader_elected", epoch=ballot.epoch, by=self.slot)

    def _learn(self, views: Iterable[MembershipView]) -> None:
        self.history += [view for view in views if view.epoch > self.committed.epoch]

    def _lead(self, now_s: float) -> None:
        self._note_start()
        if self._stop_if_decided():
            return
        # An answer to the open proposal changes nothing about it: with many workers, most are.
        known = self._reports.changes, len(self._lost) + len(self._outside)
        if self._open is None or known != self._known_to_open:
            self._known_to_open = known
            self._propose_what_is_due(now_s)
        if self._open is not None:
            self._name_the_boundary(self._open)
            self._commit_when_answered(self._open, now_s)

    def _propose_what_is_due(self, now_s: float) -> None:
        opened = self._open
        due = due_view(
            self.committed,
            opened,
            self._reports,
            lost=self._lost,
            outside=self._outside,
            must_propose=self._must_propose,
            now_s=now_s,
        )
        if due is None:
            self._open = None
        elif opened is None or (opened.view.workers, opened.boundary) != (
            due.view.workers,
            due.boundary,
        ):
            self._propose(due.view, now_s, boundary=due.boundary)

    def _propose(self, target: MembershipView, now_s: float, *, boundary: bool) -> None:
        self._open, self._begun, self._stops_before = None, {}, None
        if not self._has_quorum(self._living(), [self.committed], now_s):
            return
        ballot = Ballot(self._highest_epoch + 1, self.slot)
        proposal = Proposal(
            ballot=ballot,
            view=replace(target, epoch=ballot.epoch),
            lost=tuple(self._lost),
            lineage=tuple(view for view in self.history if view.epoch > self._behind_epoch),
            boundary=boundary,
        )
        self._open, self._answers = proposal, {}
        self._broadcast(Propose(proposal=proposal))
        self._note("view_proposed", epoch=ballot.epoch, reason=proposal.view.reason)
        self._accept(proposal, now_s)

    def _take_answer(self, sender: int, answer: Quiesced) -> None:
        if self._open is None or answer.ballot != self._open.ballot:
            return
        self._answers[sender] = answer
        if answer.entering and self._reports.started and not self._open.boundary:
            self._outside.add(sender)

    def _name_the_boundary(self, proposal: Proposal) -> None:
        """Once it is known how far each member is, all learn before which step they stop."""
        if not proposal.boundary or self._stops_before is not None:
            return
        members = [slot for slot in self.committed.ranks if slot not in self._lost]
        self._stops_before = boundary_of(members, self._answers, self._begun)
        if self._stops_before is not None:
            message = StopBefore(ballot=proposal.ballot, step=self._stops_before)
            self._broadcast(message)
            self._on_stop_before(message)

    def _commit_when_answered(self, proposal: Proposal, now_s: float) -> None:
        if not all(slot in self._answers for slot in self._living()):
            return
        facts: dict[int, Facts] = {}
        for slot in proposal.view.ranks:
            answer = self._answers[slot].facts
            if answer is None:
                return  # its trainer is gone or done: that report supersedes this proposal
            facts[slot] = answer
        if not self._has_quorum(self._answers, [self.committed], now_s):
            return
        inventory = [
            record for slot in sorted(self._answers) for record in self._answers[slot].inventory
        ]
        committed = Committed(proposal=proposal, payload=pack_payload(facts, inventory))
        self._open, self._must_propose = None, False
        self._outside.clear()
        self._behind_epoch = proposal.view.epoch
        self._broadcast(committed)
        self._note(
            "view_committed",
            epoch=proposal.view.epoch,
            ranks=list(proposal.view.ranks),
            reason=proposal.view.reason,
            by=self.slot,
        )
        self._on_committed(committed)

    def _has_quorum(
        self, slots: Iterable[int], views: Iterable[MembershipView], now_s: float
    ) -> bool:
        """Whether `slots` speak for a majority of every view's nodes; if not, wait, then stop."""
        heard = {self.nodes[slot] for slot in slots}
        short = [view for view in views if 2 * len(heard & set(view.nodes)) <= len(set(view.nodes))]
        if not short:
            self._quorum_until_s = None
            return True
        if self._quorum_until_s is None:
            self._quorum_until_s = now_s + self.patience.quorum_wait_s
            self._note("quorum_lost", nodes_heard=sorted(heard), of=sorted(set(short[0].nodes)))
        elif now_s >= self._quorum_until_s:
            of = len(set(short[0].nodes))
            causes = "; ".join(f"worker {s}: {self._lost[s]}" for s in sorted(self._lost))
            self._stop(
                f"only {len(heard)} of {of} nodes can be reached, which is no majority ({causes})",
                EXIT_FAILED,
            )
        return False

    # ---- the end ------------------------------------------------------------------------------

    def _stop_if_decided(self) -> bool:
        """Stop the job where its end is due; true also while the last exits are awaited."""
        joined = any(answer.facts is not None for answer in self._answers.values())
        ending = ending_of(self.committed, self._reports, self._lost, joined=joined)
        if ending is not None and ending.reason is not None:
            self._stop(ending.reason, ending.exit_code)
        return ending is not None

    def _note_start(self) -> None:
        """Before every worker in the view has sealed something, it could not be replaced."""
        view, reports = self.committed, self._reports
        if not reports.started and view.epoch > 0 and reports.sealed.issuperset(view.ranks):
            reports.started = True
            self._news.append(AllSealed())
            self._broadcast(AllSealed())

    def _stop(self, reason: str, exit_code: int, *, tell: bool = True) -> None:
        if self.over:
            return
        if tell:
            self._broadcast(Stop(reason=reason, exit_code=exit_code))
        if not tell:
            self._note("shut_out", slot=self.slot, reason=reason)
        elif self.leader == self.slot:
            self._note("job_over", reason=reason, exit_code=exit_code)
        self.over = True
        self._effects.append(Over(reason=reason, exit_code=exit_code))

    # ---- sending ------------------------------------------------------------------------------

    def _living(self) -> list[int]:
        return [slot for slot in range(len(self.nodes)) if slot not in self._lost]

    def _send(self, to: int, message: Message) -> None:
        self._effects.append(Send(to=to, message=message))

    def _broadcast(self, message: Message) -> None:
        self._effects += [Send(to=s, message=message) for s in self._living() if s != self.slot]

    def _note(self, kind: str, **fields: object) -> None:
        self._effects.append(Note(kind=kind, fields=fields))
