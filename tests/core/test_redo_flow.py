"""The redo of a struck pipeline: all that somebody lacks runs once at each stage."""

from collections.abc import Sequence
from random import Random

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from elaswave_plugin.core.planner.pipeline_flow import flow_of
from elaswave_plugin.core.planner.redo_flow import redo_flow, saves_time
from elaswave_plugin.core.step.schedule import peak_in_flight
from elaswave_plugin.core.step.simulate import LinkTime, StageTime, simulate
from tests.core.test_pipeline_flow import after_losses


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([(1, 2, 2), (2, 2, 2), (1, 4, 2), (1, 3, 4), (2, 2, 4)]),
    st.lists(st.integers(0, 15), min_size=1, max_size=5, unique=True),
    st.integers(1, 4),
    st.integers(1, 3),
    st.randoms(use_true_random=False),
)
def test_what_is_missing_runs_once_at_each_stage(
    sizes: tuple[int, int, int], losses: Sequence[int], rounds: int, size: int, dice: Random
) -> None:
    tp, pp, dp = sizes
    layout = after_losses(tp=tp, pp=pp, dp=dp, losses=losses)
    assume(layout is not None and not layout.is_rectangular)
    assert layout is not None
    count = rounds * dp
    planned = flow_of(layout=layout, num_microbatches=count, micro_batch_size=size)
    replicas = {
        slot: group.replica for stage in layout.stages for group in stage for slot in group.slots
    }
    kept = {
        slot: range(replica, count, dp)[: dice.randint(0, rounds)]
        for slot, replica in replicas.items()
    }
    flow = redo_flow(planned, kept)
    lacks = set[int]()
    for stage, groups in enumerate(layout.stages):
        for position in range(tp):
            # Raises unless every micro-batch is added up exactly once.
            assert len(flow.shard_group(stage, position).fold()) == dp
        for group in groups:
            own = flow.shard_group(stage, 0).microbatches(group.slots[0])
            whole = set(own).intersection(*(kept[slot] for slot in group.slots))
            missing = set(own) - whole
            lacks |= missing
            # Who lacks it runs it; what it has is in place.
            assert missing <= set(flow.microbatches(group.slots[0]))
            in_place = flow.shard_group(stage, 0).in_place(group.slots[0])
            assert in_place is not None and in_place.replica == group.replica
    for groups in layout.stages:
        ran = [k for group in groups for k in flow.microbatches(group.slots[0])]
        assert sorted(ran) == sorted(lacks)
    reported = [k for group in layout.stages[-1] for k in flow.reports(group.slots[0])]
    assert sorted(reported) == list(range(count))
    if all(kept[slot] == range(replicas[slot], count, dp) for slot in replicas):
        assert saves_time(flow, planned)
    # It does not block, and a worker holds one micro-batch a slot.
    simulate(flow.every_list(), (StageTime(forward_s=1.0, backward_s=2.0),) * pp, LinkTime())
    for window, lists in zip(planned.windows, flow.every_list(), strict=True):
        assert all(peak_in_flight(ops, lambda _: 1) <= window for ops in lists)
