"""Whole pipelines, whoever is lost: rectangular, everyone at the stage of its launch."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elaswave_plugin.core.layout.layout import why_needed
from elaswave_plugin.core.recovery_plan.replica_placement import ReplicaSeating, deal_replicas
from elaswave_plugin.errors import LayoutError


def launched(
    stages: int, width: int, reserve: int = 0, **groups: tuple[int, ...]
) -> ReplicaSeating:
    """Slots go by stage, as DeepSpeed's ranks do."""
    homes = [tuple(stage * width + d for stage in range(stages)) for d in range(width)]
    buckets = [(10 * (stage + 1),) for stage in range(stages)]
    return ReplicaSeating.at_launch(homes, groups=groups, buckets=buckets, reserve=reserve)


def test_a_pipeline_that_lost_a_worker_is_free() -> None:
    seating = launched(2, 2).after((3, 1, 2))
    assert seating.replicas == ((1, 3),) and seating.free == (2,)
    assert seating.place_of(1) == (0, 0) and seating.place_of(3) == (1, 0)
    assert seating.place_of(2) is None and seating.cell_of(2) is None


def test_survivors_of_two_pipelines_are_one_again() -> None:
    seating = launched(2, 4).after((0, 1, 2, 3, 4, 6, 7))
    assert seating.replicas == ((0, 4), (2, 6), (3, 7)) and seating.free == (1,)
    seating = seating.after((0, 1, 3, 4, 6, 7))
    assert seating.replicas == ((0, 4), (1, 6), (3, 7)) and seating.free == ()


def test_whoever_comes_back_makes_its_pipeline_whole() -> None:
    start = launched(3, 2)
    assert start.after((0, 1, 2, 3, 4)).after(range(6)).replicas == start.replicas


def test_pipelines_beyond_the_launch_go_stage_by_stage() -> None:
    seating = launched(2, 2, reserve=2, alike=(0, 1), own=(2,), whole=(1, 3)).after((0, 1, 2, 3, 6))
    assert seating.stages == ((0, 1, 4, 6), (2, 3, 5, 7)) and seating.free == (6,)
    seating = seating.after((0, 1, 2, 3, 6, 7))
    assert seating.replicas == ((0, 2), (1, 3), (6, 7))
    edits = seating.edits({"alike": (0, 1), "own": (2,), "whole": (1, 3)}, 7)
    assert [edits[name].members for name in ("alike", "own", "whole")] == [(2, 3, 7), (7,), (6, 7)]
    flow = deal_replicas(num_microbatches=8, homes=seating.homes, replicas=seating.replicas)
    assert flow.microbatches(6) == flow.microbatches(7) == (6, 7)
    # A survivor of a broken pipeline and who has come alone are one, too.
    assert seating.after((0, 2, 3, 6)).replicas == ((0, 2), (6, 3))


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
    homes = ((0, 2), (1, 3))
    seating = ReplicaSeating.at_launch(homes, groups={}, buckets=((5, 6), (7, 8, 9)))
    assert [cell.units for cell in seating.cells] == [(0, 1), (2, 3, 4)]
    assert [cell.buckets for cell in seating.cells] == [(5, 6), (7, 8, 9)]
    assert seating.largest == (7, 8, 9)


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
    seating = start.after(sorted(live))
    assert len(seating.replicas) == min(by_stage)
    slots = [slot for replica in seating.replicas for slot in replica]
    assert sorted([*slots, *seating.free]) == sorted(live)
    assert all(slot // width == n for one in seating.replicas for n, slot in enumerate(one))
    count = accumulation * width
    flow = deal_replicas(num_microbatches=count, homes=start.homes, replicas=seating.replicas)
    for replica in seating.replicas:
        assert len({flow.microbatches(slot) for slot in replica}) == 1
    for stage in range(stages):
        ran = [flow.microbatches(replica[stage]) for replica in seating.replicas]
        assert sorted(itertools.chain(*ran)) == list(range(count))


def test_who_is_needed_for_a_stage_follows_from_what_is_told_of_the_layout() -> None:
    seating = launched(2, 3, reserve=1)
    assert why_needed(seating.described(), {0, 1, 3, 4}) is None
    seating = seating.after((0, 1, 3))
    assert seating.free == (1,)
    told = seating.described()
    assert why_needed(told, {1, 3}) is None  # whoever is free takes the place of who goes
    why = "in DeepSpeed's pipelines everything stays in the stage of its launch"
    assert why_needed(told, {0, 1}) == f"stage 1 would have nobody, and workers keep theirs: {why}"
    assert told["why_layers_stay"] == why
