"""One line about a job that is done: steps, time, losses, samples lost or repeated."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from elaswave_plugin.core.agreement.view import MembershipView, departed
from elaswave_plugin.core.step.audit import batch_sizes, counting_views, lost_and_repeated
from elaswave_plugin.tracking.events import LEDGER_FILE, STEPS_FILE, read_lines

# What is read in about a second; a longer job is judged by `elaswave report`.
_MOST_BYTES = 64 * 2**20


def sums_up(node: int, view: MembershipView, lost: Collection[int]) -> bool:
    """Tell whether the agent of ``node`` says the line: the first of ``view`` that is left."""
    return next((one for one in view.nodes if one not in lost), None) == node


@dataclass(slots=True)
class Changes:
    """The counts of workers that were lost, left as told to and came, up to ``view``."""

    view: MembershipView
    lost: int = 0
    left: int = 0
    came: int = 0

    def follow(self, view: MembershipView) -> None:
        """Count what has changed since the view before."""
        gone = self.view.workers - view.workers
        told = sum(departed(view.reason, worker.slot) for worker in gone)
        self.left += told
        self.lost += len(gone) - told
        self.came += len(view.workers - self.view.workers)
        self.view = view

    def __str__(self) -> str:
        lost, left, came = self.lost, self.left, self.came
        text = f"{lost} loss{'' if lost == 1 else 'es'} survived" if lost else "no worker lost"
        text += f", {left} departure{'' if left == 1 else 's'}" if left else ""
        return text + (f", {came} arrival{'' if came == 1 else 's'}" if came else "")


def job_summary(changes: Changes, completed: int, started_s: float, run_dir: str | None) -> str:
    """Return the line of a job that began at ``started_s`` by the wall clock, and ends now.

    ``changes``: of all its views; ``completed``: steps of the training, those before a checkpoint
    among them; ``run_dir``: with the ledger of all workers.
    """
    steps = "1 step" if completed == 1 else f"{completed} steps"
    done = f"the job is done: {steps} completed, {changes}, {_time(time.time() - started_s)}"
    return done if run_dir is None else f"{done}; {_samples(Path(run_dir))}"


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
