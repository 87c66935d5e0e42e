"""The promises and acceptances of a node, as all of its supervisors remember them (pure).

A majority is counted in nodes, so the node votes: any of its supervisors speaks for all of them,
and none may contradict another one's vote. Each recalls this memory before it votes, and sends
nothing before its vote is stored here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from elaswave_plugin.core.agreement.messages import Ballot, Proposal
from elaswave_plugin.core.agreement.view import MembershipView


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMemory:
    """A node's votes: ballots below `promised` do not count; `accepted` is the highest proposal.

    `before`: the last views committed before that proposal and its lineage, oldest first; all
    members know the first of them, and everything before it.
    """

    promised: Ballot = field(default_factory=Ballot.first)
    accepted: Proposal | None = None
    before: tuple[MembershipView, ...] = ()

    def promising(self, ballot: Ballot) -> NodeMemory:
        """Return the same, with the promise of a ballot that is not lower."""
        return replace(self, promised=ballot)

    def accepting(
        self, proposal: Proposal, history: Sequence[MembershipView], *, known_epoch: int
    ) -> NodeMemory:
        """Return the same, with a proposal of a ballot that is not lower.

        `history`: the views known before; `known_epoch`: all members know everything up to it.
        """
        if self.accepted is not None and self.accepted.ballot == proposal.ballot:
            return self  # another supervisor was first
        first = proposal.lineage[0] if proposal.lineage else proposal.view
        before = tuple(view for view in history if view.epoch < first.epoch)
        kept = tuple(view for view in before if view.epoch >= known_epoch) or before[-1:]
        return NodeMemory(promised=proposal.ballot, accepted=proposal, before=kept)

    def joined(self, other: NodeMemory) -> NodeMemory:
        """Return what both remember; the same object if the other one knows nothing more."""
        mine, theirs = self.accepted, other.accepted
        later = theirs is not None and (mine is None or mine.ballot < theirs.ballot)
        if other.promised <= self.promised and not later:
            return self
        if self.promised <= other.promised and (later or mine == theirs):
            return other
        newest = other if later else self
        return replace(newest, promised=max(self.promised, other.promised))
