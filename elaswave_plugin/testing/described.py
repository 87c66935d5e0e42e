"""Writes messages between agents as the lines of a golden script."""

from elaswave_plugin.core.agreement.effects import Note
from elaswave_plugin.core.agreement.messages import (
    Accuse,
    Admit,
    Begun,
    Committed,
    Done,
    Message,
    Prepare,
    Promise,
    Propose,
    Quiesced,
    Ready,
    Refuse,
    Report,
    Starts,
    StopBefore,
    Welcome,
)


def describe(message: Message) -> str:
    """Write a message as one line."""
    match message:
        case Prepare():
            return f"prepare {message.ballot}, has {message.accepted} lost={list(message.lost)}"
        case Promise():
            accepted = message.accepted.ballot if message.accepted else "no other"
            newer = f", knows {[view.epoch for view in message.newer]}" if message.newer else ""
            applied = message.applied_epoch
            return f"promise {message.ballot}, applied {applied}, has {accepted}{newer}"
        case Propose():
            return f"propose {message.proposal}"
        case Quiesced():
            without = [slot for slot, one in message.answers.items() if one.facts is None]
            return f"quiesced {message.ballot}" + (f" without {without}" if without else "")
        case Committed():
            return f"committed {message.proposal.ballot}"
        case Refuse():
            return f"refuse, promised {message.promised}"
        case Report():
            return f"report {message.failure}"
        case Begun():
            return f"{'before' if message.stands else 'begun'} {message.step}, {message.ballot}"
        case StopBefore():
            return f"stop before step {message.step}, {message.ballot}"
        case Ready():
            return f"ready: {message.arrival}"
        case Starts():
            return f"starts {message.worker}"
        case Admit():
            workers = ", ".join(map(str, message.workers))
            return f"admit {workers} on node {message.node}, {message.ballot}"
        case Welcome():
            epochs = [view.epoch for view in message.history]
            lost = f" lost={sorted(message.lost)}" if message.lost else ""
            workers = f" {', '.join(map(str, message.workers))}" if message.workers else ""
            return f"welcome{workers}, {message.ballot}{lost}, after {epochs}"
        case Accuse():
            return f"accuse {message.node}: {message.evidence}"
        case Done():
            return f"done {message.slot}, exit code {message.exit_code}"
        case _:
            return type(message).__name__.lower()


def describe_note(note: Note) -> str | None:
    """Return the line for a reader of a note, of those that a golden script shows."""
    fields = note.fields
    match note.kind:
        case "quorum_lost":
            return f"no quorum, heard {fields['nodes_heard']}"
        case "told_to_stop":
            return f"says that {fields['by']} has stopped it"
        case "detached":
            return f"says that {fields['slot']} is detached"
        case "view_committed" if fields.get("again"):
            return f"tells again of view {fields['epoch']}"
        case "worker_raised":
            return f"shows what worker {fields['slot']} raised {fields['when']}"
        case _:
            return None
