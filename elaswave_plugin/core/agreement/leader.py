"""One supervisor's part in agreeing on the next view: inputs in, messages and orders out (pure).

The life of a proposal: `Propose` -> every trainer quiesces -> `Quiesced` -> `Committed`. A failure
while one is open supersedes it with a higher epoch. The leader is the lowest slot whose supervisor
lives. A new leader asks every supervisor (`Prepare`). Each answers once it hears no living
supervisor of a lower slot. The leader needs a majority of the nodes. It builds on the highest view
that any of them accepted, since that one may have been committed somewhere. docs/inside.md
says why no two views of an epoch are ever committed.

Every supervisor calls the inputs as things happen and `settle` once after each batch of them;
so several failures in one batch become one proposal.

A failure cannot wait. Arrivals and departures can: their proposal waits for the trainers to reach
the next boundary between two steps. Each says which step it has begun, and all stop before the
first step that none has begun.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, replace

from elaswave_plugin.core.agreement.acceptor import Acceptor
from elaswave_plugin.core.agreement.effects import (
    Connect,
    Disconnect,
    Effect,
    Over,
)
from elaswave_plugin.core.agreement.election import outcome_of
from elaswave_plugin.core.agreement.job_end import ending_of, no_quorum
from elaswave_plugin.core.agreement.join_rule import Admission, Applicant, judge, next_incarnation
from elaswave_plugin.core.agreement.messages import (
    Accuse,
    Admit,
    AllSealed,
    Ballot,
    Begun,
    Committed,
    Detached,
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
from elaswave_plugin.core.agreement.next_view import boundary_of, find_next_view
from elaswave_plugin.core.agreement.quorum import Supervisors
from elaswave_plugin.core.agreement.timeouts import Timeouts
from elaswave_plugin.core.agreement.view import MembershipView, WorkerId
from elaswave_plugin.core.layout.worker_facts import pack_payload
from elaswave_plugin.errors import EXIT_FAILED, EXIT_LEFT_OUT

_YIELD_S = 1.0


class Agreement(Acceptor):
    """The state machine of one supervisor; `nodes[s]` is the node of slot s."""

    def __init__(
        self, *, slot: int, nodes: tuple[int, ...], timeouts: Timeouts, life: int = 0
    ) -> None:
        """`life`: a number that no other supervisor of this slot has had; 0 at the launch."""
        super().__init__(slot=slot, nodes=nodes, timeouts=timeouts)
        self._life = life
        self._elected = self.memory.promised if slot == 0 else None
        self._must_propose = slot == 0
        self._yields_until_s: float | None = None
        self._election: Ballot | None = None
        self._promises: dict[int, Promise] = {}
        self._common_epoch = 0
        self._open: Proposal | None = None
        self._known_to_open = (0, 0, 0, False)
        self._begun: dict[int, int] = {}
        self._stops_before: int | None = None
        self._outside: set[int] = set()
        self._answers: dict[int, Quiesced] = {}
        self._quorum_until_s: float | None = None

    @classmethod
    def of_newcomer(cls, welcome: Welcome, *, timeouts: Timeouts, life: int) -> Agreement:
        """Create the part of a supervisor that replaces a lost one, from what it has missed."""
        new = cls(slot=welcome.worker.slot, nodes=welcome.nodes, timeouts=timeouts, life=life)
        new._supervisors = Supervisors(welcome.nodes, welcome.lost, unused_node=welcome.unused_node)
        new.history = list(welcome.history)
        new.incarnation = welcome.worker.incarnation
        new._sure_epoch = new._known_epoch = new.committed.epoch
        if welcome.accepted is not None:
            new.memory = new.memory.accepting(
                welcome.accepted, new.history, known_epoch=new.committed.epoch
            )
        new.memory = new.memory.promising(welcome.ballot)
        new._highest_epoch = max(welcome.ballot.epoch, new.committed.epoch)
        # Its trainer is told the whole history when it enters.
        new._applied_epoch = new.committed.epoch
        new._elected, new._must_propose = None, False
        new._reports.incarnations |= welcome.incarnations
        new._news.append(AllSealed())
        new._learn_news(new.slot, AllSealed(), 0.0)
        return new

    @property
    def leads(self) -> bool:
        """True if it was elected and knows of no later leader."""
        return self._elected is not None and self.leader == self.slot

    def votes(self, message: Message | None = None) -> bool:
        """Return whether to receive this (None: to settle) may use or change the node's memory.

        If so, it has to recall that memory first, and the node has to store `memory` after it,
        before any effect is carried out. None of its other supervisors may vote in between.
        """
        if message is None:
            return self.leader == self.slot or self.leader in self._early
        return isinstance(message, Prepare | Propose | Admit)

    # ---- inputs -------------------------------------------------------------------------------

    def receive(self, sender: int, message: Message, now_s: float) -> None:
        """Take a message from the supervisor of slot `sender`."""
        if self.over or sender in self._supervisors.lost:
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
                self._on_refuse(message.promised, now_s)
            case Accuse():
                if self.leader == self.slot and message.slot != self.slot:
                    self.lost(message.slot, message.evidence)
            case AllSealed():
                self._news.append(message)
                self._learn_news(sender, message, now_s)
            case Admit():
                # The next leader shuts out a newcomer of which it does not know.
                if message.ballot.is_in_term_of(self.memory.promised):
                    self._give_slot(message)
            case Welcome():
                pass  # a newcomer's part is created from it
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
            case Detached():
                self._note_detached(sender, message)
            case Stays():
                self._forget_notice(message.worker)
            case Stop():
                self._on_stop(sender, message)

    def lost(self, slot: int, evidence: str) -> None:
        """Note that the supervisor of `slot` is gone (its link closed, or it was silent)."""
        if self.over or slot in self._supervisors.lost or slot == self.slot:
            return
        self._supervisors.lose(slot, evidence)
        self._forget(slot)
        # Only the leader kills: to the others a kill looks like a link that broke by itself, and
        # the leader has to know what was seen. Before it is elected, the other one may be right.
        if self.leader != self.slot:
            self._send(self.leader, Accuse(slot=slot, evidence=evidence))
        self._effects.append(Disconnect(slot=slot, kill=self.leads))

    def admit(self, applicant: Applicant) -> Admission:
        """Decide on a supervisor that asks for a vacant slot; if it is let in, tell all others."""
        if self.over:
            return Admission(reason="the job is over")
        if not self.leads:
            return Admission(reason="this one does not lead the job", later=True)
        verdict = judge(
            applicant,
            supervisors=self._supervisors,
            view=self.committed,
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
        """Note that the own trainer has stopped for the proposal of `ballot`; no facts: no trainer.

        `entering`: no view was delivered to it yet.
        """
        if self.over or self._accepted is None or self._accepted.ballot != ballot:
            return
        self._fence_at_s = None
        self._detached = self._detached and facts is None
        answer = Quiesced(ballot=ballot, facts=facts, inventory=inventory, entering=entering)
        if ballot.leader == self.slot:
            self._take_answer(self.slot, answer)
        else:
            self._send(ballot.leader, answer)

    def begun(self, ballot: Ballot, step: int) -> None:
        """Note that the own trainer is in `step`, and stops after it until `Ring` says where."""
        message = Begun(ballot=ballot, step=step)
        if ballot.leader == self.slot:
            self.receive(self.slot, message, 0.0)
        else:
            self._send(ballot.leader, message)

    def detached(self, message: Detached) -> None:
        """Note that the own trainer works outside the job; the leader reports this once for all."""
        if self._detached:
            return
        self._detached, self._fence_at_s = True, None
        if self.leader == self.slot:
            self._note_detached(self.slot, message)
        else:
            self._send(self.leader, message)

    def _note_detached(self, slot: int, message: Detached) -> None:
        if self._reports.lacking is None:
            self._reports.lacking = message.missing
            self._note("detached", slot=slot, trains=message.trains, missing=message.missing)

    def abandon(self, reason: str, exit_code: int) -> None:
        """Stop the whole job: the own trainer found that it cannot go on."""
        self._stop(reason, exit_code)

    def deadline_s(self) -> float | None:
        """Return when `settle` has to be called although nothing happened; None: never."""
        severed = self._reports.severed
        renew_at_s = None if severed is None or not self.leads else severed[1]
        leave_at_s = self._reports.leave_at_s if self.leads else None
        waits_s = self._quorum_until_s, self._yields_until_s
        deadlines = (self._fence_at_s, *waits_s, renew_at_s, leave_at_s)
        times = [time_s for time_s in deadlines if time_s is not None]
        return min(times) if times and not self.over else None

    def settle(self, now_s: float) -> list[Effect]:
        """Act on all inputs since the last call; return the orders to carry out, in order."""
        if not self.over:
            self._fence_when_due(now_s)
            self._answer_who_leads_now()
            if self.leader != self.slot:
                self._step_down()
            elif not self.leads:
                self._campaign(now_s)
            if self.leads and not self.over:
                self._lead(now_s)
            if self._dismissed and not self.over and self._reports.all_settled(self.committed):
                self.over = True
                self._effects.append(Over(reason="it left, as it was told to", exit_code=0))
        effects, self._effects = self._effects, []
        return effects

    # ---- who leads ----------------------------------------------------------------------------

    def _on_refuse(self, promised: Ballot, now_s: float) -> None:
        if promised > self.memory.promised:
            self._highest_epoch = max(self._highest_epoch, promised.epoch)
            self._step_down(promised, now_s)

    def _step_down(self, promised: Ballot | None = None, now_s: float = 0.0) -> None:
        """Stop leading, or trying to lead; what it adopted may be wrong.

        `promised`: a higher ballot, for which it was refused. It may be elected again with a still
        higher one, at once if its slot is lower: so one of two candidates waits.
        """
        stood = self._elected is not None or self._election is not None
        if promised is None:
            self._yields_until_s = None
        elif stood and promised.leader < self.slot:
            self._yields_until_s = now_s + _YIELD_S
        if stood:
            self._elected = self._election = self._open = None
            self._drop_adopted()

    def _drop_adopted(self) -> None:
        self.history = [view for view in self.history if view.epoch <= self._sure_epoch]

    def _shut_out(self, lost: Iterable[int]) -> bool:
        """Take over the losses that a leader declares; true if it is this worker that is lost."""
        for slot in lost:
            self.lost(slot, "declared lost by the leader")
        if self.slot in lost:
            self._end_alone("this worker was declared lost by the others")
        return self.slot in lost

    def _forget(self, slot: int) -> None:
        """Drop all answers of a lost supervisor: the snapshots it listed went with it."""
        self._promises.pop(slot, None)
        self._early.pop(slot, None)
        self._answers.pop(slot, None)
        self._outside.discard(slot)

    # ---- as the leader ------------------------------------------------------------------------

    def _campaign(self, now_s: float) -> None:
        """Gather promises from every living supervisor, then lead."""
        if self._yields_until_s is not None and now_s < self._yields_until_s:
            return
        self._yields_until_s = None
        if self._election is None:
            if self._is_left_behind():
                return
            self._learn(self.memory.before)
            self._sure_epoch = self.committed.epoch
            if not self._has_quorum(self._supervisors.living(), [self.committed], now_s):
                return
            term = max(self._highest_epoch, self.memory.promised.epoch) + 1
            own = Ballot(term=term, leader=self.slot, life=self._life, epoch=term)
            self._election, self.memory = own, self.memory.promising(own)
            self._promises = {}
            lost = tuple(self._supervisors.lost)
            known = self.committed.epoch
            self._broadcast(Prepare(ballot=self._election, epoch=known, lost=lost))
        if all(slot in self._promises for slot in self._supervisors.living() if slot != self.slot):
            self._win(self._election, now_s)

    def _win(self, ballot: Ballot, now_s: float) -> None:
        promises = list(self._promises.values())
        self._drop_adopted()
        self._learn_drain_requests(now_s)
        for sender, promise in self._promises.items():
            for news in promise.news:
                self._learn_news(sender, news, now_s)
        for promise in promises:
            for slot in promise.lost:
                self.lost(slot, "its link to another worker is gone")
        won = outcome_of(
            promises,
            applied_epoch=self._applied_epoch,
            asked_epoch=self._asked_epoch,
            accepted=self.memory.accepted,
            committed=self.committed,
        )
        if self._shut_out(won.lost):
            return
        self._common_epoch, self._must_propose = won.common_epoch, won.must_propose
        self._learn(won.missed)
        self._sure_epoch = self.committed.epoch
        self._learn(won.adopted)
        recent = [view for view in self.history if view.epoch >= self._common_epoch]
        if not self._has_quorum(self._supervisors.living(), recent, now_s):
            return
        self._highest_epoch = max(ballot.epoch - 1, self.committed.epoch, won.asked_epoch)
        self._election, self._elected, self._open = None, ballot, None
        self._quorum_until_s = None
        self._effects += [Disconnect(slot=slot, kill=True) for slot in self._supervisors.lost]
        self._note("leader_elected", epoch=ballot.epoch, by=self.slot)

    @property
    def _bases(self) -> list[MembershipView]:
        """The views of which a new one needs a majority: the newest sure one and all adopted on it.

        The adopted ones are committed with the new view and not before.
        """
        return [view for view in self.history if view.epoch >= self._sure_epoch]

    def _lead(self, now_s: float) -> None:
        self._note_start()
        for worker, raised in self._reports.untold():
            self._note("worker_raised", **asdict(worker), **asdict(raised))
        self._reports.pass_time(self.committed, now_s)
        if self._stop_if_decided():
            return
        # An answer to the open proposal changes nothing about it; with many workers, most inputs
        # are such answers.
        severed = self._reports.severed
        is_severed = severed is not None and now_s >= severed[1]
        known = self._reports.changes, self._supervisors.changes, len(self._outside), is_severed
        if self._open is None or known != self._known_to_open:
            self._known_to_open = known
            self._keep_who_is_needed(None if self._open is None else self._open.view)
            self._propose_what_is_due(now_s)
        if self._open is not None:
            self._name_the_boundary(self._open)
            self._commit_when_answered(self._open, now_s)

    def _propose_what_is_due(self, now_s: float) -> None:
        opened = self._open
        due = find_next_view(
            self.committed,
            opened,
            self._reports,
            lost=self._supervisors.lost,
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
        if not self._has_quorum(self._supervisors.living(), self._bases, now_s):
            return
        assert self._elected is not None
        ballot = replace(self._elected, epoch=self._highest_epoch + 1)
        proposal = Proposal(
            ballot=ballot,
            view=replace(target, epoch=ballot.epoch),
            lost=tuple(self._supervisors.lost),
            lineage=tuple(view for view in self.history if view.epoch > self._common_epoch),
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
        """Tell all before which step they stop, once the progress of each member is known."""
        if not proposal.boundary or self._stops_before is not None:
            return
        members = [slot for slot in self.committed.ranks if slot not in self._supervisors.lost]
        self._stops_before = boundary_of(members, self._answers, self._begun)
        if self._stops_before is not None:
            message = StopBefore(ballot=proposal.ballot, step=self._stops_before)
            self._broadcast(message)
            self._on_stop_before(message)

    def _commit_when_answered(self, proposal: Proposal, now_s: float) -> None:
        if not all(slot in self._answers for slot in self._supervisors.living()):
            return
        facts: dict[int, Facts] = {}
        for slot in proposal.view.ranks:
            answer = self._answers[slot].facts
            if answer is None:
                return  # its trainer is gone or done, and that report supersedes this proposal
            facts[slot] = answer
        if not self._has_quorum(self._answers, self._bases, now_s):
            return
        inventory = [
            record for slot in sorted(self._answers) for record in self._answers[slot].inventory
        ]
        committed = Committed(proposal=proposal, payload=pack_payload(facts, inventory))
        self._open, self._must_propose = None, False
        self._outside.clear()
        self._common_epoch = proposal.view.epoch
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
            ballot=self.memory.promised,
            worker=worker,
            node=applicant.node,
            address=applicant.address,
        )
        self._broadcast(message)
        self._give_slot(message)
        welcome = Welcome(
            ballot=self.memory.promised,
            worker=worker,
            nodes=self._supervisors.nodes,
            history=tuple(self.history),
            accepted=self.memory.accepted,
            lost=dict(self._supervisors.lost),
            incarnations=dict(self._reports.incarnations),
            unused_node=self.unused_node,
        )
        self._send(worker.slot, welcome)
        self._note("supervisor_admitted", slot=worker.slot, node=applicant.node)

    def _give_slot(self, message: Admit) -> None:
        """Give a slot to a newcomer, whatever was known of its predecessor."""
        worker = message.worker
        if worker.slot not in self._supervisors.lost:
            self._effects.append(Disconnect(slot=worker.slot, kill=False))
        self._forget(worker.slot)
        self._supervisors.take(worker.slot, message.node)
        self._reports.replaced(worker)
        connect = Connect(slot=worker.slot, node=message.node, address=message.address)
        self._effects.append(connect)

    def _has_quorum(
        self, slots: Iterable[int], views: Iterable[MembershipView], now_s: float
    ) -> bool:
        """Return whether `slots` are a majority of every view's nodes; if not, wait, then stop."""
        short = self._supervisors.minority_in(slots, views)
        if short is None:
            if self._elected is not None:
                self._quorum_until_s = None
            return True
        of = sorted(set(short.nodes))
        heard = sorted(self._supervisors.nodes_of(slots).intersection(of))
        if self._quorum_until_s is None:
            self._quorum_until_s = now_s + self.timeouts.quorum_wait_s
            self._note("quorum_lost", nodes_heard=heard, of=of)
        elif now_s >= self._quorum_until_s:
            gone = sorted((s, why) for s, why in self._supervisors.lost.items() if s in short.ranks)
            causes = "; ".join(f"worker {slot}: {why}" for slot, why in gone)
            self._stop(no_quorum(len(heard), len(of), causes), EXIT_FAILED, part=True)
        return False

    # ---- the end ------------------------------------------------------------------------------

    def _stop_if_decided(self) -> bool:
        """Stop the job if its end is due; return true also while the last exits are awaited."""
        joined = any(answer.facts is not None for answer in self._answers.values())
        lost, layout = self._supervisors.lost, self.layout
        ending = ending_of(self.committed, self._reports, lost, joined=joined, layout=layout)
        if ending is not None and ending.reason is not None:
            self._stop(ending.reason, ending.exit_code)
        return ending is not None

    def _note_start(self) -> None:
        """Declare the job started once all workers have sealed; before, none can be replaced."""
        view, reports = self.committed, self._reports
        if not reports.started and view.epoch > 0 and reports.sealed.issuperset(view.ranks):
            reports.started = True
            self._news.append(AllSealed())
            self._broadcast(AllSealed())

    def _stop(self, reason: str, exit_code: int, *, part: bool = False) -> None:
        """End the job, or, with `part`, only the supervisors that follow this one."""
        if self.over:
            return
        self._broadcast(Stop(reason=reason, exit_code=exit_code, part=part))
        if self.leader == self.slot:
            self._note("job_over", reason=reason, exit_code=exit_code)
        self._end(reason, EXIT_LEFT_OUT if part else exit_code)

    def _on_stop(self, sender: int, message: Stop) -> None:
        if message.part and sender != self.leader:
            return  # other parts may go on, and this supervisor with them
        nodes, own = self._supervisors.nodes, self._supervisors.nodes[self.slot]
        # The leader reports it on its own node. On this one, one supervisor does, or each of them
        # if the others here may go on.
        beside = [slot for slot in self._supervisors.living() if nodes[slot] == own]
        speaks = message.part or self.slot == min(beside)
        if message.exit_code and speaks and own not in (nodes[sender], nodes[self.leader]):
            by = {"by": sender, "node": nodes[sender]}
            self._note("told_to_stop", slot=self.slot, **by, reason=message.reason)
        if message.part:
            self._end(message.reason, EXIT_LEFT_OUT)
        else:
            self._stop(message.reason, message.exit_code)
