"""The election of a leader: promises of all agents that live, and a majority of the nodes (pure).

The leader is the lowest node whose agent lives. A new leader asks every agent (`Prepare`). Each
answers once it hears no living agent of a lower node. It builds on the highest view that any of
them accepted, since that one may have been committed somewhere.
"""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from elaswave_plugin.core.agreement.acceptor import Acceptor
from elaswave_plugin.core.agreement.messages import (
    Accuse,
    Ballot,
    Disconnect,
    Prepare,
    Promise,
    Proposal,
)
from elaswave_plugin.core.agreement.next_view import no_quorum
from elaswave_plugin.core.agreement.timeouts import Timeouts
from elaswave_plugin.core.agreement.view import MembershipView
from elaswave_plugin.errors import EXIT_FAILED, EXIT_LEFT_OUT


class Outcome(NamedTuple):
    """The state with which the new leader begins.

    `common_epoch`: every trainer has applied it; `must_propose`: at once; `missed`: views that are
    certainly committed; `adopted`: later views that may be, and `lost` the slots shut out with
    them; `asked_epoch`: the highest for which any trainer was asked to stop.
    """

    common_epoch: int
    must_propose: bool
    missed: tuple[MembershipView, ...]
    adopted: tuple[MembershipView, ...]
    lost: tuple[int, ...]
    asked_epoch: int


def outcome_of(
    promises: Sequence[Promise],
    *,
    applied_epoch: int,
    asked_epoch: int,
    accepted: Proposal | None,
    committed: MembershipView,
) -> Outcome:
    """Combine all promises and what the new leader itself would promise.

    `committed`: the newest view that it knows to be committed.

    The proposal of the highest ballot may have been committed somewhere, so its view is adopted. No
    other one can have been: the leader with that ballot was told of it by a node of each majority.
    """
    common_epoch = min([applied_epoch, *(promise.applied_epoch for promise in promises)])
    asked_epoch = max([asked_epoch, *(promise.asked_epoch for promise in promises)])
    told = [promise.newer for promise in promises if promise.newer]
    most = max(told, key=lambda newer: newer[-1].epoch, default=())
    missed = tuple(view for view in most if view.epoch > committed.epoch)
    proposals = [promise.accepted for promise in promises if promise.accepted is not None]
    if accepted is not None:
        proposals.append(accepted)
    last = max(proposals, key=lambda proposal: proposal.ballot, default=None)
    newest = missed[-1] if missed else committed
    must_propose = newest.epoch == 0 or asked_epoch > common_epoch
    adopted: tuple[MembershipView, ...] = ()
    if last is not None:
        must_propose = must_propose or last.ballot.epoch > common_epoch
        adopted = tuple(view for view in (*last.lineage, last.view) if view.epoch > newest.epoch)
    lost = last.lost if last is not None and adopted else ()
    return Outcome(common_epoch, must_propose, missed, adopted, lost, asked_epoch)


_YIELD_S = 1.0


