"""Counts the samples that a job lost or repeated, from its step lines and its ledger (pure)."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

Record = Mapping[str, Any]


def counting_views(steps: Iterable[Record]) -> dict[int, int]:
    """Return, for each completed step, the view of the attempt that counts: the last one."""
    views: dict[int, int] = {}
    for line in steps:
        views[line["step"]] = max(line["epoch"], views.get(line["step"], 0))
    return views


def first_of(views: Mapping[int, int], ledger: Sequence[Record]) -> tuple[int, int]:
    """Return the first step of a job and its first sample: not 0 and 0 after a checkpoint.

    Samples below those on which the steps of the checkpoint have ``trained`` are trained on again.
    """
    step = min((*views, *(line["step"] for line in ledger)), default=0)
    trained = max((line.get("trained", 0) for line in ledger), default=0)
    if trained:
        return step, trained
    samples = (one for line in ledger if line["step"] == step for one in line["samples"])
    return step, min(samples, default=0) if step else 0


def batch_sizes(views: Mapping[int, int], ledger: Sequence[Record], steps: int) -> list[int]:
    """Return how far each of the first ``steps`` steps came in the order of the samples.

    ``views``: as `counting_views` returns it. Sizes may ramp up; those before the first step are 0.
    """
    ends: dict[int, int] = {}
    for line in ledger:
        ends[line["step"]] = max([ends.get(line["step"], 0), *(one + 1 for one in line["samples"])])
    _, first = first_of(views, ledger)
    reached = accumulate((ends.get(step, 0) for step in range(steps)), max, initial=first)
    return [end - start for start, end in pairwise(reached)]


def lost_and_repeated(
    views: Mapping[int, int], ledger: Sequence[Record], *, batches: Sequence[int]
) -> tuple[int, int]:
    """Return (samples lost, samples repeated); ``batches``: the size of each step from step 0 on.

    A step has to consume that number of samples once each, from where the one before ended. Only
    the
    ledger lines of the attempt that counts (``views``) are its consumption; a sample that belongs
    to another step counts as repeated, and all samples of a step that was not completed as lost.
    """
    begun, first_sample = first_of(views, ledger)
    sizes = {step: batches[step] for step in range(begun, len(batches))}
    consumed: dict[int, Counter[int]] = {step: Counter() for step in sizes}
    for line in ledger:
        if line["step"] in consumed and views.get(line["step"]) == line["epoch"]:
            consumed[line["step"]].update(line["samples"])
    lost = repeated = 0
    firsts = accumulate(sizes.values(), initial=first_sample)
    for (step, got), first in zip(consumed.items(), firsts, strict=False):
        wanted = Counter(range(first, first + sizes[step]))
        lost += (wanted - got).total()
        repeated += (got - wanted).total()
    return lost, repeated
