"""The work that a worker may have at most after it ran out of memory with more than at the launch.

Half of what it has beyond the launch goes to others: whatever it has room for, after a few times it
has no more than at the launch, where it ran.

>>> from elaswave_plugin.core.step.dataflow import share
>>> shares = share(num_samples=24, launch_slots=(0, 1, 2), live=(0, 1))
>>> print(shares, less_work(shares, 1, width=3))
w0: [0, 12) | w1: [12, 24) 1.25
"""

from elaswave_plugin.core.planner.pipeline_flow import Flow, PipelineFlow
from elaswave_plugin.core.step.dataflow import Shares
from elaswave_plugin.core.step.schedule import Op, peak_in_flight, window_sizes


def less_work(flow: Flow, slot: int, *, width: int, stage: int = 0) -> float | None:
    """Return the most that ``slot`` may have, as `OutOfMemory` counts it; None if that cannot help.

    That is where it has no more than at the launch, where it had a place in ``stage`` of a job of
    ``width`` replicas, or where micro-batches are run one after the other, so that fewer of them
    need as much. Interleaved stages have one order of operations, which holds what it holds.
    """
    match flow:
        case Shares():
            start, stop = flow.interval(slot)
            at_launch = flow.num_samples // width
            return _half(stop - start, at_launch) / at_launch if stop - start > at_launch else None
        case PipelineFlow() if flow.layout.vpp == 1 and flow.coordinate(slot) is not None:
            num_stages = len(flow.layout.stages)
            first = flow.micro_batch_size * flow.layout.num_layers
            at_launch = window_sizes(num_stages)[stage] * first // num_stages
            held = _held(flow, slot)
            # A limit between two amounts is none that rounding could change.
            return (_half(held, at_launch) + 0.5) / first if held > at_launch else None
        case _:
            return None


def _half(now: int, at_launch: int) -> int:
    return (at_launch + now) // 2


def _held(flow: PipelineFlow, slot: int) -> int:
    """Return the samples that a worker has in flight at once, times its layers."""
    coordinate = flow.coordinate(slot)
    assert coordinate is not None
    layers = sum(stop - start for start, stop in flow.layout.layers(coordinate.stage))

    def amount(op: Op) -> int:
        return (op.stop - op.start) * layers

    return int(peak_in_flight(flow.ops(slot), amount))
