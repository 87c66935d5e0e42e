"""The lines that tell a job's user what its agreement decides, and in the end what became of it."""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from elaswave_plugin.core.agreement.messages import Note
from elaswave_plugin.core.agreement.view import MembershipView, departed
from elaswave_plugin.core.step.audit import batch_sizes, counting_views, lost_and_repeated
from elaswave_plugin.tracking.events import LEDGER_FILE, STEPS_FILE, read_lines


def words_of(note: Note) -> str | None:
    """The line for a note, None for one that only the events tell."""
    fields = note.fields
    match note.kind:
        case "worker_raised" if fields["traceback"]:
            text = fields["traceback"].rstrip()
            return f"worker {fields['slot']} failed {fields['when']}:\n{text}"
        case "job_over" if fields["exit_code"]:
            return f"the job stops: {fields['reason']}"
        case "detached":
            trains = "trains without elaswave, and no loss will be survived"
            did = trains if fields["trains"] else "has ended, and elaswave never attached"
            return f"worker {fields['slot']} {did}: {fields['missing']}"
        case "notice_void":
            return f"worker {fields['slot']} stays: {fields['why']}; end the job instead"
        case "node_admitted":
            slots, at = ", ".join(map(str, fields["slots"])), fields["address"]
            return f"node {fields['node']} at {at} is let in, with worker {slots}"
        case "told_to_stop":
            return f"node {fields['node']} ends: node {fields['by']} stops it: {fields['reason']}"
        case "shut_out":
            return f"node {fields['node']} ends: {fields['reason']}"
        case "quorum_lost":
            heard, of = fields["nodes_heard"], fields["of"]
            none = f"none of the training's nodes {of}"
            reached = f"only nodes {heard} of {of}" if heard else none
            return f"{reached} can be reached: no majority, waiting"
    return None


def words_of_view(view: MembershipView, before: Sequence[MembershipView]) -> str | None:
    """Say how the job goes on in ``view``; ``before``: the views that it had.

    None for a job's first view, where that has several workers.
    """
    count, nodes = len(view.ranks), {*view.nodes}
    workers = f"{count} worker{'s' if count > 1 else ''}"
    alone = count == 1
    if alone:
        workers += ", and no other worker can take over from it"
    elif len(nodes) == 1 and any(len({*one.nodes}) > 1 for one in before):
        workers += f", all on node {nodes.pop()}, from which no other node can take over"
    if view.epoch > 1:
        return f"{view.reason}; the job goes on with {workers} (view {view.epoch})"
    return f"the job has {workers}; start two or more" if alone else None


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
