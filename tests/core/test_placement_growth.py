"""Groups as rules over a layout, and what a change of membership makes of them."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elaswave_plugin.core.layout.group_rules import coordinates_of, members_of, rule_of
from elaswave_plugin.core.layout.layout import FreeWorker, ParallelLayout, launch_layout
from elaswave_plugin.core.layout.reserve import built_among
from elaswave_plugin.core.planner.layer_times import LayerTimes
from elaswave_plugin.core.planner.pipeline_flow import PipelineFlow, flow_of
from elaswave_plugin.core.recovery_plan.placement import FlatPlacement, GridPlacement
from elaswave_plugin.core.step.dataflow import Slowness
from elaswave_plugin.errors import ConfigurationError, LayoutError

LAYOUT = launch_layout(tp=2, pp=2, dp=2, num_layers=4)
GROUPS = {
    "tp": (0, 1),
    "dp": (0, 2),
    "dp again": (0, 2),
    "pp": (0, 4),
    "model": (0, 1, 4, 5),
    "everyone": tuple(range(8)),
    "alone": (0,),
}


def grid(layout: ParallelLayout = LAYOUT) -> GridPlacement:
    units = dict.fromkeys(range(layout.num_layers + 2), 100)
    return GridPlacement.at_launch(layout, groups=GROUPS, units=units)


def members(placement: GridPlacement, slot: int) -> dict[str, tuple[int, ...]]:
    return {name: edit.members for name, edit in placement.edits(GROUPS, slot).items()}


def test_a_data_parallel_job_grows_beyond_its_launch() -> None:
    """Groups of everyone grow; those of one worker, and the replicas of the launch, do not."""
    launched = {"dp": (0, 1, 2), "tp": (1,)}
    placement = FlatPlacement(launch_slots=(0, 1, 2), ranks=(0, 1, 2), buckets=(10,)).after(
        (0, 1, 2, 3, 4)
    )
    edits = placement.edits(launched, 1)
    assert edits["dp"].members == (0, 1, 2, 3, 4) and edits["tp"].members == (1,)
    # Who came later was built in a world of as many, in the place of the last.
    edits = placement.edits({"dp": (0, 1, 3), "tp": (3,)}, 3)
    assert edits["dp"].members == (0, 1, 2, 3, 4) and edits["tp"].members == (3,)
    assert placement.shard_groups[0].ranks == (0, 1, 2, 3, 4)
    assert placement.dealt_over["launch_slots"] == (0, 1, 2)
    assert placement.after((4, 1)).edits(launched, 1)["dp"].members == (4, 1)


GROWS = launch_layout(tp=2, pp=2, dp=2, num_layers=4, reserve=1)


def test_a_tp_group_beyond_the_launch_widens_the_stage_of_its_slots() -> None:
    """One of the group alone is free, and changes nothing for the others."""
    one = grid(GROWS).after((*range(8), 9))
    assert one.layout.free == (FreeWorker(9, stage=0, tp=1),)
    assert members(one, 0) == GROUPS and one.shard_group_of(9) is None
    both = one.after((*range(8), 9, 8))
    assert both.layout.widths == (3, 2) and both.layout.stages[0][2].slots == (8, 9)
    assert members(both, 9)["dp"] == (1, 3, 9) and members(both, 9)["tp"] == (8, 9)
    assert set(members(both, 9)["everyone"]) == set(range(10))
    whole = both.after(range(12))
    assert whole.layout.widths == (3, 3) and not whole.layout.free
    # As one that was built there, in the place of the last replica of its stage and position.
    assert built_among(11, range(8), tp=2, pp=2) == (0, 1, 2, 3, 4, 5, 6, 11)
    assert members(whole, 11)["dp"] == (5, 7, 11)
    assert grid(GROWS).with_state(whole.state()).layout == whole.layout
    # With 8 its group is lost, and no other.
    assert whole.after((*range(8), 9, 10, 11)).layout.widths == (2, 3)


def test_who_comes_beyond_the_launch_takes_a_lost_seat_first() -> None:
    short = grid(GROWS).after((0, 1, 4, 5, 6, 7, 8, 9))
    assert [group.replica for group in short.layout.stages[0]] == [0, 1]
    assert short.layout.is_rectangular and not short.layout.keeps_stages
    assert short.after(range(10)).layout.widths == (3, 2)
    assert grid(GROWS).with_state(short.state()).layout == short.layout


def test_the_rules_give_back_the_groups_of_the_launch() -> None:
    assert members(grid(), 0) == GROUPS
    assert members(grid(), 7)["pp"] == (3, 7)


def test_a_group_along_no_axis_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="follows no axis"):
        rule_of((0, 3), LAYOUT)


def test_a_loss_frees_the_rest_of_its_tp_group() -> None:
    after = grid().after((1, 2, 3, 4, 5, 6, 7))
    assert after.coordinate(1) is None and after.shard_group_of(1) is None
    assert set(members(after, 1).values()) == {(1,)}
    assert members(after, 2)["dp"] == (2,)
    assert members(after, 2)["everyone"] == (2, 3, 4, 5, 6, 7)
    # Both replicas of the wider stage look back to the only one of the other.
    assert members(after, 4)["pp"] == (2, 4) and members(after, 6)["pp"] == (2, 6)


def test_two_broken_groups_of_a_stage_make_a_whole_one() -> None:
    after = grid().after((1, 3, 4, 5, 6, 7))  # of both groups of stage 0, tp position 1 is left
    crew = after.layout.stages[0][0].slots
    assert sorted(crew) == [1, 3]
    assert [shard_group.ranks for shard_group in after.shard_groups[:2]] == [crew[:1], crew[1:]]
    first, second = (after.edits(GROUPS, slot)["tp"] for slot in crew)
    assert first == second and first.members == crew


def test_an_empty_stage_takes_a_replica_of_another() -> None:
    after = grid().after((1, 4, 5, 6, 7))
    assert [shard_group.ranks for shard_group in after.shard_groups] == [(6,), (7,), (4,), (5,)]
    assert members(after, 6)["pp"] == (6, 4) and members(after, 4)["everyone"] == (6, 7, 4, 5)


def test_without_a_replica_for_each_stage_the_job_ends_with_the_reason() -> None:
    with pytest.raises(LayoutError, match="1 whole TP group of 2 left for 2 stages"):
        grid().after((1, 4, 5))
    fixed = replace(grid(), why_workers_stay="the stages are interleaved")
    with pytest.raises(LayoutError, match=r"stage 0 has no .* take its place: the stages are"):
        fixed.after((1, 4, 5, 6, 7))


def test_units_go_with_the_cuts() -> None:
    def first_has_one(*, layout: ParallelLayout, times: LayerTimes, slow: Slowness) -> PipelineFlow:
        return flow_of(layout=layout.recut((0, 1, 4)), num_microbatches=4)

    moving = replace(grid(), partition=first_has_one)
    moved = moving.after(range(1, 8))
    assert [shard_group.units for shard_group in moved.shard_groups] == 2 * [(1, 0)] + 2 * [
        (5, 4, 3, 2)
    ]
    assert moved.shard_groups[0].buckets == (100, 100) and moved.largest == (100,) * 6


def test_groups_of_the_same_members_stay_different() -> None:
    edits = grid().edits(GROUPS, 0)
    assert edits["dp"].members == edits["dp again"].members
    assert edits["dp"].identity != edits["dp again"].identity


@given(st.lists(st.integers(0, 15), unique=True, max_size=8))
def test_members_agree_on_every_collective_group(losses: Sequence[int]) -> None:
    """Those within one stage, and the one of all: whoever is in it sees the same members."""
    layout = launch_layout(tp=2, pp=2, dp=4, num_layers=2)
    rules = [rule_of(slots, layout) for slots in ((0, 1), (0, 2, 4, 6), tuple(range(8)))]
    rules.append(rule_of(tuple(range(16)), layout))
    for slot in losses:
        layout = layout.without([slot]).reformed_in_place()
    busy = coordinates_of(layout)
    for slot in busy:
        for rule in rules:
            group = members_of(rule, layout, slot)
            assert slot in group
            assert all(members_of(rule, layout, other) == group for other in group)
    assert sorted(busy) == sorted(members_of(rules[-1], layout, min(busy))) if busy else True


def test_a_flat_job_fills_holes() -> None:
    flat = FlatPlacement(launch_slots=(0, 1, 2, 3), ranks=(0, 1, 2, 3)).after((0, 3, 2))
    assert flat.edits({"dp": (0, 1, 2, 3)}, 0)["dp"].members == (0, 3, 2)
    assert flat.dealt_over == {"launch_slots": (0, 1, 2, 3), "live": (0, 3, 2), "slow": {}}
    assert flat.shard_groups[0].ranks == (0, 3, 2) and flat.shard_group_of(1) is None


def test_a_view_of_the_same_members_moves_nothing() -> None:
    """Layers that somebody asked for stay where they are when a link is renewed."""
    layout = launch_layout(tp=1, pp=2, dp=2, num_layers=8)
    units = dict.fromkeys(range(1, 9), 10)

    def back(*, layout: ParallelLayout, times: LayerTimes, slow: Slowness) -> PipelineFlow:
        return flow_of(layout=layout.recut((0, 4, 8)), num_microbatches=4)

    grid = GridPlacement.at_launch(layout, groups={}, units=units, partition=back)
    moved = grid.recut((0, 5, 8))
    assert moved.after((0, 1, 2, 3)).layout.cuts == (0, 5, 8)
    assert moved.after((0, 1, 3)).layout.cuts == (0, 4, 8)
