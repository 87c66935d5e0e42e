"""Asks a running job for a change between two steps: a worker leaves, or layers move."""

import re

from elaswave_plugin.cli.status import Contacts, ask_job, ask_worker
from elaswave_plugin.core.layout.layout import ParallelLayout
from elaswave_plugin.errors import ConfigurationError


def drain_worker(contacts: Contacts, *, slot: int, reason: str, timeout_s: float) -> str:
    """Give the worker of `slot` notice; returns what will happen, in a sentence.

    `contacts`: some supervisors of the job. It does not wait for the worker to have left.
    Raises ConfigurationError where there is no such worker, or its supervisor refuses or is silent.
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
    return f"worker {slot} leaves between two steps; `elaswave status` shows when it has"


def migrate_layers(
    contacts: Contacts, *, layers: str, stage: int, reason: str, timeout_s: float
) -> str:
    """Ask for ``layers`` ("4" or "4-5") at ``stage``; returns what will happen, in a sentence.

    `contacts`: some supervisors of the job. It does not wait for the layers to have moved. They
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
        f"layers {layers} move to stage {stage} between two steps; `elaswave status` shows when"
        " they have"
    )


def _parse(layers: str) -> tuple[int, int]:
    found = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", layers)
    if found is None:
        raise ConfigurationError(f"--layers is {layers!r}, wanted a number or a range such as 4-5")
    return int(found[1]), int(found[2] or found[1])
