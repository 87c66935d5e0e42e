"""One line about a job that is done: steps, time, losses, samples lost or repeated."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from itertools import pairwise
from pathlib import Path

from elaswave_plugin.core.audit import batch_sizes, counting_views, lost_and_repeated
from elaswave_plugin.core.membership import MembershipView, departed
from elaswave_plugin.tracking.events import LEDGER_FILE, STEPS_FILE, read_lines

# What is read in about a second; a longer job is judged by `elaswave report`.
_MOST_BYTES = 64 * 2**20


def sums_up(slot: int, view: MembershipView, lost: Collection[int]) -> bool:
    """Tell whether the supervisor of ``slot`` says the line: the first of ``view`` that is left."""
    return next((one for one in view.ranks if one not in lost), None) == slot


def job_summary(
    history: Sequence[MembershipView], completed: int, started_s: float, run_dir: str | None
) -> str:
    """Return the line of a job that began at ``started_s`` by the wall clock, and ends now.

    ``history``: all its views, in order; ``completed``: steps of the training, those before a
    checkpoint among them; ``run_dir``: with the ledger of all workers.
    """
    steps = "1 step" if completed == 1 else f"{completed} steps"
    done = (
        f"the job is done: {steps} completed, {_changes(history)}, {_time(time.time() - started_s)}"
    )
    return done if run_dir is None else f"{done}; {_samples(Path(run_dir))}"


def _changes(history: Sequence[MembershipView]) -> str:
    """Count workers that were lost, left as they were told to, and came."""
    lost = left = came = 0
    for before, after in pairwise(history):
        gone = before.workers - after.workers
        told = sum(departed(after.reason, worker.slot) for worker in gone)
        left += told
        lost += len(gone) - told
        came += len(after.workers - before.workers)
    text = f"{lost} loss{'' if lost == 1 else 'es'} survived" if lost else "no worker lost"
    text += f", {left} departure{'' if left == 1 else 's'}" if left else ""
    return text + (f", {came} arrival{'' if came == 1 else 's'}" if came else "")


def _time(seconds: float) -> str:
    whole = max(0, round(seconds))
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _samples(run_dir: Path) -> str:
    files = run_dir / STEPS_FILE, run_dir / LEDGER_FILE
    try:
        if sum(file.stat().st_size for file in files) > _MOST_BYTES:
            return f"`elaswave report {run_dir}` counts samples lost or repeated"
        steps, ledger = map(read_lines, files)
    except OSError as error:
        return f"samples lost or repeated are not known: {error}"
    views = counting_views(steps)
    sizes = batch_sizes(views, ledger, 1 + max(views, default=-1))
    lost, repeated = lost_and_repeated(views, ledger, batches=sizes)
    return f"samples: {lost} lost, {repeated} repeated"
