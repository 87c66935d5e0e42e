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

from elaswave_plugin.core.admission import Applicant, Verdict, judge, next_incarnation
from elaswave_plugin.core.agreement_messages import (
    Accuse,
    Admit,
    AllSealed,
    Ballot,
    Begun,
    Committed,
    Done,
    Facts,
    FirstSeal,
    Inventory,
    Message,
    Notice,
    Prepare,
    Promise,
    Proposal,
    Propose,
    Quiesced,
    Ready,
    Refuse,
    Replan,
    Report,
    Settled,
    Severed,
    Starts,
    Stays,
    Stop,
    StopBefore,
    Welcome,
)
from elaswave_plugin.core.agreement_orders import (
    Connect,
    Deliver,
    Disconnect,
    Dismiss,
    Effect,
    Fence,
    Over,
    Ring,
)
from elaswave_plugin.core.agreement_wire import pack_payload
from elaswave_plugin.core.due import boundary_of, due_view
from elaswave_plugin.core.election import outcome_of
from elaswave_plugin.core.ending import EXIT_FAILED, ending_of
from elaswave_plugin.core.membership import MembershipView, WorkerId
from elaswave_plugin.core.own_trainer import OwnTrainer
from elaswave_plugin.core.patience import Patience
from elaswave_plugin.core.seats import Seats


