"""The choice of the worker that repeats a newcomer's first micro-batch, to compare the losses.

A newcomer can hold the right weights and still compute something else: its script may have a
variable that the loops of the others have changed. A whole replica without newcomers reveals it.

>>> from elaswave_plugin.core.step.dataflow import deal
>>> flow = deal(num_microbatches=6, launch_slots=(0, 1, 2), live=(0, 1, 2))
>>> for one in entry_checks(flow, {1}):
...     print(one)
micro-batches 1 of w1 by w0
"""

from collections.abc import Collection
from typing import NamedTuple

from elaswave_plugin.core.planner.pipeline_flow import PipelineFlow
from elaswave_plugin.core.step.dataflow import Dataflow


class EntryCheck(NamedTuple):
    """A replica with newcomers, and the replica that repeats the first of its micro-batches.

    ``newcomers`` leave if the losses of ``reporter`` and ``repeater`` differ.
    """

    newcomers: tuple[int, ...]
    reporter: int
    repeaters: tuple[int, ...]
    repeater: int
    microbatches: tuple[int, ...]

    def __str__(self) -> str:
        ks = " ".join(map(str, self.microbatches))
        return f"micro-batches {ks} of w{self.reporter} by w{self.repeater}"


def entry_checks(flow: Dataflow | PipelineFlow, came: Collection[int]) -> tuple[EntryCheck, ...]:
    """Return the checks of a step in which the slots ``came`` work for the first time.

    Empty if no whole replica is without newcomers, or if stages are unequally wide.
    """
    if isinstance(flow, Dataflow):
        return _of_workers(flow, came)
    return _of_pipelines(flow, came) if flow.is_healthy else ()


def _of_workers(flow: Dataflow, came: Collection[int]) -> tuple[EntryCheck, ...]:
    busy = [slot for slot, ks in flow.placement if ks]
    there = [slot for slot in busy if slot not in came]
    return tuple(
        EntryCheck(
            (slot,), slot, (there[0],), there[0], flow.contributions(slot)[0].microbatches[:1]
        )
        for slot in busy
        if slot in came and there
    )


def _of_pipelines(flow: PipelineFlow, came: Collection[int]) -> tuple[EntryCheck, ...]:
    stages = flow.layout.stages
    replicas = [
        tuple(slot for stage in stages for slot in stage[order].slots)
        for order in range(len(stages[0]))
    ]
    there = [order for order, slots in enumerate(replicas) if not set(slots) & set(came)]
    # Megatron-Core's interleaved schedule takes a multiple of the stages.
    count = len(stages) if flow.layout.vpp > 1 else 1
    return tuple(
        EntryCheck(
            tuple(slot for slot in slots if slot in came),
            stages[-1][order].slots[0],
            replicas[there[0]],
            stages[-1][there[0]].slots[0],
            flow.microbatches(stages[-1][order].slots[0])[:count],
        )
        for order, slots in enumerate(replicas)
        if there and set(slots) & set(came)
    )
