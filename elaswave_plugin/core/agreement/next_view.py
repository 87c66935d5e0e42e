"""The choice of the next view to propose, if any, and of where all stop for it (pure).

Urgent causes come first: failures, a view that an earlier leader may have committed, a broken
link. Arrivals and departures wait for a boundary between two steps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from elaswave_plugin.core.agreement.messages import Begun, Proposal
from elaswave_plugin.core.agreement.reports import Reports, event_of
from elaswave_plugin.core.agreement.view import (
    MembershipView,
    WorkerId,
    grown_view,
    next_view,
)
from elaswave_plugin.core.layout.layout import why_needed

LAST_CALL = "every worker was told to leave, and they write a last checkpoint first"


class NextView(NamedTuple):
    """A view to propose; ``boundary``: only once the trainers are between two steps."""

    view: MembershipView
    boundary: bool = False


def find_next_view(
    base: MembershipView,
    opened: Proposal | None,
    reports: Reports,
    *,
    lost: Mapping[int, str],
    outside: Iterable[int],
    layout: Mapping[str, Any] | None,
    must_propose: bool,
    now_s: float,
) -> NextView | None:
    """Return the view that a leader proposes on top of ``base``, or None if nothing changes.

    ``opened``: its open proposal; ``lost``: evidence by slot that has no agent; ``outside``:
    members of ``base`` that were never told of it; ``layout``: as JSON, None in a data-parallel
    job; ``must_propose``: ``base`` itself is not known to be committed everywhere.
    """
    events = reports.events(base, lost, now_s)
    for slot in outside:
        events.append(event_of(base, slot, "leave", "it had not been let in yet", now_s))
    change = next_view(base, events, now_s)
    is_severed = reports.severed is not None and now_s >= reports.severed[1]
    if change is not None or must_propose or is_severed:
        # Who has finished answers no more: a script that differs may end before the others'.
        for slot in reports.done:
            events.append(event_of(base, slot, "leave", "it had finished its work", now_s))
        change = next_view(base, events, now_s)
        if change is None and reports.severed is not None and is_severed:
            return NextView(replace(base, reason=reports.severed[0]))
        if change is not None and not _goes_on(change.ranks, layout):
            # With those that wait, or by them alone, from what these have sealed.
            grown = grown_view(change, reports.waiting(lost))
            if grown is not None:
                change = replace(grown, reason=f"{change.reason}; {grown.reason}")
        return NextView(change or base)
    if opened is not None and not opened.boundary:
        return NextView(opened.view)
    if reports.done:
        return None  # nobody begins another step
    if opened is None and reports.all_save_last(base):
        # This change tells them that all of them have to go, and from which step.
        return None if base.reason == LAST_CALL else NextView(replace(base, reason=LAST_CALL), True)
    if opened is None:
        between = reports.between_steps(base, lost, now_s)
        return None if between is None else NextView(between, boundary=True)
    newcomers = opened.view.workers - base.workers
    if all(reports.is_ready(worker, lost) for worker in newcomers):
        return NextView(opened.view, boundary=True)
    # Workers that have stopped for the open proposal go on as they were.
    gone = ", ".join(sorted(map(str, newcomers)))
    return NextView(replace(base, reason=f"worker {gone}, about to join, is gone"))


def _goes_on(slots: Collection[int], layout: Mapping[str, Any] | None) -> bool:
    """Return whether the job can go on with these workers only."""
    return bool(slots) and (layout is None or why_needed(layout, slots) is None)


def boundary_of(nodes: Iterable[int], begun: Mapping[int, Begun]) -> int | None:
    """Return the step before which all members stop; None if it is not known yet.

    ``nodes``: of the members; ``begun``: how far those of a node are, as its agent has told.
    """
    standing = [one.step for one in begun.values() if one.stands]
    if standing:
        return standing[0]  # nobody completes the step before which one of them stands
    steps = [begun[node].step if node in begun else None for node in nodes]
    told = [step for step in steps if step is not None]
    return 1 + max(told) if told and len(told) == len(steps) else None


def who_stays(
    view: MembershipView,
    opened: MembershipView | None,
    reports: Reports,
    *,
    lost: Iterable[int],
    layout: Mapping[str, Any] | None,
) -> dict[WorkerId, str]:
    """Say why each of them stays; the first asked leaves first, and all leave if all save first.

    ``opened``: the view that is proposed; who is not in it has left. ``lost``: slots that have no
    agent. ``layout``: as JSON, None in a data-parallel job.
    """
    stays: dict[WorkerId, str] = {}
    if reports.all_save_last(view):
        return stays
    asked = [worker for worker in reports.notices if worker in reports.asked and worker in view]
    free = [worker for worker in asked if opened is None or worker in opened]
    going = {worker.slot for worker in reports.notices if worker in view}
    going |= reports.gone_from(view, lost)
    going -= {worker.slot for worker in free}
    for worker in free:
        why = _why_needed(view, going | {worker.slot}, layout)
        if why is None:
            going.add(worker.slot)
        else:
            stays[worker] = why
    return stays


def _why_needed(
    view: MembershipView, going: Collection[int], layout: Mapping[str, Any] | None
) -> str | None:
    """Say why the job of a view would end without these slots."""
    rest = set(view.ranks).difference(going)
    if not rest:
        return "all others leave"
    return None if layout is None else why_needed(layout, rest)
