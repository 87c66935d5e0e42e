"""The twin of a run in fast mode: the same changes of the view at the same steps, as planned."""

from dataclasses import replace
from itertools import pairwise

from tests.deepspeed.harness import EngineSpec
from tests.faults.harness import JobSpec, Outcome


def ranks_by_step(run: Outcome) -> dict[int, list[int]]:
    """Return the workers of the job from each step on, in the order of their ranks.

    Of two who are to come back in different steps, a planned run lets in both in the first.
    """
    views = {event["epoch"]: event["ranks"] for event in run.events("view_committed")}
    restored = {event["epoch"]: event["restored_step"] for event in run.events("recovered")}
    found = {0: views[min(views)]}
    for epoch in sorted(restored):
        found[restored[epoch]] = views[epoch]
    steps = sorted(found)
    same = {after for before, after in pairwise(steps) if found[after] == found[before]}
    return {step: ranks for step, ranks in found.items() if step not in same}


def twin_of(run: Outcome) -> JobSpec | None:
    """The twin's job, from the views that the run went on with and the steps of their restores.

    None in exact mode, and where no plan says the same: where a step was done again in a view that
    is newer than the change before it, a worker was lost and came back in one recovery, or it came
    back and was lost in one step.
    """
    if not isinstance(run.spec, EngineSpec):
        return None
    views = {event["epoch"]: set(event["ranks"]) for event in run.events("view_committed")}
    steps = {event["epoch"]: event["restored_step"] for event in run.events("recovered")}
    came = {(event["epoch"], event["slot"]) for event in run.events("entered")}
    before, changes = views[min(views)], list[str]()
    for epoch in sorted(steps):
        now = views[epoch]
        if any((epoch, slot) in came for slot in before & now):
            return None
        changes += [f"{slot}@{steps[epoch]}" for slot in sorted(before - now)]
        changes += [f"+{slot}@{steps[epoch]}" for slot in sorted(now - before)]
        before = now
    in_order = [steps[epoch] for epoch in sorted(steps)]
    if in_order != sorted(in_order):
        return None
    if len({change.lstrip("+") for change in changes}) < len(changes):
        return None  # who comes and is lost in one step would come for ever
    return replace(run.spec, changes=tuple(changes))
