"""The lines that tell a job's user what its agreement decides (standard library only)."""

from __future__ import annotations

from collections.abc import Sequence

from elaswave_plugin.core.agreement.effects import Note
from elaswave_plugin.core.agreement.view import MembershipView


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
