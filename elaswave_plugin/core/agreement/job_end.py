"""The decision whether the job is over, from what is known of its workers (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elaswave_plugin.core.agreement.alike import failed_alike
from elaswave_plugin.core.agreement.messages import Report
from elaswave_plugin.core.agreement.next_view import LAST_CALL
from elaswave_plugin.core.agreement.reports import Reports
from elaswave_plugin.core.agreement.view import MembershipView
from elaswave_plugin.errors import EXIT_CONFIGURATION, EXIT_FAILED, EXIT_REQUEUE, EXIT_TOLD


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The end of the job; without a reason, only the last exits are still awaited."""

    reason: str | None = None
    exit_code: int = 0


def ending_of(
    view: MembershipView,
    reports: Reports,
    lost: Mapping[int, str],
    *,
    joined: bool,
    layout: Mapping[str, Any] | None = None,
) -> Ending | None:
    """Decide how the job ends, or None while it goes on.

    ``view``: the newest committed one; ``lost``: evidence by slot of each lost agent;
    ``joined``: some trainer has joined the job; ``layout``: as JSON, with stages.
    """
    gone, failed = reports.gone_from(view, lost), reports.failed_in(view)
    for report in failed:
        # A configuration that a later worker refuses still suits the workers in the job.
        if report.exit_code == EXIT_CONFIGURATION and not report.failure.incarnation:
            reason = _sentence(report, "it refuses its configuration")
            return Ending(reason=reason, exit_code=EXIT_CONFIGURATION)
    if not reports.started and gone - reports.done.keys():
        return _at_start(view, failed, gone, lost, reports.lacking)
    alike = failed_alike(view, reports.failures.values(), lost, layout)
    if alike is not None:
        return Ending(reason=alike, exit_code=EXIT_FAILED)
    if all(slot in gone or slot in reports.done for slot in view.ranks):
        # Who comes to a job with stages is told its place by those that are there.
        if layout is None and not reports.is_ending(view) and reports.waiting(lost):
            return None  # those are let in, and what they need may be sealed
        return _with_nobody_left(view, reports, failed, lost)
    if reports.all_leave(view) and not reports.all_save_last(view):
        return Ending(reason="every worker was told to leave", exit_code=EXIT_TOLD)
    if view.epoch == 0 and reports.done and joined:
        early = ", ".join(map(str, sorted(reports.done)))
        return Ending(reason=f"worker {early} ended before it joined the job", exit_code=1)
    return None


def no_quorum(heard: int, nodes: int, causes: str) -> str:
    """Say why this part of a job cannot go on; ``heard``: nodes of the view that it can reach."""
    if heard:
        return f"only {heard} of {nodes} nodes can be reached, which is no majority ({causes})"
    return f"no node with the training's state can be reached, and this one has none ({causes})"


def _at_start(
    view: MembershipView,
    failed: list[Report],
    gone: set[int],
    lost: Mapping[int, str],
    lacking: str | None,
) -> Ending:
    """End the job on a loss before all workers have sealed: none can be replaced before that.

    ``lacking``: what a script lacks that did not attach; None if all attached so far.
    """
    codes = [report.exit_code for report in failed if report.exit_code is not None]
    # A script that ended by itself would do so again.
    code = (max(codes) or EXIT_FAILED) if codes else None
    why = "the first snapshot of every worker was not sealed yet, so the job stops"
    if lacking is not None:
        why = f"elaswave is not attached, so the job stops: {lacking}"
    elif code is None:
        why += f" (exit code {EXIT_REQUEUE}: queue it again)"
    if failed:
        sentence = _sentence(failed[0], why)
    else:
        slot = min(gone)
        node = dict(zip(view.ranks, view.nodes, strict=True))[slot]
        sentence = f"worker {slot} (node {node}) was lost: {lost[slot]}; {why}"
    return Ending(reason=sentence, exit_code=code or EXIT_REQUEUE)


def _with_nobody_left(
    view: MembershipView, reports: Reports, failed: list[Report], lost: Mapping[int, str]
) -> Ending:
    """End a job in which no worker works any more, once those that finished have exited."""
    codes = [reports.done[slot] for slot in reports.done if slot not in lost]
    if None in codes:
        return Ending()
    bad = [code for code in codes if code]
    bad += [report.exit_code for report in failed if report.exit_code]
    if reports.done and not bad and view.reason == LAST_CALL:
        # There is work left, for the next life of the job.
        return Ending(reason="every worker has left, as it was told to", exit_code=EXIT_TOLD)
    if late := reports.failed_at_the_end():
        reason = _sentence(late[0], "the others have finished")
        return Ending(reason=reason, exit_code=late[0].exit_code or EXIT_FAILED)
    if reports.done:
        return Ending(reason="all workers have finished", exit_code=bad[0] if bad else 0)
    if failed:
        # A worker that ended early with exit code 0 has not done its work.
        code = failed[0].exit_code or EXIT_FAILED
        return Ending(reason=_sentence(failed[0], "no live worker remains"), exit_code=code)
    return Ending(reason="no live worker remains", exit_code=EXIT_FAILED)


def _sentence(report: Report, consequence: str) -> str:
    failure, raised = report.failure, report.raised
    if raised is not None:  # the exception says enough
        return f"worker {failure.slot} failed {raised.when}: {raised}"
    return f"worker {failure.slot}: {failure.evidence}; {consequence}"
