"""One agent's part in agreeing on the next view: inputs in, messages and orders out (pure).

The life of a proposal: `Propose` -> every trainer quiesces -> `Quiesced` -> `Committed`. A failure
while one is open supersedes it with a higher epoch. Who leads is decided in `candidate`;
docs/inside.md says why no two views of an epoch are ever committed.

Every agent calls the inputs as things happen and `settle` once after each batch of them; so several
failures in one batch become one proposal.

A failure cannot wait. Arrivals and departures can: their proposal waits for the trainers to reach
the next boundary between two steps. Each says which step it has begun, and all stop before the
first step that none has begun.
"""

from dataclasses import asdict, replace
from typing import Self

from elaswave_plugin.core.agreement.candidate import Candidate
from elaswave_plugin.core.agreement.messages import (
    Accuse,
    Admit,
    AllSealed,
    Ballot,
    Begun,
    Committed,
    Detached,
    Disconnect,
    Dismiss,
    Done,
    Effect,
    Facts,
    FirstSeal,
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
    Seated,
    Settled,
    Severed,
    Starts,
    Stays,
    Stop,
    StopBefore,
    Vacate,
    Vacated,
    Welcome,
    pack_payload,
)
from elaswave_plugin.core.agreement.next_view import boundary_of, ending_of, find_next_view
from elaswave_plugin.core.agreement.quorum import (
    Admission,
    Applicant,
    Nodes,
    judge,
    next_incarnation,
)
from elaswave_plugin.core.agreement.record import Record
from elaswave_plugin.core.agreement.reporter import Seat
from elaswave_plugin.core.agreement.timeouts import Timeouts
from elaswave_plugin.core.agreement.view import FailureEvent, MembershipView, WorkerId
from elaswave_plugin.errors import EXIT_LEFT_OUT


