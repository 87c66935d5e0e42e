"""Asks a running job for a change between two steps: a worker leaves, or layers move."""

import re
from collections.abc import Sequence
from pathlib import Path

from elaswave_plugin.cli.status import Contacts, ask_job, ask_worker
from elaswave_plugin.core.layout.layout import ParallelLayout
from elaswave_plugin.errors import ConfigurationError


def slot_and_folder(words: Sequence[str], *, node: int | None) -> tuple[int, Path | None]:
    """Read ``SLOT [DIR]``, or ``[DIR]`` where a ``node`` is given in place of a slot, which is 0.

    Raises ConfigurationError.
    """
    if node is not None:
        if len(words) > 1:
            raise ConfigurationError(f"--node {node} and SLOT {words[0]} are given, wanted one")
        return 0, Path(words[0]) if words else None
    if not words or len(words) > 2 or not words[0].isdecimal():
        given = " ".join(words) or "nothing"
        raise ConfigurationError(f"wanted SLOT DIR, or --node N DIR, and {given} is given")
    return int(words[0]), Path(words[1]) if words[1:] else None


def drain_worker(contacts: Contacts, *, slot: int, reason: str, timeout_s: float) -> str:
    """Give the worker of `slot` notice; returns what will happen, in a sentence.

    `contacts`: some agents of the job. It does not wait for the worker to have left.
    Raises ConfigurationError where there is no such worker, or its agent refuses or is silent.
    """
    status = ask_job(contacts, timeout_s)
    live = status["view"]["ranks"]
    if slot not in live:
        raise ConfigurationError(
            f"worker {slot} is not in the job, wanted one of {' '.join(map(str, sorted(live)))}"
        )
    answer = ask_worker(contacts, status, slot, {"t": "drain", "reason": reason}, timeout_s)
    if answer["refused"] is not None:
        raise ConfigurationError(f"worker {slot} stays: {answer['refused']}")
    return f"worker {slot} leaves between two steps; {contacts.shows()} shows when it has"


def drain_node(contacts: Contacts, *, node: int, reason: str, timeout_s: float) -> str:
    """Give notice to all workers of a node; returns what will happen, in a sentence.

    As `drain_worker`, and raises ConfigurationError where some of them stay.
    """
    status = ask_job(contacts, timeout_s)
    live = {one["slot"]: one["node"] for one in status["workers"]}
    live = {slot: live[slot] for slot in sorted(status["view"]["ranks"])}
    if node not in live.values():
        known = " ".join(map(str, sorted(set(live.values()))))
        raise ConfigurationError(f"node {node} has no worker in the job, wanted one of {known}")
    asked = {"t": "drain", "reason": reason}
    answers = {
        slot: ask_worker(contacts, status, slot, asked, timeout_s)["refused"]
        for slot, of in live.items()
        if of == node
    }
    leave = ", ".join(str(slot) for slot, refused in answers.items() if refused is None)
    stay = [f"worker {slot} stays: {why}" for slot, why in answers.items() if why is not None]
    if stay:
        others = f"; of node {node} leave: {leave}" if leave else ""
        raise ConfigurationError("; ".join(stay) + others)
    return (
        f"workers {leave} of node {node} leave between two steps; {contacts.shows(but=node)} shows"
        " when they have"
    )


def migrate_layers(
    contacts: Contacts, *, layers: str, stage: int, reason: str, timeout_s: float
) -> str:
    """Ask for ``layers`` ("4" or "4-5") at ``stage``; returns what will happen, in a sentence.

    `contacts`: some agents of the job. It does not wait for the layers to have moved. They
    stay until the next loss or arrival, whose plan may move them again. Raises ConfigurationError
    where the job has no stages or its layers stay, for layers that cannot be there and for silence.
    """
    first, last = _parse(layers)
    status = ask_job(contacts, timeout_s)
    if status["layout"] is None:
        raise ConfigurationError("the job has no pipeline stages that layers could come to")
    layout = ParallelLayout.from_json(status["layout"])
    cuts = layout.with_layers_at(first, last, stage).cuts
    if cuts == layout.cuts:
        raise ConfigurationError(f"layers {layers} are at stage {stage} already")
    # One that holds a part of the model: a free worker may leave at any time.
    slot = min(slot for groups in layout.stages for group in groups for slot in group.slots)
    words = f"layers {layers} move to stage {stage}: {reason}"
    asked = {"t": "migrate", "cuts": cuts, "reason": words}
    answer = ask_worker(contacts, status, slot, asked, timeout_s)
    if answer["refused"] is not None:
        raise ConfigurationError(f"nothing moves: {answer['refused']}")
    return (
        f"layers {layers} move to stage {stage} between two steps; {contacts.shows()} shows when"
        " they have"
    )


def _parse(layers: str) -> tuple[int, int]:
    found = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", layers)
    if found is None:
        raise ConfigurationError(f"--layers is {layers!r}, wanted a number or a range such as 4-5")
    return int(found[1]), int(found[2] or found[1])
