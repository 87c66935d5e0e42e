"""What a node has promised and accepted, as all of its supervisors remember it (pure).

A majority is counted in nodes, so it is the node that votes: whichever of its supervisors is heard
speaks for all of them, and none of them may say what another one's word rules out. Each recalls
this before it votes, and nothing of what it says goes out before it is remembered here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from elaswave_plugin.core.agreement_messages import Ballot, Proposal
from elaswave_plugin.core.membership import MembershipView


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMemory:
    """No lower ballot than `promised` counts; `accepted` is the highest proposal.

    `before`: the last views that were committed before that one and its lineage, oldest first; all
    that take part know the first of them, and everything before it.
    """

    promised: Ballot = field(default_factory=Ballot.first)
    accepted: Proposal | None = None
    before: tuple[MembershipView, ...] = ()

    def promising(self, ballot: Ballot) -> NodeMemory:
        """The same, with the promise of a ballot that is not lower."""
        return replace(self, promised=ballot)

    def accepting(
        self, proposal: Proposal, history: Sequence[MembershipView], *, known_epoch: int
    ) -> NodeMemory:
        """The same, with a proposal whose ballot is not lower; `history`: what is known before.

        `known_epoch`: all that take part know everything up to this epoch.
        """
        if self.accepted is not None and self.accepted.ballot == proposal.ballot:
            return self  # another supervisor was first
        first = proposal.lineage[0] if proposal.lineage else proposal.view
        before = tuple(view for view in history if view.epoch < first.epoch)
        kept = tuple(view for view in before if view.epoch >= known_epoch) or before[-1:]
        return NodeMemory(promised=proposal.ballot, accepted=proposal, before=kept)

    def joined(self, other: NodeMemory) -> NodeMemory:
        """What both remember; the same object as before where the other one knows nothing more."""
        mine, theirs = self.accepted, other.accepted
        later = theirs is not None and (mine is None or mine.ballot < theirs.ballot)
        if other.promised <= self.promised and not later:
            return self
        if self.promised <= other.promised and (later or mine == theirs):
            return other
        newest = other if later else self
        return replace(newest, promised=max(self.promised, other.promised))
