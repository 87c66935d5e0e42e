"""The nodes of a job and the slots that each has: the leader and the majorities (pure).

Voters are the nodes of a view, one vote each, given by the node's agent. Of two halves the one with
the lowest node counts as the majority, so that any two majorities of a view have a node in common.
A node that comes later has no vote before a view with a worker of it is committed, and that takes a
majority of the view before: it counts from the next change on. Its number is one that the job has
never had. So none votes in the name of a node that has forgotten what it promised, and a lost node
that wakes up counts for nothing in any view that was committed without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from elaswave_plugin.core.agreement.view import MembershipView
from elaswave_plugin.core.layout.reserve import NOBODY_CAME, NOWHERE, vacant


class Nodes:
    """``of_slots[s]`` is the node of slot s, `NOWHERE` where none has it.

    ``lost``: evidence by node; ``empty``: evidence by slot that no node has, at the launch those of
    the reserve.
    """

    def __init__(
        self,
        of_slots: tuple[int, ...],
        lost: Mapping[int, str] | None = None,
        empty: Mapping[int, str] | None = None,
        *,
        unused_node: int = 0,
    ) -> None:
        self.of_slots = of_slots
        self.lost = dict(lost or {})
        self.empty = dict.fromkeys(vacant(of_slots), NOBODY_CAME) if empty is None else dict(empty)
        self.unused_node = max(unused_node, 1 + max(of_slots))
        self.changes = 0
        self._changed()

    def _changed(self) -> None:
        """Note what is asked for again and again, of thousands of nodes."""
        self._slots: dict[int, list[int]] = {}
        for slot, node in enumerate(self.of_slots):
            self._slots.setdefault(node, []).append(slot)
        self._living = sorted(self._slots.keys() - {NOWHERE} - self.lost.keys())
        lost = {slot: why for node, why in self.lost.items() for slot in self._slots.get(node, ())}
        self._without_agent = dict(sorted((self.empty | lost).items()))
        self.changes += 1

    @property
    def leader(self) -> int:
        """The lowest node that lives; NOWHERE once all were told to leave, and have."""
        return self._living[0] if self._living else NOWHERE

    def living(self) -> list[int]:
        """The nodes that have slots and are not lost."""
        return list(self._living)

    def lives(self, node: int) -> bool:
        """Return whether a node has slots and is not lost."""
        return node in self._slots and node not in self.lost and node != NOWHERE

    def slots_of(self, node: int) -> list[int]:
        """The slots of a node."""
        return list(self._slots.get(node, ()))

    @property
    def without_agent(self) -> dict[int, str]:
        """The slots without an agent, with the evidence of its loss."""
        return self._without_agent

    def lose(self, node: int, evidence: str) -> None:
        """The agent of a node is gone."""
        self.lost[node] = evidence
        self._changed()

    def vacate(self, slot: int, evidence: str) -> None:
        """No node has the slot any more."""
        self.empty[slot] = evidence
        self._give(slot, NOWHERE)

    def take(self, slot: int, node: int) -> None:
        """A node has the slot from now on."""
        self.empty.pop(slot, None)
        self.unused_node = max(self.unused_node, 1 + node)
        self._give(slot, node)

    def _give(self, slot: int, node: int) -> None:
        self.of_slots = (*self.of_slots[:slot], node, *self.of_slots[slot + 1 :])
        # A node without slots is nobody's, whatever became of it.
        self.lost = {one: why for one, why in self.lost.items() if one in self.of_slots}
        self._changed()

    def minority_in(
        self, nodes: Iterable[int], views: Iterable[MembershipView]
    ) -> MembershipView | None:
        """The first view of which these nodes are no majority; None: of all one."""
        heard = {*nodes}
        for view in views:
            voters = view.voters
            if 2 * len(heard & voters) + (min(voters, default=None) in heard) <= len(voters):
                return view
        return None
