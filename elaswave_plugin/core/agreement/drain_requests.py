"""The choice of workers that stay although asked to leave: without them the job would end."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from elaswave_plugin.core.agreement.reports import Reports
from elaswave_plugin.core.agreement.view import MembershipView, WorkerId
from elaswave_plugin.core.layout.layout import why_needed


def who_stays(
    view: MembershipView,
    opened: MembershipView | None,
    reports: Reports,
    *,
    lost: Iterable[int],
    layout: Mapping[str, Any] | None,
) -> dict[WorkerId, str]:
    """Say why each of them stays; the first asked leaves first, and all leave if all save first.

    ``opened``: the view that is proposed; workers not in it have left. ``lost``: slots whose
    supervisor is lost. ``layout``: as JSON, None in a data-parallel job.
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
