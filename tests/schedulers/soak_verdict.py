"""Judges a long job: equal to the undisturbed one, no loss that nobody drew, nothing that grows."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from benchmarks.recovery import median_and_max
from elaswave_plugin.observer.observer import audit_samples, disagreeing_steps
from elaswave_plugin.observer.run import RunFiles, counted_steps
from tests.faults.harness import Outcome
from tests.schedulers.soak_losses import Loss
from tests.schedulers.soak_watch import Watch, grows

WANTED_LOSSES = 60


def rows_of(run: RunFiles, losses: Sequence[Loss]) -> list[dict[str, Any]]:
    """Return, for each loss, when all had completed the next step and when it was back."""
    times = [[line["time_s"] for line in lines] for lines in counted_steps(run).values()]
    steps = [(min(of_step), max(of_step)) for of_step in times]
    started = run.of_kind("agent_started")
    rows = []
    for loss in losses:
        if loss.kind == "agent":
            back = (e["time_s"] for e in started if e["node"] == loss.node)
        else:
            back = (line["time_s"] for line in run.steps if _is_successor(line, loss))
        row = {name: one for name, one in asdict(loss).items() if name != "worker_pid"}
        next_s = min((last for first, last in steps if first > loss.at_s), default=None)
        back_s = min((time_s for time_s in back if time_s > loss.at_s), default=None)
        row["next_step_s"] = None if next_s is None else round(next_s - loss.at_s, 3)
        row["back_s"] = None if back_s is None else round(back_s - loss.at_s, 3)
        rows.append(row)
    return rows


def _is_successor(line: Mapping[str, Any], loss: Loss) -> bool:
    return bool(line["slot"] == loss.slot and line["pid"] != loss.worker_pid)


def by_kind(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Count losses and returns of each kind, with their times."""
    found = {}
    for kind in sorted({row["kind"] for row in rows}):
        these = [row for row in rows if row["kind"] == kind]
        times = {
            name: [row[name] for row in these if row[name] is not None]
            for name in ("next_step_s", "back_s")
        }
        found[kind] = {
            "losses": len(these),
            "returns": len(times["back_s"]),
            "of_the_leader": sum(row["is_leader"] for row in these),
            "of_node_0": sum(row["node"] == 0 for row in these),
            "while_others_were_away": sum(row["away"] > 0 for row in these),
            **{name: median_and_max(values) for name, values in times.items()},
        }
    return found


def failures(
    run: Outcome, reference: Outcome, losses: Sequence[Loss], watch: Watch
) -> Iterator[str]:
    """Say what does not hold, one sentence each."""
    ours, theirs = run.trace(), reference.trace()
    differ = [step for step in theirs if ours.get(step) != theirs[step]]
    if differ or ours.keys() != theirs.keys():
        yield f"not bit-equal in {len(differ)} steps, from {differ[:3]} on"
    if steps := disagreeing_steps(run.files):
        yield f"workers tell different losses of steps {steps[:3]}"
    if (found := audit_samples(run.files, batches=run.spec.batches)) != (0, 0):
        yield f"samples lost and repeated: {found}"
    if run.orphans:
        yield f"processes are left: {run.orphans}"
    drawn = {loss.worker_pid for loss in losses if loss.kind != "agent"}
    ended = run.events("worker_exited")
    if failed := [e for e in ended if e["pid"] not in drawn and e["status"] != "exit code 0"]:
        yield f"{len(failed)} workers were lost that nobody drew, such as {failed[0]}"
    views = [set(view["ranks"]) for view in run.events("view_committed")]
    gone = Counter(slot for one, after in pairwise(views) for slot in one - after)
    if gone != (wanted := Counter(loss.slot for loss in losses if loss.kind != "agent")):
        yield f"views lost these slots so often: {gone}, drawn were {wanted}"
    if hangs := run.events("hang_found"):
        yield f"{len(hangs)} hangs were found and none was made, such as {hangs[0]}"
    for row in watch.growth():
        if grows(row):
            yield f"it grows: {row}"


def failures_of_losses(rows: Sequence[Mapping[str, Any]], *, is_whole: bool) -> Iterator[str]:
    """Say which never came back, and what a whole hour lacks."""
    if away := [row["number"] for row in rows if row["back_s"] is None]:
        yield f"never came back: losses {away}"
    if not is_whole:
        return
    if len(rows) < WANTED_LOSSES:
        yield f"{len(rows)} losses, wanted {WANTED_LOSSES}"
    if 3 * sum(row["kind"] == "node" for row in rows) < len(rows):
        yield "less than a third of the losses were whole nodes"
