"""Workers of TP2 x PP2 x DP2 that come back in any order, while others are still missing."""

from collections.abc import Iterator
from functools import partial
from itertools import permutations
from random import Random

import pytest

from elaswave_plugin.core.layout.group_rules import coordinates_of, members_of, rule_of
from elaswave_plugin.core.layout.layout import ParallelLayout, launch_layout
from elaswave_plugin.core.planner.pipeline_flow import flow_of
from elaswave_plugin.core.recovery_plan.placement import GridPlacement, Partition

LAUNCH = launch_layout(tp=2, pp=2, dp=2, num_layers=4)
GROUPS = {"tp": (0, 1), "dp": (0, 2), "pp": (0, 4), "model": (0, 1, 4, 5)}
WORK = {"num_microbatches": 4, "policy": "auto"}
PIPELINE = rule_of((0, 4), LAUNCH)
LEVEL: Partition = partial(flow_of, launch_cuts=LAUNCH.cuts, move_workers=True, **WORK)


def at_launch(partition: Partition | None) -> GridPlacement:
    """The placement of the whole job."""
    units = dict.fromkeys(range(6), 100)
    return GridPlacement.at_launch(LAUNCH, groups=GROUPS, units=units, partition=partition)


def views_of(order: tuple[int, ...], partition: Partition | None) -> Iterator[GridPlacement]:
    """The views of a job that loses these workers at once, and gets them back in this order."""
    present = set(range(8)) - {*order}
    placement = at_launch(partition).after(sorted(present))
    yield placement
    for slot in order:
        present.add(slot)
        placement = placement.after(sorted(present))
        yield placement


def histories(count: int) -> Iterator[tuple[int, ...]]:
    """Draw orders in which three workers at most are missing: each slot is lost, or comes back."""
    dice = Random(20261128)
    for _ in range(count):
        missing: set[int] = set()
        turns = []
        while len(turns) < 12 or missing:
            may_lose = len(missing) < 3 and len(turns) < 12
            slot = dice.choice([s for s in range(8) if s in missing or may_lose])
            missing ^= {slot}
            turns.append(slot)
        yield tuple(turns)


def check_view(view: GridPlacement, order: tuple[int, ...]) -> int:
    """Pipeline groups name the stage by their order; returns how many workers have no place."""
    places, free = coordinates_of(view.layout), 0
    for slot in view.layout.workers:
        members, place = members_of(PIPELINE, view.layout, slot), places.get(slot)
        free += place is None
        stages = [places[one].stage for one in members if one in places]
        assert members == (slot,) if place is None else stages == [0, 1], order
        assert place is None or members[place.stage] == slot, order
    return free


def check_whole(layout: ParallelLayout, order: tuple[int, ...]) -> bool:
    """Nobody is without a place, and layers are the launch's; returns if stages are as well."""
    assert layout.is_rectangular and not layout.free and layout.cuts == LAUNCH.cuts, order
    flow = flow_of(layout=layout, **WORK)
    assert flow.is_healthy == layout.keeps_stages, order
    for slot, place in coordinates_of(layout).items() if flow.is_healthy else ():
        assert place.stage == coordinates_of(LAUNCH)[slot].stage, order
        assert flow.microbatches(slot) == tuple(range(place.order, 4, 2)), order
    return flow.is_healthy


@pytest.mark.parametrize("partition", [None, LEVEL], ids=["layers stay", "layers move"])
@pytest.mark.parametrize("count", [2, 3])
def test_every_view_has_places_and_the_last_one_those_of_all(
    count: int, partition: Partition | None
) -> None:
    """All are as at launch if each is in its stage; who is free has a group of its own."""
    free, as_at_launch = 0, 0
    for order in permutations(range(8), count):
        for view in views_of(order, partition):
            free += check_view(view, order)
        as_at_launch += check_whole(view.layout, order)
    assert free > 0 and as_at_launch > 0


@pytest.mark.parametrize("partition", [None, LEVEL], ids=["layers stay", "layers move"])
def test_losses_and_returns_may_alternate(partition: Partition | None) -> None:
    """Others are lost while some are missing, or have just come back."""
    free, whole = 0, 0
    for turns in histories(200 if partition is None else 20):
        view, present = at_launch(partition), {*range(8)}
        for slot in turns:
            present ^= {slot}
            view = view.after(sorted(present))
            free += check_view(view, turns)
            if len(present) == 8:
                check_whole(view.layout, turns)
                whole += 1
    assert free > 0 and whole > 20
