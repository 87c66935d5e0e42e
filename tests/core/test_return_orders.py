"""Workers of TP2 x PP2 x DP2 that come back in any order, while others are still missing."""

from collections.abc import Iterator
from functools import partial
from itertools import permutations

import pytest

from elaswave_plugin.core.layout.group_rules import coordinates_of, members_of, rule_of
from elaswave_plugin.core.layout.layout import launch_layout
from elaswave_plugin.core.planner.pipeline_flow import flow_of, level_layers
from elaswave_plugin.core.recovery_plan.placement import GridPlacement, Partition

LAUNCH = launch_layout(tp=2, pp=2, dp=2, num_layers=4)
GROUPS = {"tp": (0, 1), "dp": (0, 2), "pp": (0, 4), "model": (0, 1, 4, 5)}
WORK = {"num_microbatches": 4, "policy": "auto"}
LEVEL: Partition = partial(level_layers, launch_cuts=LAUNCH.cuts, move_workers=True, **WORK)


def views_of(order: tuple[int, ...], partition: Partition | None) -> Iterator[GridPlacement]:
    """The views of a job that loses these workers at once, and gets them back in this order."""
    present = set(range(8)) - {*order}
    placement = GridPlacement.at_launch(
        LAUNCH, groups=GROUPS, units=dict.fromkeys(range(6), 100), partition=partition
    )
    placement = placement.after(sorted(present))
    yield placement
    for slot in order:
        present.add(slot)
        placement = placement.after(sorted(present))
        yield placement


@pytest.mark.parametrize("partition", [None, LEVEL], ids=["layers stay", "layers move"])
@pytest.mark.parametrize("count", [2, 3])
def test_every_view_has_places_and_the_last_one_those_of_all(
    count: int, partition: Partition | None
) -> None:
    """A pipeline group names the stage by its order; all are as at launch if each is in its stage.

    Who is free has a group of its own; when all are back, none is, and layers are the launch's.
    """
    pipeline, free, as_at_launch = rule_of((0, 4), LAUNCH), 0, 0
    for order in permutations(range(8), count):
        for view in views_of(order, partition):
            places = coordinates_of(view.layout)
            for slot in view.layout.workers:
                members, place = members_of(pipeline, view.layout, slot), places.get(slot)
                free += place is None
                stages = [places[one].stage for one in members if one in places]
                assert members == (slot,) if place is None else stages == [0, 1], order
                assert place is None or members[place.stage] == slot, order
        layout = view.layout
        assert layout.is_rectangular and not layout.free and layout.cuts == LAUNCH.cuts, order
        flow = flow_of(layout=layout, **WORK)
        assert flow.is_healthy == layout.keeps_stages, order
        as_at_launch += flow.is_healthy
        for slot, place in coordinates_of(layout).items() if flow.is_healthy else ():
            assert place.stage == coordinates_of(LAUNCH)[slot].stage, order
            assert flow.microbatches(slot) == tuple(range(place.order, 4, 2)), order
    assert free > 0 and as_at_launch > 0
