"""The slots that have a supervisor, and their nodes: the leader and the majorities (pure).

Voters are the nodes of a view, one vote each, whichever of its supervisors gives it (they share
what the node has promised, `node_memory`); of two halves the one with the lowest node counts as the
majority, so that any two majorities of a view have a node in common. A supervisor that takes the
place of a lost one has no vote before a view with its worker is committed, and that takes a
majority of the view before: a node that joins counts from the next change on. Its number is that of
a node that lives in the job, which knows all that it has ever accepted, or one that the job has
never had. So none votes in the name of a node that has forgotten what it promised, and a lost
node that wakes up counts for nothing in any view that was committed without it.
"""

from __future__ import annotations

from collections.abc import Iterable

from elaswave_plugin.core.agreement.view import MembershipView
from elaswave_plugin.core.layout.reserve import NOBODY_CAME, vacant


class Supervisors:
    """``nodes[s]`` is the node of slot s; ``lost``: evidence by slot that has no supervisor.

    Without ``lost``, those of the reserve have none. ``unused_node``: a number that no node of the
    job has had, nor any above it.
    """

    def __init__(
        self, nodes: tuple[int, ...], lost: dict[int, str] | None = None, *, unused_node: int = 0
    ) -> None:
        self.nodes = nodes
        self.lost = dict.fromkeys(vacant(nodes), NOBODY_CAME) if lost is None else dict(lost)
        self.unused_node = max(unused_node, 1 + max(nodes))
        self.changes = 0

    @property
    def leader(self) -> int:
        """The lowest slot whose supervisor lives."""
        return next(slot for slot in range(len(self.nodes)) if slot not in self.lost)

    def living(self) -> list[int]:
        """The slots that have a supervisor."""
        return [slot for slot in range(len(self.nodes)) if slot not in self.lost]

    def lose(self, slot: int, evidence: str) -> None:
        """The supervisor of a slot is gone."""
        self.lost[slot] = evidence
        self.changes += 1

    def take(self, slot: int, node: int) -> None:
        """Another supervisor, on this node, has the slot now."""
        self.lost.pop(slot, None)
        self.nodes = (*self.nodes[:slot], node, *self.nodes[slot + 1 :])
        self.unused_node = max(self.unused_node, 1 + node)
        self.changes += 1

    def nodes_of(self, slots: Iterable[int]) -> set[int]:
        """The nodes on which these supervisors are."""
        return {self.nodes[slot] for slot in slots}

    def minority_in(
        self, slots: Iterable[int], views: Iterable[MembershipView]
    ) -> MembershipView | None:
        """The first view of which these slots are no majority of the nodes; None: of all one."""
        heard = self.nodes_of(slots)
        for view in views:
            voters = set(view.nodes)
            if 2 * len(heard & voters) + (min(voters, default=None) in heard) <= len(voters):
                return view
        return None

    def may_have(self, node: int) -> bool:
        """Return whether a late supervisor may be on a node of this number."""
        return node in self.nodes_of(self.living()) or node >= self.unused_node
