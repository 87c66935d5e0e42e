"""The admission of a node that asks for empty slots (pure).

The newcomer asks the leader; `judge` answers. On admission the leader tells all others (`Admit`),
and tells the newcomer what it has to know (`Welcome`). From then on it is an agent like any other:
it answers proposals and is lost when it cannot be reached. Who was not told of it (the leader died
while it told them) does not hear it, and shuts it out where that one leads next. Its trainers build
while training goes on and enter by an ordinary view change, as restarted trainers do. It has no
vote until then (see `quorum`). A node that has slots already may ask for more, and is given them by
`Admit` alone.

Nothing that the predecessor sent reaches any worker: all living agents have closed their links to
it before they take the new one, its workers are in no view, and its incarnations are older.
"""

from __future__ import annotations

from dataclasses import dataclass

from elaswave_plugin.core.agreement.messages import Proposal
from elaswave_plugin.core.agreement.quorum import Nodes
from elaswave_plugin.core.agreement.reports import Reports
from elaswave_plugin.core.agreement.view import MembershipView


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
    """Decide on an applicant, as the leader.

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
