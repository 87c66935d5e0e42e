"""The test for one error in all workers that run the same code, at one step (pure).

Such an error is in the program, not a loss of workers: restarted workers would meet it as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from elaswave_plugin.core.agreement.messages import Raised, Report
from elaswave_plugin.core.agreement.view import MembershipView
from elaswave_plugin.core.layout.layout import ParallelLayout


def failed_alike(
    view: MembershipView,
    reports: Iterable[Report],
    lost: Iterable[int],
    layout: Mapping[str, Any] | None,
) -> str | None:
    """Return the error in which all workers, or all of a stage, have failed; None if they have not.

    ``reports``: all failures that count, also of workers in an earlier view only: survivors redo
    the step, and meet the same error as the first one. ``lost``: slots whose agent is lost.
    ``layout``: as JSON, None without stages. A failure of one worker alone is an ordinary loss.
    """
    failed: dict[tuple[str, str, str], dict[int, Raised]] = {}
    gone = set(lost)
    for report in reports:
        slot = report.failure.slot
        if report.raised is not None:
            failed.setdefault(report.raised.key, {})[slot] = report.raised
        elif report.failure.worker in view:
            gone.add(slot)
    for alike in failed.values():
        for name, crew in _crews(view, layout):
            left = crew - gone
            if len(alike) > 1 and left and left <= alike.keys():
                who = f"all workers{name} that were left" if crew & gone else f"all workers{name}"
                first = alike[min(alike)]
                return f"{who} failed alike {first.when}: {first}"
    return None


def _crews(
    view: MembershipView, layout: Mapping[str, Any] | None
) -> Iterable[tuple[str, set[int]]]:
    """Yield the name and slots of each set that runs the same code: all workers, and each stage."""
    yield "", set(view.ranks)
    if layout is not None:
        for number, groups in enumerate(ParallelLayout.from_json(layout).stages):
            members = {slot for group in groups for slot in group.slots}
            yield f" of stage {number}", members & set(view.ranks)
