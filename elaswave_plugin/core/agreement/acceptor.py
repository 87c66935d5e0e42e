"""The answers of an agent to leaders and candidates, for its node and its trainers (pure).

The base of `leader.Agreement`. A promise binds the node, whichever life of its agent gave it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable

from elaswave_plugin.core.agreement.messages import (
    Answer,
    Ballot,
    Begun,
    Committed,
    Deliver,
    Dismiss,
    Facts,
    Fence,
    Inventory,
    Over,
    Prepare,
    Promise,
    Proposal,
    Quiesced,
    Refuse,
    Ring,
    StopBefore,
)
from elaswave_plugin.core.agreement.reporter import Reporter
from elaswave_plugin.core.agreement.timeouts import Timeouts
from elaswave_plugin.core.agreement.view import MembershipView
from elaswave_plugin.core.layout.worker_facts import step_told


class Acceptor(Reporter, ABC):
    """One agent's part as a member; `nodes[s]` is the node of slot s."""

    def __init__(self, *, node: int, nodes: tuple[int, ...], timeouts: Timeouts) -> None:
        super().__init__(node=node, nodes=nodes, timeouts=timeouts)
        # Ballots below this one do not count; and the proposal of the highest ballot so far.
        self.promised = Ballot.first()
        self.accepted: Proposal | None = None
        # The newest commit, for those who were not told of it.
        self.last: Committed | None = None
        # The newest view that is certainly committed: a leader's history may go on from there.
        self._sure_epoch = 0
        # All members know everything up to here: they have answered what was proposed on top of it.
        self._known_epoch = 0
        self._highest_epoch = 0
        self._applied_epoch = 0
        # The highest epoch for which the own trainers were asked to stop, and what they said.
        self._asked_epoch = 0
        self._stopped: dict[int, Answer] = {}
        self._answer: Quiesced | None = None
        self._steps: dict[int, int] = {}
        self._is_named = False
        # From candidates, while this agent still hears one of a lower node than theirs.
        self._early: dict[int, Prepare] = {}

    @property
    def follows(self) -> bool:
        """True if it has promised none later than the leader that it sees."""
        return self.promised.leader == self.leader

    @property
    def proposed(self) -> MembershipView | None:
        """The view that was proposed last, as far as this agent has accepted one."""
        return None if self.accepted is None else self.accepted.view

    def wants(self, slot: int) -> bool:
        """Return whether the newest trainer of an own slot is in the view that was proposed."""
        return self.proposed is not None and self.worker(slot) in self.proposed

    def missed(self, slot: int, epoch: int) -> Deliver | None:
        """Return what an own trainer that knows the views up to `epoch` was not told.

        That ends with the newest commit: a leader's history may go on with views that it has
        adopted, and that are not committed yet.
        """
        last = self.last
        if last is None or epoch >= last.proposal.view.epoch:
            return None
        if self.worker(slot) not in last.proposal.view:
            return None
        between = range(epoch + 1, last.proposal.view.epoch)
        skipped = tuple(view for view in self.history if view.epoch in between)
        return Deliver(committed=last, skipped=skipped)

    # ---- what an agreement adds ---------------------------------------------------------------

    @abstractmethod
    def _step_down(self, promised: Ballot | None = None, now_s: float = 0.0) -> None:
        """Stop leading, or trying to lead; `promised`: a higher ballot, the reason."""

    @abstractmethod
    def _shut_out(self, lost: Iterable[int]) -> bool:
        """Take over the losses that a leader declares; true if it is this node that is lost."""

    @abstractmethod
    def _take_answer(self, sender: int, answer: Quiesced) -> None:
        """Note, as the leader, that the trainers of a node have stopped."""

    @abstractmethod
    def _take_begun(self, sender: int, message: Begun) -> None:
        """Note, as the leader, how far the trainers of a node are."""

    # ---- answers to others --------------------------------------------------------------------

    def _on_prepare(self, sender: int, message: Prepare) -> None:
        if message.ballot < self.promised:
            self._send(sender, Refuse(promised=self.promised))
            return
        if self.leader < sender:
            # The sender has lost a node that is heard here: that one shuts the sender out, or ends.
            self._early[sender] = message
            return
        self.promised = message.ballot
        self._step_down()
        if self._shut_out(message.lost):
            return
        known = [view for view in self.history if view.epoch <= self._sure_epoch]
        accepted = self.accepted
        promise = Promise(
            ballot=message.ballot,
            applied_epoch=self._applied_epoch,
            asked_epoch=self._asked_epoch,
            newer=tuple(view for view in known if view.epoch > message.epoch),
            accepted=None if accepted and accepted.ballot == message.accepted else accepted,
            lost=tuple(self.nodes.lost),
            news=tuple(self._news),
        )
        self._send(sender, promise)

    def _answer_who_leads_now(self) -> None:
        """Answer a leader that asked before this agent had lost all of lower nodes."""
        if self.leader in self._early:
            self._on_prepare(self.leader, self._early.pop(self.leader))

    def _on_propose(self, sender: int, proposal: Proposal, now_s: float) -> None:
        if proposal.ballot < self.promised:
            self._send(sender, Refuse(promised=self.promised))
        elif self._shut_out(proposal.lost):
            pass
        elif self._asked_for(proposal.ballot):
            # It is told on a new link, and what was answered before may be lost.
            self._tell_how_far(proposal.ballot)
            if self._answer is not None:
                self._send(sender, self._answer)
        else:
            self._accept(proposal, now_s)

    def _asked_for(self, ballot: Ballot) -> bool:
        """Return whether the own trainers were asked; a newcomer's were not, for what it learns."""
        accepted = None if self.accepted is None else self.accepted.ballot
        return accepted == ballot and self._asked_epoch == ballot.epoch

    def _accept(self, proposal: Proposal, now_s: float) -> None:
        self.promised, self.accepted = proposal.ballot, proposal
        self._asked_epoch, self._stopped, self._steps = proposal.ballot.epoch, {}, {}
        self._answer = None
        self._is_named = not proposal.boundary
        self._highest_epoch = max(self._highest_epoch, proposal.ballot.epoch)
        for slot, seat in self.seats.items():
            lives = self.worker(slot) not in self._reports.failures
            lives = lives and slot not in self._reports.done
            # A boundary may be far; a worker that never reaches it hangs, which is found elsewhere.
            may_answer = lives and not seat.detached and slot in proposal.view.ranks
            waits = may_answer and not proposal.boundary
            seat.fence_at_s = now_s + self._answer_limit_s() if waits else None
        self._ring(proposal)

    def _on_stop_before(self, message: StopBefore) -> None:
        accepted = self.accepted
        if accepted is not None and accepted.ballot == message.ballot:
            self._is_named = True
            self._ring(accepted, before_step=message.step)

    def _ring(self, proposal: Proposal, *, before_step: int | None = None) -> None:
        ring = Ring(
            ballot=proposal.ballot,
            reason=proposal.view.reason,
            within_s=self.timeouts.quiesce_timeout_s,
            boundary=proposal.boundary,
            before_step=before_step,
        )
        self._effects.append(ring)

    # ---- what the own trainers answer ---------------------------------------------------------

    def quiesced(
        self,
        slot: int,
        ballot: Ballot,
        facts: Facts | None,
        inventory: Callable[[], Inventory],
        *,
        entering: bool = False,
    ) -> None:
        """Note that a trainer has stopped for the proposal of `ballot`; no facts: no trainer.

        `inventory()`: what is sealed on this node now; `entering`: no view was delivered to it yet.
        The leader is told once all trainers here have stopped.
        """
        if self.over or self.accepted is None or self.accepted.ballot != ballot:
            return
        seat = self.seats[slot]
        seat.fence_at_s = None
        seat.detached = seat.detached and facts is None
        self._stopped[slot] = Answer(facts=facts, entering=entering)
        self._tell_how_far(ballot)
        if self.seats.keys() <= self._stopped.keys():
            stopped = dict(self._stopped)
            answer = Quiesced(ballot=ballot, answers=stopped, inventory=inventory())
            self._answer = answer
            if ballot.leader == self.node:
                self._take_answer(self.node, answer)
            else:
                self._send(ballot.leader, answer)

    def begun(self, slot: int, ballot: Ballot, step: int) -> None:
        """Note that a trainer is in `step`, and stops after it until `Ring` says where."""
        if not self.over and self.accepted is not None and self.accepted.ballot == ballot:
            self._steps[slot] = step
            self._tell_how_far(ballot)

    def _tell_how_far(self, ballot: Ballot) -> None:
        """Tell the leader, once it is known of all members here, or one of them stands.

        It is told nothing more where it has named the step before which all stop.
        """
        if self._is_named:
            return
        members = [slot for slot in self.seats if slot in self.committed.ranks]
        stopped = (self._stopped[slot].facts for slot in members if slot in self._stopped)
        standing = [step_told(facts) for facts in stopped if facts is not None]
        if standing:
            message = Begun(ballot=ballot, step=standing[0], stands=True)
        elif members and all(slot in self._steps for slot in members):
            message = Begun(ballot=ballot, step=max(self._steps[slot] for slot in members))
        else:
            return
        if ballot.leader == self.node:
            self._take_begun(self.node, message)
        else:
            self._send(ballot.leader, message)

    def _fence_when_due(self, now_s: float) -> None:
        for slot, seat in self.seats.items():
            if seat.fence_at_s is None or now_s < seat.fence_at_s or self.accepted is None:
                continue
            seat.fence_at_s = None
            what = f"answer the proposal of view {self.accepted.ballot.epoch}"
            if self.committed.epoch == 0:
                what = "join the job"
            evidence = f"did not {what} within {self._answer_limit_s():g} s"
            self._effects.append(Fence(slot=slot, evidence=evidence))

    # ---- commits ------------------------------------------------------------------------------

    def _on_committed(self, message: Committed) -> None:
        proposal = message.proposal
        # Valid whatever was promised since: a commit is final.
        if self.accepted is None or proposal.ballot != self.accepted.ballot:
            return
        if proposal.view.epoch <= self.committed.epoch:
            return
        self._learn(proposal.lineage)
        first = proposal.lineage[0] if proposal.lineage else proposal.view
        self._known_epoch = max(view.epoch for view in self.history if view.epoch < first.epoch)
        # Not only views new to this agent: a leader may have adopted views that its trainers
        # were never told.
        skipped = tuple(view for view in self.history if view.epoch > self._applied_epoch)
        self.history.append(proposal.view)
        self.last = message
        self._reports.entered(proposal.view)
        self._applied_epoch = self._sure_epoch = proposal.view.epoch
        recent = [view for view in self.history[2:] if view.epoch >= self._known_epoch]
        self.history = [*self.history[:2], *recent]
        self._forget_settled_news(proposal.view)
        if any(self.worker(slot) in proposal.view for slot in self.seats):
            self._effects.append(Deliver(committed=message, skipped=skipped))
        for slot, seat in self.seats.items():
            if self.worker(slot) not in proposal.view and self.notices_of(slot):
                seat.dismissed = True
                self._effects.append(Dismiss(slot=slot))

    def _learn(self, views: Iterable[MembershipView]) -> None:
        self.history += [view for view in views if view.epoch > self.committed.epoch]

    def _end(self, reason: str, exit_code: int) -> None:
        self.over = True
        self._effects.append(Over(reason=reason, exit_code=exit_code))