class Agreement(Candidate):
    """The state machine of one agent; `nodes[s]` is the node of slot s."""

    def __init__(
        self, *, node: int, nodes: tuple[int, ...], timeouts: Timeouts, life: int = 0
    ) -> None:
        """`life`: a number that no other agent of this node has had; 0 at the launch."""
        super().__init__(node=node, nodes=nodes, timeouts=timeouts, life=life)
        self._known_to_open = (0, 0, 0, False)
        self._begun: dict[int, Begun] = {}
        self._stops_before: int | None = None
        self._stands = False
        self._outside: set[int] = set()
        self._answers: dict[int, Quiesced] = {}

    @classmethod
    def of_newcomer(cls, welcome: Welcome, node: int, *, timeouts: Timeouts, life: int) -> Self:
        """Create the part of an agent that comes to a running job, from what it has missed."""
        new = cls(node=node, nodes=welcome.nodes, timeouts=timeouts, life=life)
        new._begin_with(welcome, welcome.ballot)
        for worker in welcome.workers:
            new.seats[worker.slot].incarnation = worker.incarnation
        new.accepted = welcome.accepted
        new._know_start()
        return new

    @classmethod
    def of_next_life(
        cls, record: Record, node: int, *, timeouts: Timeouts, life: int, now_s: float
    ) -> Self:
        """Create the part of an agent that follows one that died: its trainers went on.

        Each of them tells what it has done; `trainer_starts` is not called for them.
        """
        new = cls(node=node, nodes=record.nodes, timeouts=timeouts, life=life)
        new._begin_with(record, record.promised)
        new.seats = {slot: replace(seat) for slot, seat in record.seats.items()}
        new.last, new._known_epoch = record.last, record.known_epoch
        if record.started:
            new._know_start()
        new._asked_epoch = new.committed.epoch
        if record.accepted is not None and record.accepted.ballot.epoch > new.committed.epoch:
            new._accept(record.accepted, now_s)
        new.promised, new.accepted = record.promised, record.accepted
        if record.last is not None and record.last.proposal.ballot.leader == node:
            # The one that died may have written of it to no file yet.
            new._note_commit(record.last.proposal.view, again=True)
        for notice in record.notices:
            new.tell_leader(notice, now_s)
        # Nor may it have told them.
        new._effects += [Dismiss(slot=slot) for slot, seat in new.seats.items() if seat.dismissed]
        return new

    def _begin_with(self, told: Welcome | Record, promised: Ballot) -> None:
        """Begin in a running job, where all own trainers know, or are told, the views so far."""
        self.nodes = Nodes(told.nodes, told.lost, told.empty, unused_node=told.unused_node)
        self.history, self.promised = list(told.history), promised
        self._sure_epoch = self._known_epoch = self._applied_epoch = self.committed.epoch
        self._highest_epoch = max(promised.epoch, self.committed.epoch)
        self._elected, self._must_propose = None, False
        self.addresses = dict(told.addresses)
        self._reports.incarnations |= told.incarnations

    def _know_start(self) -> None:
        self._news.append(AllSealed())
        self._learn_news(AllSealed(), 0.0)

    @property
    def to_store(self) -> tuple[object, ...]:
        """Something that changes with each change of `record`."""
        ballot = None if self.accepted is None else self.accepted.ballot
        seats = tuple((slot, seat.incarnation, seat.dismissed) for slot, seat in self.seats.items())
        epoch = self._sure_epoch
        changes, notices = self.nodes.changes, self.own_notices
        return self.promised, ballot, epoch, self.started, seats, changes, notices

    def record(self) -> Record:
        """Return what the next life of this agent begins with, to be stored before it speaks."""
        return Record(
            promised=self.promised,
            accepted=self.accepted,
            last=self.last,
            history=tuple(view for view in self.history if view.epoch <= self._sure_epoch),
            known_epoch=self._known_epoch,
            started=self.started,
            seats={slot: replace(seat, fence_at_s=None) for slot, seat in self.seats.items()},
            nodes=self.nodes.of_slots,
            addresses=self.addresses,
            lost=self.nodes.lost,
            empty=self.nodes.empty,
            incarnations=self._reports.incarnations,
            unused_node=self.nodes.unused_node,
            notices=self.own_notices,
        )

    def linked(self, node: int, epoch: int) -> None:
        """Note that there is a new link with the agent of `node`: tell it what it may not know.

        What was under way on another link is lost, and the agent may have another life. `epoch`:
        of the newest view that it knows to be committed.
        """
        if self.over or not self.nodes.lives(node):
            return
        outside = {*self._outside}
        self._forget(node)
        self._outside = outside  # its trainers went on
        if self.leads:
            incarnations, slots = self._reports.incarnations, self.nodes.slots_of(node)
            self._send(
                node,
                self._welcome(
                    tuple(WorkerId(slot=s, incarnation=incarnations.get(s, 0)) for s in slots)
                ),
            )
            if self.last is not None and epoch < self.committed.epoch:
                self._send(node, self.last)
            if self._open is not None:
                self._send(node, Propose(proposal=self._open))
                if self._stops_before is not None:
                    self._send(node, StopBefore(ballot=self._open.ballot, step=self._stops_before))
            self._tell_again(node)
        elif self._election is not None:
            self._send(node, self._prepare(self._election))
        elif node == self.leader:
            self._tell_again(node)

    # ---- inputs -------------------------------------------------------------------------------

    def receive(self, sender: int, message: Message, now_s: float) -> None:
        """Take a message from the agent of node `sender`."""
        if self.over or not self.nodes.lives(sender):
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
                self._take_begun(sender, message)
            case StopBefore():
                self._on_stop_before(message)
            case Committed():
                self._on_committed(message)
            case Refuse():
                self._on_refuse(message.promised, now_s)
            case Accuse():
                if self.leader == self.node and message.node != self.node:
                    self.lost(message.node, message.evidence)
            case AllSealed():
                self._news.append(message)
                self._learn_news(message, now_s)
            case Vacate():
                self._on_vacate(sender, message)
            case Settled():
                self._learn_news(message, now_s)
                if self.leader == self.node:
                    self._tell_leavers(message, sender)
            case Admit():
                # The next leader shuts out a newcomer of which it does not know.
                if message.ballot.is_in_term_of(self.promised):
                    self._give_slots(message)
            case Welcome():
                self._catch_up(message)
            case (
                Report()
                | Severed()
                | Replan()
                | FirstSeal()
                | Done()
                | Detached()
                | Ready()
                | Notice()
                | Starts()
            ):
                self._learn_news(message, now_s)
            case Stays():
                self._forget_notice(message.worker)
            case Stop():
                self._on_stop(sender, message)

    def admit(self, applicant: Applicant) -> Admission:
        """Decide on a node that asks for empty slots; if it gets them, tell all others."""
        if self.over:
            return Admission(reason="the job is over")
        if not self.leads:
            return Admission(reason="this one does not lead the job", later=True)
        verdict = judge(
            applicant,
            nodes=self.nodes,
            view=self.committed,
            reports=self._reports,
            opened=self._open,
            settled=not self._must_propose,
        )
        if verdict.reason is None:
            self._let_in(applicant)
        return verdict

    def detached(self, message: Detached) -> None:
        """Note that a trainer works outside the job; the leader reports this once for all."""
        seat = self.seats[message.slot]
        if seat.detached:
            return
        seat.detached, seat.fence_at_s = True, None
        self.tell_leader(message, 0.0)

    def vacate(self, slot: int, evidence: str) -> None:
        """Give an own slot up: this node starts no trainer in it any more."""
        self.nodes.vacate(slot, evidence)
        del self.seats[slot]
        self._tell_first_nodes(Vacate(slot=slot, evidence=evidence))
        self._effects.append(Vacated(slot=slot))

    def leave(self, slot: int, evidence: str, now_s: float) -> None:
        """Give an own slot up on a signal: the others go on without its worker, at once."""
        failure = FailureEvent(
            kind="leave", **asdict(self.worker(slot)), detected_at_s=now_s, evidence=evidence
        )
        report = Report(failure=failure, exit_code=None)
        self._learn_news(report, now_s)
        self._tell_first_nodes(report)
        self.vacate(slot, evidence)

    def _on_vacate(self, sender: int, message: Vacate) -> None:
        if self.nodes.of_slots[message.slot] == sender:
            self.nodes.vacate(message.slot, message.evidence)

    def abandon(self, reason: str, exit_code: int) -> None:
        """Stop the whole job: a trainer of this node found that it cannot go on."""
        self._stop(reason, exit_code)

    def deadline_s(self) -> float | None:
        """Return when `settle` has to be called although nothing happened; None: never."""
        severed = self._reports.severed
        renew_at_s = None if severed is None or not self.leads else severed[1]
        leave_at_s = self._reports.leave_at_s if self.leads else None
        waits_s = self._quorum_until_s, self._yields_until_s
        fence_at_s = (seat.fence_at_s for seat in self.seats.values())
        deadlines = (*fence_at_s, *waits_s, renew_at_s, leave_at_s)
        times = [time_s for time_s in deadlines if time_s is not None]
        return min(times) if times and not self.over else None

    def settle(self, now_s: float) -> list[Effect]:
        """Act on all inputs since the last call; return the orders to carry out, in order."""
        if not self.over:
            self._fence_when_due(now_s)
            self._answer_who_leads_now()
            if self.leader != self.node:
                self._step_down()
            elif not self.leads:
                self._campaign(now_s)
            if self.leads and not self.over:
                self._lead(now_s)
            self._let_the_dismissed_go()
        effects, self._effects = self._effects, []
        return effects

    def _let_the_dismissed_go(self) -> None:
        """Trainers that have left are needed no more once all members have sealed without them."""
        dismissed = [slot for slot, seat in self.seats.items() if seat.dismissed]
        if self.over or not dismissed or not self._reports.all_settled(self.committed):
            return
        if len(dismissed) == len(self.seats):
            self._end("it left, as it was told to", 0)
            return
        for slot in dismissed:
            self.vacate(slot, "its worker left, as it was told to")

    # ---- as the leader ------------------------------------------------------------------------

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
        known = self._reports.changes, self.nodes.changes, len(self._outside), is_severed
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
            lost=self.nodes.without_agent,
            outside=self._outside,
            layout=self.layout,
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
        self._open, self._begun, self._stops_before, self._stands = None, {}, None, False
        if not self._has_quorum(self.nodes.living(), self._bases, now_s):
            return
        assert self._elected is not None
        ballot = replace(self._elected, epoch=self._highest_epoch + 1)
        proposal = Proposal(
            ballot=ballot,
            view=replace(target, epoch=ballot.epoch),
            lost=tuple(self.nodes.lost),
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
        if self._reports.started and not self._open.boundary:
            self._outside |= {slot for slot, one in answer.answers.items() if one.entering}

    def _take_begun(self, sender: int, message: Begun) -> None:
        if self._open is not None and message.ballot == self._open.ballot:
            self._begun[sender] = message
            self._stands = self._stands or message.stands

    def _name_the_boundary(self, proposal: Proposal) -> None:
        """Tell all before which step they stop, once the progress of each member is known."""
        voters = self.committed.voters
        is_told = self._stands or len(self._begun) >= len(voters) - len(self.nodes.lost)
        if not proposal.boundary or self._stops_before is not None or not is_told:
            return
        members = [node for node in voters if self.nodes.lives(node)]
        self._stops_before = boundary_of(members, self._begun)
        if self._stops_before is not None:
            message = StopBefore(ballot=proposal.ballot, step=self._stops_before)
            self._broadcast(message)
            self._on_stop_before(message)

    def _commit_when_answered(self, proposal: Proposal, now_s: float) -> None:
        living = self.nodes.living()
        if len(self._answers) < len(living) or not self._answers.keys() >= {*living}:
            return
        told = {s: one for answer in self._answers.values() for s, one in answer.answers.items()}
        facts: dict[int, Facts] = {}
        for slot in proposal.view.ranks:
            answer = told[slot].facts
            if answer is None:
                return  # its trainer is gone or done, and that report supersedes this proposal
            facts[slot] = answer
        if not self._has_quorum(self._answers, self._bases, now_s):
            return
        inventory = [one for node in sorted(self._answers) for one in self._answers[node].inventory]
        committed = Committed(proposal=proposal, payload=pack_payload(facts, inventory))
        self._open, self._must_propose = None, False
        self._outside.clear()
        self._common_epoch = proposal.view.epoch
        self._broadcast(committed)
        self._note_commit(proposal.view)
        self._on_committed(committed)

    def _note_commit(self, view: MembershipView, **more: object) -> None:
        ranks = list(view.ranks)
        self._note(
            "view_committed",
            epoch=view.epoch,
            ranks=ranks,
            reason=view.reason,
            by=self.node,
            **more,
        )

    def _let_in(self, applicant: Applicant) -> None:
        workers = tuple(
            WorkerId(slot=slot, incarnation=next_incarnation(slot, self.history, self._reports))
            for slot in applicant.slots
        )
        is_new = not self.nodes.lives(applicant.node)
        message = Admit(
            ballot=self.promised, node=applicant.node, address=applicant.address, workers=workers
        )
        self._broadcast(message)
        self._give_slots(message)
        if is_new:
            self._send(applicant.node, self._welcome(workers))
        self._note(
            "node_admitted",
            node=applicant.node,
            address=applicant.address,
            slots=list(applicant.slots),
        )

    def _welcome(self, workers: tuple[WorkerId, ...]) -> Welcome:
        return Welcome(
            ballot=self.promised,
            workers=workers,
            nodes=self.nodes.of_slots,
            addresses=dict(self.addresses),
            history=tuple(self.history),
            accepted=self.accepted,
            lost=dict(self.nodes.lost),
            empty=dict(self.nodes.empty),
            incarnations=dict(self._reports.incarnations),
            unused_node=self.nodes.unused_node,
        )

    def _catch_up(self, welcome: Welcome) -> None:
        """Learn, in another life, what was told while there was no agent here."""
        if not welcome.ballot.is_in_term_of(self.promised):
            return
        if self.node not in welcome.nodes or self._shut_out(welcome.lost):
            return
        # It may have been under way while this agent lost somebody, who never comes back.
        own = {node: why for node, why in self.nodes.lost.items() if node in welcome.nodes}
        lost = {**welcome.lost, **own}
        self.nodes = Nodes(welcome.nodes, lost, welcome.empty, unused_node=welcome.unused_node)
        self.addresses = dict(welcome.addresses)
        self._reports.incarnations |= welcome.incarnations
        for slot in self.nodes.slots_of(self.node):
            if slot not in self.seats:  # it was given to this node just before
                number = self._reports.incarnations[slot]
                self.seats[slot] = Seat(incarnation=number)
                self._effects.append(Seated(worker=WorkerId(slot=slot, incarnation=number)))

    def _give_slots(self, message: Admit) -> None:
        """Give slots to a node, whatever was known of those that had them."""
        lived = self.nodes.living()
        if message.node not in lived:
            self.addresses[message.node] = message.address
        for worker in message.workers:
            self.nodes.take(worker.slot, message.node)
            self._reports.replaced(worker)
            if message.node == self.node:
                self.seats[worker.slot] = Seat(incarnation=worker.incarnation)
                self._effects.append(Seated(worker=worker))
        here = {*self.nodes.of_slots}
        self.addresses = {node: one for node, one in self.addresses.items() if node in here}
        for node in lived:
            if not self.nodes.lives(node):  # this one had not heard of its loss
                self._forget(node)
                self._effects.append(Disconnect(node=node))

    def _forget(self, node: int) -> None:
        """Drop all answers of an agent that is gone: the snapshots it listed went with it."""
        self._promises.pop(node, None)
        self._early.pop(node, None)
        self._answers.pop(node, None)
        self._begun.pop(node, None)
        self._outside -= {*self.nodes.slots_of(node)}

    # ---- the end ------------------------------------------------------------------------------

    @property
    def all_ended(self) -> bool:
        """True where nobody can go on with the job, as each of its workers has told its end."""
        return self._reports.all_ended(self.committed, self.nodes.without_agent)

    def _stop_if_decided(self) -> bool:
        """Stop the job if its end is due; return true also while the last exits are awaited."""
        answers = (one for told in self._answers.values() for one in told.answers.values())
        joined = any(answer.facts is not None for answer in answers)
        lost, layout = self.nodes.without_agent, self.layout
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
        """End the job, or, with `part`, only the agents that follow this one."""
        if self.over:
            return
        stop = Stop(reason=reason, exit_code=exit_code, part=part)
        if self.leader == self.node:
            self._broadcast(stop)
        else:  # the leader tells the others
            self._tell_first_nodes(stop)
        if self.leader == self.node:
            self._note("job_over", reason=reason, exit_code=exit_code)
        self._end(reason, EXIT_LEFT_OUT if part else exit_code)

    def _on_stop(self, sender: int, message: Stop) -> None:
        if message.part and sender != self.leader:
            return  # other parts may go on, and this node with them
        # The leader reports it on its own node.
        if message.exit_code and (message.part or self.node != self.leader):
            self._note("told_to_stop", node=self.node, by=sender, reason=message.reason)
        if message.part:
            self._end(message.reason, EXIT_LEFT_OUT)
        else:
            self._stop(message.reason, message.exit_code)
