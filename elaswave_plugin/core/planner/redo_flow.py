"""The redo of a struck step, in which workers go on from the gradient sums that they have.

A worker keeps the replica that it has at launch, and those of lost ones are dealt out at each
stage. A micro-batch that one worker lacks is run again at every stage; a worker that has it runs
it beside its sums, or another one that has less to do.

>>> from elaswave_plugin.core.layout.layout import launch_layout
>>> from elaswave_plugin.core.planner.pipeline_flow import flow_of
>>> layout = launch_layout(tp=1, pp=2, dp=2, num_layers=2).without([1])
>>> flow = redo_flow(flow_of(layout=layout, num_microbatches=6), {0: (0, 2), 2: (0, 2, 4), 3: (1,)})
>>> print(flow)
stage 0: w0: 1 3 4 5; stage 1: w2: 1 4 | w3: 3 5
>>> print(*flow.shard_group(1, 0).contributions(3))
replica 1 (1 3 5)
>>> saves_time(flow, flow_of(layout=layout, num_microbatches=6))
True
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from elaswave_plugin.core.layout.layout import TpGroup
from elaswave_plugin.core.planner.pipeline_flow import PipelineFlow
from elaswave_plugin.core.step.schedule import Piece


def redo_flow(flow: PipelineFlow, kept: Mapping[int, Collection[int]]) -> PipelineFlow:
    """Return what is to be run again of a step that is dealt by ``flow``.

    ``kept``: by slot, the micro-batches of its launch's replica that are whole in its sums, of
    whole micro-batches and one model chunk a worker.
    """
    layout, size = flow.layout, flow.micro_batch_size
    numbers = sorted(piece.start // size for pieces in flow.pieces[0] for piece in pieces)
    sums, lacks = zip(
        *(_homes(groups, numbers, layout.dp, kept) for groups in layout.stages), strict=True
    )
    again = sorted({number for stage in lacks for own in stage for number in own})
    runners = [_runners(stage, again) for stage in lacks]
    slots = _slots(again, runners)
    pieces = tuple(
        tuple(
            tuple(
                Piece(slots[number], number * size, (number + 1) * size)
                for number in again
                if runner[number] == order
            )
            for order, _ in enumerate(groups)
        )
        for groups, runner in zip(layout.stages, runners, strict=True)
    )
    return replace(
        flow,
        pieces=pieces,
        sums=sums,
        lists=(),
        is_greedy=False,
        is_split=False,
    )


def saves_time(redo: PipelineFlow, whole: PipelineFlow) -> bool:
    """Return whether a redo that goes on from sums is simulated to end before the whole step.

    Sums bind a replica's work to the worker that has them, and a short rest may be dealt unevenly.
    """
    ours, all_of_it = (one.simulated(one.times, dict(one.slow)) for one in (redo, whole))
    return not ours.blocked and ours.seconds < all_of_it.seconds


def _homes(
    groups: Sequence[TpGroup], numbers: Sequence[int], dp: int, kept: Mapping[int, Collection[int]]
) -> tuple[tuple[tuple[int, ...], ...], list[list[int]]]:
    """Return what each replica of a stage adds up, and what of that it lacks."""
    sums, lacks = [], []
    for group in groups:
        own = [number for number in numbers if number % dp == group.replica]
        # What one worker of a TP group lacks, all of them run again.
        whole = set(own).intersection(*(kept.get(slot, ()) for slot in group.slots))
        sums.append(own)
        lacks.append([number for number in own if number not in whole])
    live = {group.replica for group in groups}
    for number in numbers:
        if number % dp not in live:
            least = min(range(len(groups)), key=lambda order: len(lacks[order]))
            sums[least].append(number)
            lacks[least].append(number)
    return tuple(map(tuple, sums)), lacks


def _runners(lacks: Sequence[Sequence[int]], again: Sequence[int]) -> dict[int, int]:
    """Return the order of the replica of a stage that runs each micro-batch."""
    found = {number: order for order, own in enumerate(lacks) for number in own}
    load = list(map(len, lacks))
    for number in again:
        if number not in found:
            found[number] = least = load.index(min(load))
            load[least] += 1
    return found


def _slots(again: Sequence[int], runners: Sequence[Mapping[int, int]]) -> dict[int, int]:
    """Return the slot of each micro-batch: the first one that is free at all of its workers.

    With one in each, no worker holds more than the plan, which has one or more, allows.
    """
    found: dict[int, int] = {}
    free: dict[tuple[int, int], int] = {}
    for number in again:
        workers = [(stage, runner[number]) for stage, runner in enumerate(runners)]
        slot = found[number] = max(free.get(worker, 0) for worker in workers)
        free.update(dict.fromkeys(workers, slot + 1))
    return found
