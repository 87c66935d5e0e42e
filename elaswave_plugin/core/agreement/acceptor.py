"""The answers of a supervisor to leaders and candidates, for its node and trainer (pure).

The base of `agreement.Agreement`. Promises and acceptances bind the supervisor's whole node.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import replace

from elaswave_plugin.core.agreement.acceptor_state import NodeMemory
from elaswave_plugin.core.agreement.effects import Deliver, Dismiss, Fence, Over, Ring
from elaswave_plugin.core.agreement.messages import (
    Ballot,
    Committed,
    Prepare,
    Promise,
    Proposal,
    Refuse,
    StopBefore,
)
from elaswave_plugin.core.agreement.reporter import Reporter
from elaswave_plugin.core.agreement.timeouts import Timeouts
from elaswave_plugin.core.agreement.view import MembershipView, WorkerId
from elaswave_plugin.errors import EXIT_LEFT_OUT


class Acceptor(Reporter, ABC):
    """One supervisor's part as a member; `nodes[s]` is the node of slot s."""

    def __init__(self, *, slot: int, nodes: tuple[int, ...], timeouts: Timeouts) -> None:
        super().__init__(slot=slot, nodes=nodes, timeouts=timeouts)
        self.memory = NodeMemory()
        # The newest view that is certainly committed: a leader's history may go on from there.
        self._sure_epoch = 0
        # All members know everything up to here: they have answered what was proposed on top of it.
        self._known_epoch = 0
        self._accepted: Proposal | None = None
        self._highest_epoch = 0
        self._applied_epoch = 0
        self._dismissed = False
        # From candidates, while this supervisor still hears one of a lower slot than theirs.
        self._early: dict[int, Prepare] = {}

    @property
    def follows(self) -> bool:
        """True if its node has promised none later than the leader that it sees."""
        return self.memory.promised.leader == self.leader

    def recall(self, memory: NodeMemory, now_s: float) -> None:
        """Take over the node's memory, which any of its supervisors may have changed."""
        known, self.memory = self.memory, self.memory.joined(memory)
        if self.memory.promised > known.promised:
            self._step_down(self.memory.promised, now_s)
            if not self.follows and self.leader != self.slot:
                # The leader counts on this node, and would learn of this only at its next proposal.
                self._send(self.leader, Refuse(promised=self.memory.promised))

    # ---- what an agreement adds ---------------------------------------------------------------

    @abstractmethod
    def _step_down(self, promised: Ballot | None = None, now_s: float = 0.0) -> None:
        """Stop leading, or trying to lead; `promised`: a higher ballot, the reason."""

    @abstractmethod
    def _shut_out(self, lost: Iterable[int]) -> bool:
        """Take over the losses that a leader declares; true if it is this worker that is lost."""

    # ---- answers ------------------------------------------------------------------------------

    def _on_prepare(self, sender: int, message: Prepare) -> None:
        if message.ballot < self.memory.promised:
            self._send(sender, Refuse(promised=self.memory.promised))
            return
        if self.leader < sender:
            # The sender has lost a worker that is heard here: that one shuts the sender out, or
            # ends.
            self._early[sender] = message
            return
        self.memory = self.memory.promising(message.ballot)
        self._step_down()
        if self._shut_out(message.lost) or self._is_left_behind():
            return
        known = [view for view in self.history if view.epoch <= self._sure_epoch]
        known += [view for view in self.memory.before if view.epoch > self._sure_epoch]
        promise = Promise(
            ballot=message.ballot,
            applied_epoch=self._applied_epoch,
            asked_epoch=self._asked_epoch,
            newer=tuple(view for view in known if view.epoch > message.epoch),
            accepted=self.memory.accepted,
            lost=tuple(self._supervisors.lost),
            news=tuple(self._news),
        )
        self._send(sender, promise)

    def _answer_who_leads_now(self) -> None:
        """Answer a leader that asked before this supervisor had lost all of lower slots."""
        if self.leader in self._early:
            self._on_prepare(self.leader, self._early.pop(self.leader))

    def _on_propose(self, sender: int, proposal: Proposal, now_s: float) -> None:
        if proposal.ballot < self.memory.promised:
            self._send(sender, Refuse(promised=self.memory.promised))
        elif not self._shut_out(proposal.lost):
            self._accept(proposal, now_s)

    @property
    def proposed(self) -> MembershipView | None:
        """The view that was proposed last, as far as this supervisor has accepted one."""
        return None if self._accepted is None else self._accepted.view

    @property
    def _asked_epoch(self) -> int:
        """The highest epoch for which the own trainer was asked to stop."""
        return 0 if self._accepted is None else self._accepted.ballot.epoch

    def _accept(self, proposal: Proposal, now_s: float) -> None:
        self.memory = self.memory.accepting(proposal, self.history, known_epoch=self._known_epoch)
        # Not what the node has accepted, which may have been told to another trainer only.
        self._accepted = proposal
        self._highest_epoch = max(self._highest_epoch, proposal.ballot.epoch)
        ring = Ring(ballot=proposal.ballot, reason=proposal.view.reason, boundary=proposal.boundary)
        me = WorkerId(slot=self.slot, incarnation=self.incarnation)
        lives = me not in self._reports.failures and self.slot not in self._reports.done
        # A boundary may be far; a worker that never reaches it hangs, which is found elsewhere.
        may_answer = lives and not self._detached and self.slot in proposal.view.ranks
        waits = may_answer and not proposal.boundary
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
            evidence = f"did not answer the proposal of view {epoch} within {limit_s}"
            self._effects.append(Fence(evidence=evidence))

    def _on_committed(self, message: Committed) -> None:
        proposal = message.proposal
        # Valid whatever the node has promised since: a commit is final.
        if self._accepted is None or proposal.ballot != self._accepted.ballot:
            return
        if proposal.view.epoch <= self.committed.epoch:
            return
        self._learn(proposal.lineage)
        first = proposal.lineage[0] if proposal.lineage else proposal.view
        self._known_epoch = max(view.epoch for view in self.history if view.epoch < first.epoch)
        # Not only views new to this supervisor: a leader may have adopted views that its trainer
        # was never told.
        skipped = tuple(view for view in self.history if view.epoch > self._applied_epoch)
        self.history.append(proposal.view)
        self._reports.entered(proposal.view)
        self._applied_epoch = self._sure_epoch = proposal.view.epoch
        recent = [view for view in self.history[2:] if view.epoch >= self._known_epoch]
        self.history = [*self.history[:2], *recent]
        self._forget_settled_news(proposal.view)
        me = WorkerId(slot=self.slot, incarnation=self.incarnation)
        if me in proposal.view:
            self._effects.append(Deliver(committed=message, skipped=skipped))
        elif self.is_told_to_leave:
            self._dismissed = True
            self._effects.append(Dismiss())

    def _learn(self, views: Iterable[MembershipView]) -> None:
        self.history += [view for view in views if view.epoch > self.committed.epoch]

    # ---- how it ends alone ---------------------------------------------------------------------

    def _is_left_behind(self) -> bool:
        """End if this one was left out: each member has answered every committed proposal."""
        before = self.memory.before
        if not before or before[0].epoch <= self._sure_epoch:
            return False
        self._end_alone("the others have gone on without this worker")
        return True

    def _end_alone(self, reason: str) -> None:
        self._note("shut_out", slot=self.slot, reason=reason)
        self._end(reason, EXIT_LEFT_OUT)

    def _end(self, reason: str, exit_code: int) -> None:
        self.over = True
        self._effects.append(Over(reason=reason, exit_code=exit_code))
