"""The nodes of a job and the slots that each has: leader, majorities, admissions (pure).

Voters are the nodes of a view, one vote each, given by the node's agent. Of two halves the one with
the lowest node counts as the majority, so that any two majorities of a view have a node in common.
A node that comes later has no vote before a view with a worker of it is committed, and that takes a
majority of the view before: it counts from the next change on. Its number is one that the job has
never had. So none votes in the name of a node that has forgotten what it promised, and a lost node
that wakes up counts for nothing in any view that was committed without it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from elaswave_plugin.core.agreement.messages import Proposal
from elaswave_plugin.core.agreement.reports import Reports
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Applicant:
    """An agent that asks for slots; ``address``: where it answers."""

    node: int
    slots: tuple[int, ...]
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """The leader's answer: let in if ``reason`` is None; ``later``: whether to ask again soon."""

    reason: str | None = None
    later: bool = False


def judge(
    applicant: Applicant,
    *,
    nodes: Nodes,
    view: MembershipView,
    reports: Reports,
    opened: Proposal | None,
    settled: bool,
) -> Admission:
    """Decide on a node that asks for empty slots, as the leader.

    On admission it tells all others (`Admit`), and tells the newcomer what it has to know
    (`Welcome`). From then on that is an agent like any other: it answers proposals and is lost when
    it cannot be reached. Who was not told of it (the leader died while it told them) does not hear
    it, and shuts it out where that one leads next. Its trainers build while training goes on and
    enter by an ordinary view change, as restarted trainers do. A node that has slots already may
    ask for more, and is given them by `Admit` alone.

    Nothing that the predecessor sent reaches any worker: all living agents have closed their links
    to it before they take the new one, its workers are in no view, and its incarnations are older.

    ``opened``: the leader's open proposal; ``settled``: no proposal is due by itself.
    """
    if reports.is_ending(view):
        return Admission(reason="the job is ending")
    empty = nodes.without_agent
    for slot in applicant.slots:
        if slot not in empty:
            return Admission(reason=f"worker {slot} has an agent")
    if not reports.started:
        return Admission(reason="the job has not started yet", later=True)
    if opened is not None or not settled or {*applicant.slots} & {*view.ranks}:
        return Admission(reason="a change of the view is open", later=True)
    if not nodes.lives(applicant.node) and applicant.node < nodes.unused_node:
        return Admission(reason=f"node {applicant.node} was lost", later=True)
    return Admission()


def next_incarnation(slot: int, history: list[MembershipView], reports: Reports) -> int:
    """Return an incarnation newer than every trainer that the slot has had."""
    known = [reports.incarnations.get(slot, 0)]
    for view in history:
        known += [worker.incarnation for worker in view.workers if worker.slot == slot]
    known += [worker.incarnation for worker in reports.failures if worker.slot == slot]
    return 1 + max(known)
