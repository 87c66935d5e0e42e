"""A worker that ran out of memory gets less, others what it leaves, and limits only ever fall."""

from math import floor, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elaswave_plugin.core.layout.layout import ParallelLayout, launch_layout
from elaswave_plugin.core.planner.costs import StateBytes, deal_within
from elaswave_plugin.core.planner.less_work import less_work
from elaswave_plugin.core.planner.pipeline_flow import PipelineFlow, flow_of
from elaswave_plugin.core.recovery_plan.placement import FlatPlacement, GridPlacement
from elaswave_plugin.core.recovery_plan.replica_placement import ReplicaPlacement
from elaswave_plugin.core.step.dataflow import deal, share
from elaswave_plugin.errors import ConfigurationError, LayoutError, TooLittleMemoryError


def sizes(num_samples: int, width: int, live: list[int], most: dict[int, float]) -> dict[int, int]:
    shares = share(num_samples=num_samples, launch_slots=range(width), live=live, most=most)
    return {slot: stop - start for slot, start, stop in shares.intervals}


@given(
    st.integers(2, 6).flatmap(
        lambda width: st.tuples(
            st.just(width),
            st.integers(1, 8),
            st.sets(st.sampled_from(range(width)), min_size=1),
            st.dictionaries(st.sampled_from(range(width)), st.integers(0, 8), max_size=width),
            st.integers(0, 40),
        )
    )
)
def test_all_samples_are_dealt_and_no_limit_is_passed(
    drawn: tuple[int, int, set[int], dict[int, int], int],
) -> None:
    width, each, alive, more, fewer = drawn
    live, whole = sorted(alive), width * each
    most = {slot: (each + extra) / each for slot, extra in more.items()}
    room = {slot: each + more[slot] if slot in more else whole for slot in live}
    if sum(room.values()) < whole:
        with pytest.raises(ConfigurationError, match=f"has {whole} samples, and the {len(live)} "):
            sizes(whole, width, live, most)
        return
    # The last iteration of an epoch is smaller: it fits where a whole one does.
    for num_samples in (whole, max(width, whole - fewer)):
        dealt = sizes(num_samples, width, live, most)
        assert sum(dealt.values()) == num_samples
        assert all(dealt[slot] <= room[slot] for slot in live)


@given(st.integers(2, 6), st.integers(1, 30), st.integers(0, 200))
def test_a_worker_comes_to_what_it_has_room_for_in_few_times(
    width: int, each: int, spare: int
) -> None:
    """And never below its share of the launch, where it ran."""
    num_samples, live = width * each, list(range(width - 1))
    room = each + spare
    most: dict[int, float] = {}
    shares = share(num_samples=num_samples, launch_slots=range(width), live=live)
    before, times = shares.interval(0)[1], 0
    while shares.interval(0)[1] > room and len(live) > 1:
        limit = less_work(shares, 0, width=width)
        assert limit is not None
        most[0] = limit
        shares = share(num_samples=num_samples, launch_slots=range(width), live=live, most=most)
        now = shares.interval(0)[1]
        assert each <= now < before
        before, times = now, times + 1
    assert times <= 1 + floor(log2(1 + num_samples))


def test_no_more_than_at_the_launch_is_no_work_of_a_loss() -> None:
    healthy = share(num_samples=12, launch_slots=range(3), live=range(3))
    assert less_work(healthy, 1, width=3) is None
    # Micro-batches that are run one by one: fewer of them need as much.
    flow = deal(num_microbatches=6, launch_slots=(0, 1, 2), live=(0, 1))
    assert less_work(flow, 1, width=3) is None
    interleaved = launch_layout(tp=1, pp=2, dp=2, num_layers=4, vpp=2)
    shrunk = flow_of(layout=interleaved.without([0]), num_microbatches=8)
    assert less_work(shrunk, 1, width=2) is None


def test_a_data_parallel_job_ends_before_it_takes_on_what_does_not_fit() -> None:
    """Of each element 2 bytes of weights and 4 of gradients, and 12 that all workers share."""
    state = StateBytes(
        units={0: 600, 1: 400},
        weight_bytes=2,
        gradient_bytes=4,
        optimizer_bytes=12,
        limit_bytes=12_000,
    )
    work = {"launch_slots": (0, 1, 2), "num_microbatches": 6, "slow": {}}
    assert deal_within(state, live=(0, 2), **work) == deal(live=(0, 2), **work)
    with pytest.raises(TooLittleMemoryError, match=r"of each of 1 workers take 1.68e-05 GiB, and"):
        deal_within(state, live=(0,), **work)


def peak(flow: PipelineFlow, slot: int) -> int:
    held = most = 0
    for op in flow.ops(slot):
        held += {"F": 1, "B": -1}.get(op.kind, 0)
        most = max(most, held)
    return most


@pytest.mark.parametrize(("pp", "lost"), [(2, 0), (2, 2), (4, 0), (4, 1), (4, 3), (4, 6)])
def test_a_worker_of_a_pipeline_holds_fewer_samples(pp: int, lost: int) -> None:
    launch = launch_layout(tp=1, pp=pp, dp=2, num_layers=2 * pp)
    layout, peer = launch.without([lost]), lost ^ 1
    flow, stage = flow_of(layout=layout, num_microbatches=16), lost // 2
    before, times = peak(flow, peer), 0
    while (limit := less_work(flow, peer, width=2, stage=stage)) is not None:
        flow = flow_of(layout=layout, num_microbatches=16, activation_room=limit)
        assert sum(len(flow.microbatches(group.slots[0])) for group in layout.stages[stage]) == 16
        assert peak(flow, peer) < before
        before, times = peak(flow, peer), times + 1
    assert peak(flow, peer) <= pp - stage and times <= 4
    assert times or stage == pp - 1


def test_limits_are_part_of_a_deal_until_there_are_none() -> None:
    flat = FlatPlacement(launch_slots=(0, 1, 2), ranks=(0, 1)).within({1: 1.25})
    assert flat.dealt_over["most"] == {1: 1.25}
    assert flat.after((1,)).with_state(flat.state()).dealt_over["most"] == {1: 1.25}
    assert "most" not in flat.within({}).dealt_over
    layout = launch_layout(tp=1, pp=2, dp=2, num_layers=4)
    asked: list[dict[str, float]] = []

    def partition(
        *, layout: ParallelLayout, times: object, slow: object, **more: float
    ) -> PipelineFlow:
        asked.append(more)
        return flow_of(layout=layout, num_microbatches=4)

    grid = GridPlacement.at_launch(layout, groups={}, units={}, partition=partition)
    limited = grid.within({3: 1.5, 1: 1.25})
    assert limited.dealt_over["activation_room"] == 1.25
    # Layers move by the same limit.
    assert limited.after((1, 2, 3)).dealt_over["activation_room"] == 1.25
    assert grid.after((1, 2, 3)).within({}).dealt_over.keys() == {"layout", "times", "slow"}
    assert asked == [{"activation_room": 1.25}, {}]
    replicas = ReplicaPlacement.at_launch([(0, 1), (2, 3)], groups={}, buckets=[[1], [1]])
    assert replicas.within({}) == replicas
    with pytest.raises(LayoutError):
        replicas.within({1: 1.25})
