"""An estimate of the step time for very wide stages: each stage flows as one.

A slot of w micro-batches keeps a stage of n >= w workers busy for w / n of a micro-batch's time,
and passes it in the time of one. That workers take whole micro-batches in turn is left out, so the
cost of the estimate does not depend on the number of workers. Close for widths within an eighth of
each other; too long for stages several times as wide as the narrowest one with few slots in flight,
whose workers overlap more slots than the stage as one does. Slots wider than the narrowest stage
are refused: there the rounding within a slot is what counts (slot_time.py simulates it).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from elaswave_plugin.core.planner.microbatch_split import RESIZE
from elaswave_plugin.core.planner.slot_time import node_order
from elaswave_plugin.core.step.simulate import LinkTime, StageTime


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """The flow of a step: ``slot_width`` micro-batches of ``microbatch_size`` samples a slot.

    ``widths``: workers of each stage; one that takes twice as long counts a half.
    """

    policy: str
    widths: tuple[float, ...]
    num_microbatches: int
    microbatch_size: int
    slot_width: int

    @property
    def num_slots(self) -> int:
        """Slots of the step; the last one is charged as a whole one."""
        return -(-self.num_microbatches // self.slot_width)

    def shares(self) -> tuple[float, ...]:
        """Micro-batches of a full slot for each worker, by stage."""
        return tuple(self.slot_width / width for width in self.widths)


def fluid_seconds(
    flow: Flow, times: Sequence[StageTime], link: LinkTime, windows: Sequence[int]
) -> float:
    """Step seconds with coupled backwards.

    Raises ValueError for windows that deadlock and for slots wider than the narrowest stage.
    """
    if flow.policy != RESIZE and flow.slot_width > min(flow.widths):
        raise ValueError(f"slots of {flow.slot_width} micro-batches, widths {flow.widths}")
    last_stage = len(times) - 1
    sent_s = link.seconds(flow.microbatch_size)
    free = [0.0] * len(times)
    forward_end = [[0.0] * flow.num_slots for _ in times]
    backward_end = [[0.0] * flow.num_slots for _ in times]
    work = [_seconds(flow, time, share) for time, share in zip(times, flow.shares(), strict=True)]
    for stage, is_forward, slot in node_order(flow.num_slots, windows):
        if is_forward:
            ready = forward_end[stage - 1][slot] + sent_s if stage else 0.0
        elif stage == last_stage:
            ready = forward_end[stage][slot]
        else:
            ready = backward_end[stage + 1][slot] + sent_s
        busy_s, pass_s = work[stage][0 if is_forward else 1]
        begin = max(free[stage], ready)
        free[stage] = begin + busy_s
        (forward_end if is_forward else backward_end)[stage][slot] = begin + pass_s
    return max(
        max(end, ends[-1]) + time.reduce_s
        for end, ends, time in zip(free, backward_end, times, strict=True)
    )


def _seconds(flow: Flow, time: StageTime, share: float) -> tuple[tuple[float, float], ...]:
    """For forward and backward: how long a slot occupies the stage, and takes to pass it."""
    found = []
    for each_s in (time.forward_s, time.backward_s + time.weights_s):
        if flow.policy == RESIZE:
            piece_s = time.fixed_s + share * flow.microbatch_size * each_s
            found.append((piece_s, piece_s))
        else:
            piece_s = time.fixed_s + flow.microbatch_size * each_s
            found.append((share * piece_s, piece_s))
    return tuple(found)
