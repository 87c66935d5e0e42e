"""Dealing a step over a ragged pipeline: complete, exact in its order of sums, without deadlock."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elaswave_plugin.core.layout import ParallelLayout, launch_layout
from elaswave_plugin.core.pipeline_flow import PipelineFlow, Policy, flow_of
from elaswave_plugin.core.schedule import BACKWARD, FORWARD
from elaswave_plugin.core.step_time import LinkTime, StageTime, simulate


def after_losses(*, tp: int, pp: int, dp: int, losses: Sequence[int]) -> ParallelLayout | None:
    """The layout after losses one by one; None where a stage has nobody left."""
    layout = launch_layout(tp=tp, pp=pp, dp=dp, num_layers=2 * pp)
    for slot in losses:
        if slot in layout.workers:
            layout = layout.without([slot]).reformed_in_place()
    return layout if all(layout.widths) else None


def lists_of(flow: PipelineFlow) -> tuple[tuple[tuple[object, ...], ...], ...]:
    return tuple(
        tuple(flow.ops(group.slots[0]) for group in groups) for groups in flow.layout.stages
    )


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([(1, 2, 2), (2, 2, 2), (1, 4, 2), (1, 3, 4), (2, 2, 4)]),
    st.lists(st.integers(0, 15), max_size=6, unique=True),
    st.integers(1, 3),
    st.sampled_from(["auto", "redeal", "reroute"]),
)
def test_every_step_is_complete_and_runs(
    sizes: tuple[int, int, int], losses: Sequence[int], rounds: int, policy: Policy
) -> None:
    tp, pp, dp = sizes
    layout = after_losses(tp=tp, pp=pp, dp=dp, losses=losses)
    if layout is None:
        return
    flow = flow_of(layout=layout, num_microbatches=rounds * dp, policy=policy)
    for stage in range(pp):
        for position in range(tp):
            # Raises unless every micro-batch is placed exactly once.
            assert len(flow.cell(stage, position).fold()) == dp
    for groups in layout.stages:
        for slot in (slot for group in groups for slot in group.slots):
            backwards = [op.start for op in flow.ops(slot) if op.kind == BACKWARD]
            assert all(before < after for before, after in pairwise(backwards))
            forwards = [op.start for op in flow.ops(slot) if op.kind == FORWARD]
            assert tuple(forwards) == flow.microbatches(slot) == tuple(backwards)
            seat = flow.seat(slot)
            assert seat is not None
            assert all(flow.peer(seat.stage, k, seat.tp) == slot for k in forwards)
    # Raises where the lists block each other.
    assert (
        simulate(
            lists_of(flow), [StageTime(forward_s=1.0, backward_s=2.0)] * pp, LinkTime()
        ).seconds
        > 0
    )


def test_a_rectangular_layout_is_healthy() -> None:
    flow = flow_of(layout=launch_layout(tp=2, pp=2, dp=2, num_layers=2), num_microbatches=4)
    assert flow.is_healthy and not flow.reasons
    assert flow.microbatches(0) == (0, 2) and flow.microbatches(7) == (1, 3)


def test_free_workers_run_nothing() -> None:
    layout = launch_layout(tp=2, pp=2, dp=2, num_layers=2).without([0])
    flow = flow_of(layout=layout, num_microbatches=4)
    assert flow.seat(1) is None and flow.microbatches(1) == ()
    with pytest.raises(ValueError, match="micro-batch 9 is not dealt at stage 0"):
        flow.peer(0, 9, 0)


def test_auto_is_no_slower_in_simulation_than_either_policy() -> None:
    layout = launch_layout(tp=1, pp=4, dp=4, num_layers=8).without([0, 1, 6])
    times = {}
    for policy in ("auto", "redeal", "reroute"):
        flow = flow_of(layout=layout, num_microbatches=16, policy=policy)
        seconds = simulate(
            lists_of(flow), [StageTime(forward_s=2.0, backward_s=4.0)] * 4, LinkTime()
        ).seconds
        times[policy] = seconds
        assert any(policy in reason for reason in flow.reasons) or policy == "auto"
    assert times["auto"] <= min(times.values())
    assert times["auto"] < max(times.values())


def test_the_reasons_are_not_compared() -> None:
    layout = launch_layout(tp=1, pp=2, dp=2, num_layers=2).without([0])
    flow = flow_of(layout=layout, num_microbatches=4)
    assert flow.reasons and not any(reason in repr(flow) for reason in flow.reasons)