class Agreement(OwnTrainer):
    """The state machine of one supervisor; `nodes[s]` is the node of slot s."""

    def __init__(self, *, slot: int, nodes: tuple[int, ...], patience: Patience) -> None:
        super().__init__(slot=slot, nodes=nodes, patience=patience)
        self._promised = Ballot(0, 0)
        self._accepted: Proposal | None = None
        self._leading = slot == 0
        self._must_propose = slot == 0
        self._election: Ballot | None = None
        self._promises: dict[int, Promise] = {}
        self._highest_epoch = 0
        self._applied_epoch = 0
        self._behind_epoch = 0
        self._open: Proposal | None = None
        self._known_to_open = (0, 0, 0, False)
        self._begun: dict[int, int] = {}
        self._stops_before: int | None = None
        self._dismissed = False
        self._outside: set[int] = set()
        self._answers: dict[int, Quiesced] = {}
        self._quorum_until_s: float | None = None

    @classmethod
    def of_newcomer(cls, welcome: Welcome, *, patience: Patience) -> Agreement:
        """The part of a supervisor that takes the place of a lost one, told what it has missed."""
        new = cls(slot=welcome.worker.slot, nodes=welcome.nodes, patience=patience)
        new._seats = Seats(welcome.nodes, welcome.lost)
        new.history = list(welcome.history)
        new.incarnation = welcome.worker.incarnation
        new._promised, new._accepted = welcome.ballot, welcome.accepted
        new._highest_epoch = max(welcome.ballot.epoch, new.committed.epoch)
        # Its trainer is told the whole history when it enters.
        new._applied_epoch = new.committed.epoch
        new._leading = new._must_propose = False
        new._reports.incarnations |= welcome.incarnations
        new._news.append(AllSealed())
        new._learn_news(new.slot, AllSealed(), 0.0)
        return new

    # ---- inputs -------------------------------------------------------------------------------

    def receive(self, sender: int, message: Message, now_s: float) -> None:
        """A message from the supervisor of slot `sender`."""
        if self.over or sender in self._seats.lost:
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
            case Admit():
                # One that the next leader does not know of is shut out by it.
                if message.ballot == self._promised:
                    self._seat(message)
            case Welcome():
                pass  # it is what a newcomer's part begins with
            case (
                Report()
                | Severed()
                | Replan()
                | FirstSeal()
                | Done()
                | Ready()
                | Notice()
                | Settled()
                | Starts()
            ):
                self._learn_news(sender, message, now_s)
            case Stays():
                self._forget_notice(message.worker)
            case Stop():
                self._stop(message.reason, message.exit_code)

    def lost(self, slot: int, evidence: str) -> None:
        """The supervisor of `slot` is gone (its link closed, or it was silent too long)."""
        if self.over or slot in self._seats.lost or slot == self.slot:
            return
        self._seats.lose(slot, evidence)
        self._forget(slot)
        # Only the leader kills: to the others a kill looks like a link that broke by itself, and
        # the leader has to know what was seen.
        leads = self.leader == self.slot
        if not leads:
            self._send(self.leader, Accuse(slot=slot, evidence=evidence))
        self._effects.append(Disconnect(slot=slot, kill=leads))

    def admit(self, applicant: Applicant) -> Verdict:
        """Another supervisor asks for a slot that has none; where it is let in, all are told."""
        if self.over:
            return Verdict(reason="the job is over")
        if not self._leading or self.leader != self.slot:
            return Verdict(reason="this one does not lead the job", later=True)
        verdict = judge(
            applicant,
            seats=self._seats,
            history=self.history,
            reports=self._reports,
            opened=self._open,
            settled=not self._must_propose,
        )
        if verdict.reason is None:
            self._let_in(applicant)
        return verdict

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

    def abandon(self, reason: str, exit_code: int) -> None:
        """The own trainer found that the job cannot go on: stop all of it."""
        self._stop(reason, exit_code)

    def deadline_s(self) -> float | None:
        """When `settle` has to be called although nothing happened."""
        severed = self._reports.severed
        renew_at_s = None if severed is None or not self._leading else severed[1]
        leave_at_s = self._reports.leave_at_s if self._leading else None
        deadlines = (self._fence_at_s, self._quorum_until_s, renew_at_s, leave_at_s)
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
            newer=tuple(view for view in self.history if view.epoch > message.epoch),
            accepted=self._accepted,
            lost=tuple(self._seats.lost),
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
        if me in proposal.view:
            self._effects.append(Deliver(committed=message, skipped=skipped))
        elif self._was_told_to_leave(me):
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

    def _forget(self, slot: int) -> None:
        """Nothing of a lost supervisor counts any more: the snapshots it listed went with it."""
        self._promises.pop(slot, None)
        self._answers.pop(slot, None)
        self._outside.discard(slot)

    # ---- as the leader ------------------------------------------------------------------------

    def _campaign(self, now_s: float) -> None:
        """Gather promises from every supervisor that is left, then lead."""
        if self._election is None:
            if not self._has_quorum(self._seats.living(), [self.committed], now_s):
                return
            epoch = max(self._highest_epoch, self._promised.epoch) + 1
            self._election = self._promised = Ballot(epoch, self.slot)
            self._promises = {}
            self._effects += [Disconnect(slot=slot, kill=True) for slot in self._seats.lost]
            lost = tuple(self._seats.lost)
            known = self.committed.epoch
            self._broadcast(Prepare(ballot=self._election, epoch=known, lost=lost))
        if all(slot in self._promises for slot in self._seats.living() if slot != self.slot):
            self._win(self._election, now_s)

    def _win(self, ballot: Ballot, now_s: float) -> None:
        promises = list(self._promises.values())
        self._learn_wishes(now_s)
        for sender, promise in self._promises.items():
            for news in promise.news:
                self._learn_news(sender, news, now_s)
        for promise in promises:
            for slot in promise.lost:
                self.lost(slot, "its link to another worker is gone")
        won = outcome_of(
            promises,
            applied_epoch=self._applied_epoch,
            accepted=self._accepted,
            committed=self.committed,
        )
        self._behind_epoch, self._must_propose = won.behind_epoch, won.must_propose
        self._learn(won.views)
        recent = [view for view in self.history if view.epoch >= self._behind_epoch]
        if not self._has_quorum(self._seats.living(), recent, now_s):
            return
        self._highest_epoch = max(ballot.epoch - 1, self.committed.epoch)
        self._election, self._leading, self._open = None, True, None
        self._note("leader_elected", epoch=ballot.epoch, by=self.slot)

    def _learn(self, views: Iterable[MembershipView]) -> None:
        self.history += [view for view in views if view.epoch > self.committed.epoch]

    def _lead(self, now_s: float) -> None:
        self._note_start()
        self._reports.pass_time(self.committed, now_s)
        if self._stop_if_decided():
            return
        # An answer to the open proposal changes nothing about it: with many workers, most are.
        severed = self._reports.severed
        is_severed = severed is not None and now_s >= severed[1]
        known = self._reports.changes, self._seats.changes, len(self._outside), is_severed
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
            lost=self._seats.lost,
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
        if not self._has_quorum(self._seats.living(), [self.committed], now_s):
            return
        ballot = Ballot(self._highest_epoch + 1, self.slot)
        proposal = Proposal(
            ballot=ballot,
            view=replace(target, epoch=ballot.epoch),
            lost=tuple(self._seats.lost),
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
        members = [slot for slot in self.committed.ranks if slot not in self._seats.lost]
        self._stops_before = boundary_of(members, self._answers, self._begun)
        if self._stops_before is not None:
            message = StopBefore(ballot=proposal.ballot, step=self._stops_before)
            self._broadcast(message)
            self._on_stop_before(message)

    def _commit_when_answered(self, proposal: Proposal, now_s: float) -> None:
        if not all(slot in self._answers for slot in self._seats.living()):
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

    def _let_in(self, applicant: Applicant) -> None:
        incarnation = next_incarnation(applicant.slot, self.history, self._reports)
        worker = WorkerId(slot=applicant.slot, incarnation=incarnation)
        message = Admit(
            ballot=self._promised,
            worker=worker,
            node=applicant.node,
            address=applicant.address,
        )
        self._broadcast(message)
        self._seat(message)
        welcome = Welcome(
            ballot=self._promised,
            worker=worker,
            nodes=self._seats.nodes,
            history=tuple(self.history),
            accepted=self._accepted,
            lost=dict(self._seats.lost),
            incarnations=dict(self._reports.incarnations),
        )
        self._send(worker.slot, welcome)
        self._note("supervisor_admitted", slot=worker.slot, node=applicant.node)

    def _seat(self, message: Admit) -> None:
        """A newcomer has a slot from now on, whatever this one knew of its predecessor."""
        worker = message.worker
        if worker.slot not in self._seats.lost:
            self._effects.append(Disconnect(slot=worker.slot, kill=False))
        self._forget(worker.slot)
        self._seats.take(worker.slot, message.node)
        self._reports.replaced(worker)
        connect = Connect(slot=worker.slot, node=message.node, address=message.address)
        self._effects.append(connect)

    def _has_quorum(
        self, slots: Iterable[int], views: Iterable[MembershipView], now_s: float
    ) -> bool:
        """Whether `slots` speak for a majority of every view's nodes; if not, wait, then stop."""
        short = self._seats.minority_in(slots, views)
        if short is None:
            self._quorum_until_s = None
            return True
        heard, of = sorted(self._seats.nodes_of(slots)), sorted(set(short.nodes))
        if self._quorum_until_s is None:
            self._quorum_until_s = now_s + self.patience.quorum_wait_s
            self._note("quorum_lost", nodes_heard=heard, of=of)
        elif now_s >= self._quorum_until_s:
            gone = sorted((s, why) for s, why in self._seats.lost.items() if s in short.ranks)
            causes = "; ".join(f"worker {slot}: {why}" for slot, why in gone)
            self._stop(
                f"only {len(heard)} of {len(of)} nodes can be reached, which is no majority "
                f"({causes})",
                EXIT_FAILED,
            )
        return False

    # ---- the end ------------------------------------------------------------------------------

    def _stop_if_decided(self) -> bool:
        """Stop the job where its end is due; true also while the last exits are awaited."""
        joined = any(answer.facts is not None for answer in self._answers.values())
        ending = ending_of(self.committed, self._reports, self._seats.lost, joined=joined)
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