class Candidate(Acceptor):
    """One agent's part in who leads; `nodes[s]` is the node of slot s."""

    def __init__(
        self, *, node: int, nodes: tuple[int, ...], timeouts: Timeouts, life: int = 0
    ) -> None:
        """`life`: a number that no other agent of this node has had; 0 at the launch."""
        super().__init__(node=node, nodes=nodes, timeouts=timeouts)
        self._life = life
        self._elected = self.promised if self.leader == node else None
        self._must_propose = self.leader == node
        self._yields_until_s: float | None = None
        self._election: Ballot | None = None
        self._promises: dict[int, Promise] = {}
        self._common_epoch = 0
        self._open: Proposal | None = None
        self._quorum_until_s: float | None = None

    @property
    def leads(self) -> bool:
        """True if it was elected and knows of no later leader."""
        return self._elected is not None and self.leader == self.node

    def lost(self, node: int, evidence: str) -> None:
        """Note that the agent of `node` is gone (its link closed, or it was silent)."""
        if self.over or node == self.node or not self.nodes.lives(node):
            return
        self.nodes.lose(node, evidence)
        self._forget(node)
        if self.leader != self.node:
            self._send(self.leader, Accuse(node=node, evidence=evidence))
        self._effects.append(Disconnect(node=node))

    @abstractmethod
    def _forget(self, node: int) -> None:
        """Drop all answers of an agent that is gone, or that has another life."""

    @abstractmethod
    def _stop(self, reason: str, exit_code: int, *, part: bool = False) -> None:
        """End the job, or, with `part`, only the agents that follow this one."""

    # ---- stepping down ------------------------------------------------------------------------

    def _on_refuse(self, promised: Ballot, now_s: float) -> None:
        if promised > self.promised:
            self._highest_epoch = max(self._highest_epoch, promised.epoch)
            self._step_down(promised, now_s)

    def _step_down(self, promised: Ballot | None = None, now_s: float = 0.0) -> None:
        """Stop leading, or trying to lead; what it adopted may be wrong.

        `promised`: a higher ballot, for which it was refused. It may be elected again with a still
        higher one, at once if its node is lower: so one of two candidates waits.
        """
        stood = self._elected is not None or self._election is not None
        if promised is None:
            self._yields_until_s = None
        elif stood and promised.leader < self.node:
            self._yields_until_s = now_s + _YIELD_S
        if stood:
            self._elected = self._election = self._open = None
            self._drop_adopted()

    def _drop_adopted(self) -> None:
        self.history = [view for view in self.history if view.epoch <= self._sure_epoch]

    def _shut_out(self, lost: Iterable[int]) -> bool:
        for node in lost:
            self.lost(node, "declared lost by the leader")
        if self.node in lost:
            reason = "this node was declared lost by the others"
            self._note("shut_out", node=self.node, reason=reason)
            self._end(reason, EXIT_LEFT_OUT)
        return self.node in lost

    # ---- standing for it ----------------------------------------------------------------------

    def _campaign(self, now_s: float) -> None:
        """Gather promises from every living agent, then lead."""
        if self._yields_until_s is not None and now_s < self._yields_until_s:
            return
        self._yields_until_s = None
        if self._election is None:
            self._sure_epoch = self.committed.epoch
            if not self._has_quorum(self.nodes.living(), [self.committed], now_s):
                return
            term = max(self._highest_epoch, self.promised.epoch) + 1
            own = Ballot(term=term, leader=self.node, life=self._life, epoch=term)
            self._election = self.promised = own
            self._promises = {}
            self._broadcast(self._prepare(own))
        if all(node in self._promises for node in self.nodes.living() if node != self.node):
            self._win(self._election, now_s)

    def _prepare(self, ballot: Ballot) -> Prepare:
        lost = tuple(self.nodes.lost)
        accepted = None if self.accepted is None else self.accepted.ballot
        return Prepare(ballot=ballot, epoch=self.committed.epoch, lost=lost, accepted=accepted)

    def _win(self, ballot: Ballot, now_s: float) -> None:
        promises = list(self._promises.values())
        self._drop_adopted()
        self._learn_drain_requests(now_s)
        for promise in promises:
            for news in promise.news:
                self._learn_news(news, now_s)
        for promise in promises:
            for node in promise.lost:
                self.lost(node, "its link to another node is gone")
        won = outcome_of(
            promises,
            applied_epoch=self._applied_epoch,
            asked_epoch=self._asked_epoch,
            accepted=self.accepted,
            committed=self.committed,
        )
        if self._shut_out(won.lost):
            return
        self._common_epoch, self._must_propose = won.common_epoch, won.must_propose
        self._learn(won.missed)
        self._sure_epoch = self.committed.epoch
        self._learn(won.adopted)
        recent = [view for view in self.history if view.epoch >= self._common_epoch]
        if not self._has_quorum(self.nodes.living(), recent, now_s):
            return
        self._highest_epoch = max(ballot.epoch - 1, self.committed.epoch, won.asked_epoch)
        self._election, self._elected, self._open = None, ballot, None
        self._quorum_until_s = None
        self._note("leader_elected", epoch=ballot.epoch, by=self.node)

    def _has_quorum(
        self, nodes: Iterable[int], views: Iterable[MembershipView], now_s: float
    ) -> bool:
        """Return whether `nodes` are a majority of every view's; if not, wait, then stop."""
        short = self.nodes.minority_in(nodes, views)
        if short is None:
            if self._elected is not None:
                self._quorum_until_s = None
            return True
        of = sorted(set(short.nodes))
        heard = sorted({*nodes}.intersection(of))
        if self._quorum_until_s is None:
            self._quorum_until_s = now_s + self.timeouts.quorum_wait_s
            self._note("quorum_lost", nodes_heard=heard, of=of)
        elif now_s >= self._quorum_until_s:
            gone = sorted((node, why) for node, why in self.nodes.lost.items() if node in of)
            causes = "; ".join(f"node {node}: {why}" for node, why in gone)
            self._stop(no_quorum(len(heard), len(of), causes), EXIT_FAILED, part=True)
        return False
