"""Whole pipelines, whoever is lost: rectangular, everyone at the stage of its launch."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elaswave_plugin.core.layout.layout import why_needed
from elaswave_plugin.core.recovery_plan.replica_placement import ReplicaPlacement, deal_replicas
from elaswave_plugin.errors import LayoutError


def launched(
    stages: int, width: int, reserve: int = 0, **groups: tuple[int, ...]
) -> ReplicaPlacement:
    """Slots go by stage, as DeepSpeed's ranks do."""
    launch_slots = [tuple(stage * width + d for stage in range(stages)) for d in range(width)]
    buckets = [(10 * (stage + 1),) for stage in range(stages)]
    return ReplicaPlacement.at_launch(launch_slots, groups=groups, buckets=buckets, reserve=reserve)


def test_a_pipeline_that_lost_a_worker_is_free() -> None:
    placement = launched(2, 2).after((3, 1, 2))
    assert placement.replicas == ((1, 3),) and placement.free == (2,)
    assert placement.place_of(1) == (0, 0) and placement.place_of(3) == (1, 0)
    assert placement.place_of(2) is None and placement.shard_group_of(2) is None


def test_survivors_of_two_pipelines_are_one_again() -> None:
    placement = launched(2, 4).after((0, 1, 2, 3, 4, 6, 7))
    assert placement.replicas == ((0, 4), (2, 6), (3, 7)) and placement.free == (1,)
    placement = placement.after((0, 1, 3, 4, 6, 7))
    assert placement.replicas == ((0, 4), (1, 6), (3, 7)) and placement.free == ()


def test_whoever_comes_back_makes_its_pipeline_whole() -> None:
    start = launched(3, 2)
    assert start.after((0, 1, 2, 3, 4)).after(range(6)).replicas == start.replicas


def test_pipelines_beyond_the_launch_go_stage_by_stage() -> None:
    placement = launched(2, 2, reserve=2, alike=(0, 1), own=(2,), whole=(1, 3)).after(
        (0, 1, 2, 3, 6)
    )
    assert placement.stages == ((0, 1, 4, 6), (2, 3, 5, 7)) and placement.free == (6,)
    placement = placement.after((0, 1, 2, 3, 6, 7))
    assert placement.replicas == ((0, 2), (1, 3), (6, 7))
    edits = placement.edits({"alike": (0, 1), "own": (2,), "whole": (1, 3)}, 7)
    assert [edits[name].members for name in ("alike", "own", "whole")] == [(2, 3, 7), (7,), (6, 7)]
    flow = deal_replicas(
        num_microbatches=8, launch_replicas=placement.launch_replicas, replicas=placement.replicas
    )
    assert flow.microbatches(6) == flow.microbatches(7) == (6, 7)
    # A survivor of a broken pipeline and who has come alone are one, too.
    assert placement.after((0, 2, 3, 6)).replicas == ((0, 2), (6, 3))


def test_a_stage_without_workers_ends_the_job_in_words() -> None:
    with pytest.raises(LayoutError, match="stage 1 has no worker left"):
        launched(2, 2).after((0, 1))


def test_groups_follow_their_axes() -> None:
    groups = {"world": (0, 1, 2, 3), "data": (2, 3), "pipe": (1, 3), "own": (3,)}
    after = launched(2, 2, **groups).after((0, 1, 3))
    assert {name: edit.members for name, edit in after.edits(groups, 3).items()} == {
        "world": (1, 3),
        "data": (3,),
        "pipe": (1, 3),
        "own": (3,),
    }
    assert {edit.members for edit in after.edits(groups, 0).values()} == {(0,)}


def test_buckets_and_their_numbers_go_by_stage() -> None:
    launch_slots = ((0, 2), (1, 3))
    placement = ReplicaPlacement.at_launch(launch_slots, groups={}, buckets=((5, 6), (7, 8, 9)))
    assert [shard_group.units for shard_group in placement.shard_groups] == [(0, 1), (2, 3, 4)]
    assert [shard_group.buckets for shard_group in placement.shard_groups] == [(5, 6), (7, 8, 9)]
    assert placement.largest == (7, 8, 9)


@given(
    stages=st.integers(1, 3),
    width=st.integers(1, 4),
    accumulation=st.integers(1, 3),
    data=st.data(),
)
def test_every_micro_batch_runs_once_at_every_stage(
    stages: int, width: int, accumulation: int, data: st.DataObject
) -> None:
    start = launched(stages, width)
    live = data.draw(st.sets(st.sampled_from(range(stages * width))))
    by_stage = [sum(slot // width == stage for slot in live) for stage in range(stages)]
    if not min(by_stage):
        return
    placement = start.after(sorted(live))
    assert len(placement.replicas) == min(by_stage)
    slots = [slot for replica in placement.replicas for slot in replica]
    assert sorted([*slots, *placement.free]) == sorted(live)
    assert all(slot // width == n for one in placement.replicas for n, slot in enumerate(one))
    count = accumulation * width
    flow = deal_replicas(
        num_microbatches=count, launch_replicas=start.launch_replicas, replicas=placement.replicas
    )
    for replica in placement.replicas:
        assert len({flow.microbatches(slot) for slot in replica}) == 1
    for stage in range(stages):
        ran = [flow.microbatches(replica[stage]) for replica in placement.replicas]
        assert sorted(itertools.chain(*ran)) == list(range(count))


def test_who_is_needed_for_a_stage_follows_from_what_is_told_of_the_layout() -> None:
    placement = launched(2, 3, reserve=1)
    assert why_needed(placement.described(), {0, 1, 3, 4}) is None
    placement = placement.after((0, 1, 3))
    assert placement.free == (1,)
    told = placement.described()
    assert why_needed(told, {1, 3}) is None  # whoever is free takes the place of who goes
    why = "in DeepSpeed's pipelines everything stays in the stage of its launch"
    needed = f"stage 1 would have no worker, and workers keep theirs: {why}"
    assert why_needed(told, {0, 1}) == needed
    assert told["why_layers_stay"] == why
