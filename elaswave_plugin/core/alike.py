"""Whether all workers that run the same code have failed in it alike, at one step (pure).

That is an error of the program, and not the loss of workers: it would meet those that are started
again as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from elaswave_plugin.core.agreement_messages import Raised, Report
from elaswave_plugin.core.layout import ParallelLayout
from elaswave_plugin.core.membership import MembershipView


def failed_alike(
    view: MembershipView,
    reports: Iterable[Report],
    lost: Iterable[int],
    layout: Mapping[str, Any] | None,
) -> str | None:
    """What all workers, or all of a stage, have failed with; None where they have not.

    ``reports``: all failures that count, also of workers that an earlier view had: those that are
    left redo the step, and meet there what the first one met. ``lost``: slots whose supervisor is.
    ``layout``: as JSON, None without stages. One worker alone is its own loss.
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
    """Who runs the same code, and how they are called: everybody, or each stage."""
    yield "", set(view.ranks)
    if layout is not None:
        for number, groups in enumerate(ParallelLayout.from_json(layout).stages):
            members = {slot for group in groups for slot in group.slots}
            yield f" of stage {number}", members & set(view.ranks)
