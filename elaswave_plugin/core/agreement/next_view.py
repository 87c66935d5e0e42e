"""The choice of the next view to propose, of where all stop for it, or of the job's end (pure).

Urgent causes come first: failures, a view that an earlier leader may have committed, a broken
link. Arrivals and departures wait for a boundary between two steps.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from elaswave_plugin.core.agreement.messages import Begun, Proposal, Raised, Report
from elaswave_plugin.core.agreement.reports import Reports, event_of
from elaswave_plugin.core.agreement.view import (
    MembershipView,
    WorkerId,
    grown_view,
    next_view,
)
from elaswave_plugin.core.layout.layout import ParallelLayout, why_needed
from elaswave_plugin.errors import EXIT_CONFIGURATION, EXIT_FAILED, EXIT_REQUEUE, EXIT_TOLD

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


def failed_alike(
    view: MembershipView,
    reports: Iterable[Report],
    lost: Iterable[int],
    layout: Mapping[str, Any] | None,
) -> str | None:
    """Return the error in which all workers, or all of a stage, have failed; None if they have not.

    Such an error is in the program, not a loss of workers: restarted workers would meet it as well.
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
