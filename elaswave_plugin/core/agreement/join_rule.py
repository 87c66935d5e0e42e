"""The admission of another supervisor in the place of a lost one (pure).

The newcomer opens a link to every supervisor that lives, and then asks the leader. `judge` answers.
On admission the leader tells all others (`Admit`), which replace the old link by the new one, and
tells the newcomer what it has to know (`Welcome`). Once all of them use its links, and not before,
it is a supervisor like any other: it answers proposals, may lead, and is lost when its link breaks.
If one of them does not use its link (the leader died while it told them), the newcomer gives up,
and may ask again. Otherwise it could declare lost those that do not answer it, and kill them. Its
trainer builds while training goes on and enters by an ordinary view change, as a restarted trainer
does. It has no vote until then (see `supervisors`).

Nothing that the predecessor sent reaches any worker: all living supervisors have closed their links
to it before they take the new one, its worker is in no view, and its incarnations are older.
"""

from __future__ import annotations

from dataclasses import dataclass

from elaswave_plugin.core.agreement.messages import Proposal
from elaswave_plugin.core.agreement.quorum import Supervisors
from elaswave_plugin.core.agreement.reports import Reports
from elaswave_plugin.core.agreement.view import MembershipView


@dataclass(frozen=True, slots=True, kw_only=True)
class Applicant:
    """A supervisor that asks for a slot; ``linked``: the slots to which it has opened links.

    ``address``: where it answers; it tells apart several applicants for the same slot.
    """

    slot: int
    node: int
    address: str
    linked: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """The leader's answer: let in if ``reason`` is None; ``later``: whether to ask again soon."""

    reason: str | None = None
    later: bool = False


def judge(
    applicant: Applicant,
    *,
    supervisors: Supervisors,
    view: MembershipView,
    reports: Reports,
    opened: Proposal | None,
    settled: bool,
) -> Admission:
    """Decide on an applicant, as the leader.

    ``opened``: the leader's open proposal; ``settled``: no proposal is due by itself.
    """
    slot = applicant.slot
    if reports.is_ending(view):
        return Admission(reason="the job is ending")
    if slot not in supervisors.lost:
        return Admission(reason=f"worker {slot} has a supervisor")
    if not reports.started:
        return Admission(reason="the job has not started yet", later=True)
    if opened is not None or not settled or slot in view.ranks:
        return Admission(reason="a change of the view is open", later=True)
    if not supervisors.may_have(applicant.node):
        return Admission(reason=f"node {applicant.node} was lost", later=True)
    missing = set(supervisors.living()) - applicant.linked
    if missing:
        slots = ", ".join(map(str, sorted(missing)))
        return Admission(reason=f"it has no link to worker {slots}", later=True)
    return Admission()


def next_incarnation(slot: int, history: list[MembershipView], reports: Reports) -> int:
    """Return an incarnation newer than every trainer that the slot has had."""
    known = [reports.incarnations.get(slot, 0)]
    for view in history:
        known += [worker.incarnation for worker in view.workers if worker.slot == slot]
    known += [worker.incarnation for worker in reports.failures if worker.slot == slot]
    return 1 + max(known)
