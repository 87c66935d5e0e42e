"""The layer partition equals brute force, in both passes, up to 10 units x 5 stages."""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise, product

import pytest

from elaswave_plugin.core.planner.costs import CostModel, UnitCost, uniform_costs
from elaswave_plugin.core.planner.layer_partition import (
    SLACKS,
    Partition,
    StageLoad,
    benefit_seconds,
    evaluate,
    follow_seconds,
    layers_can_help,
    partitions,
    pause_seconds,
    tail_seconds,
)
from elaswave_plugin.errors import ConfigurationError

Cuts = tuple[int, ...]
SIZES = [(units, stages) for units in range(1, 11) for stages in range(1, min(5, units) + 1)]


def minimax(
    costs: CostModel, loads: list[StageLoad], *, now: Cuts, slack: float = 0.0
) -> Partition:
    (found,) = partitions(costs, loads, now=now, slacks=(slack,))
    return found


def all_cuts(units: int, stages: int) -> Iterator[tuple[int, ...]]:
    for inner in combinations(range(1, units), stages - 1):
        yield (0, *inner, units)


def random_case(
    dice: random.Random, units: int, stages: int
) -> tuple[CostModel, list[StageLoad], tuple[int, ...]]:
    """Uneven units, loads, speeds and widths; memory that often forbids the best cuts."""
    costs = CostModel(
        units=tuple(
            UnitCost(
                name=f"unit {unit}",
                forward_s=dice.choice([0.5, 1.0, 1.7]),
                backward_s=dice.choice([1.0, 2.0]),
                weights_s=dice.choice([0.0, 1.0]),
                activation_bytes=dice.choice([1.0, 2.0]),
                weight_bytes=dice.choice([1.0, 3.0]),
                resident_bytes=dice.choice([2.0, 5.0]),
                optimizer_bytes=dice.choice([4.0, 9.0]),
            )
            for unit in range(units)
        ),
        bounds=tuple(range(units + 1)),
        memory_bytes=dice.choice([float("inf"), 12.0 * units / stages, 20.0 * units / stages]),
    )
    loads = [
        StageLoad(
            samples=dice.randint(1, 6),
            width=dice.randint(1, 4),
            speed=dice.choice([1.0, 0.8]),
            in_flight=dice.randint(1, 4),
            incoming=dice.randint(0, 1),
            fill=dice.choice([0.0, 0.5, 2.0]),
        )
        for _ in range(stages)
    ]
    return costs, loads, dice.choice(list(all_cuts(units, stages)))


def brute_seconds(costs: CostModel, loads: list[StageLoad], cuts: tuple[int, ...]) -> float:
    """Independent of the planner: unit by unit, infinite where a worker is too small."""
    worst = 0.0
    for load, (start, stop) in zip(loads, pairwise(cuts), strict=True):
        own = costs.units[start:stop]
        held = sum(
            unit.resident_bytes
            + unit.optimizer_bytes / load.width
            + unit.activation_bytes * load.in_flight
            for unit in own
        )
        if held > costs.memory_bytes * (1 + 1e-9):
            return float("inf")
        seconds, before = (
            sum(unit.forward_s + unit.backward_s + unit.weights_s for unit in units)
            for units in (own, costs.units[:start])
        )
        worst = max(worst, seconds * load.samples / load.speed + before * load.fill)
    return worst


def brute_bytes(
    costs: CostModel, loads: list[StageLoad], cuts: tuple[int, ...], now: tuple[int, ...]
) -> float:
    total = 0.0
    for load, own, old in zip(loads, pairwise(cuts), pairwise(now), strict=True):
        for index in range(*own):
            unit = costs.units[index]
            if index in range(*old):
                total += load.incoming * unit.weight_bytes
            else:
                total += load.width * unit.weight_bytes + unit.optimizer_bytes
    return total


@pytest.mark.parametrize(("units", "stages"), SIZES)
def test_both_passes_equal_brute_force(units: int, stages: int) -> None:
    dice = random.Random(100 * units + stages)
    fitting = 0
    for _ in range(16):
        costs, loads, now = random_case(dice, units, stages)
        table = {cuts: brute_seconds(costs, loads, cuts) for cuts in all_cuts(units, stages)}
        best_s = min(table.values())
        if best_s == float("inf"):
            with pytest.raises(ConfigurationError, match=f"no partition of {units} layers"):
                partitions(costs, loads, now=now)
            continue
        fitting += 1
        for slack, found in zip(SLACKS, partitions(costs, loads, now=now), strict=True):
            allowed = [cuts for cuts, s in table.items() if s <= best_s * (1 + slack) * (1 + 1e-9)]
            assert found.cuts in allowed
            assert found.seconds == pytest.approx(table[found.cuts])
            least = min(brute_bytes(costs, loads, cuts, now) for cuts in allowed)
            assert found.moved_bytes == pytest.approx(least)
            assert found.moved_bytes == pytest.approx(brute_bytes(costs, loads, found.cuts, now))
            again = evaluate(costs, loads, found.cuts, now=now)
            assert (again.seconds, again.moved_bytes) == pytest.approx(
                (found.seconds, found.moved_bytes)
            )
    assert fitting >= 4


@pytest.mark.parametrize(("units", "stages"), [one for one in SIZES if one[0] >= 3])
def test_both_passes_equal_brute_force_where_some_units_may_not_be_cut_apart(
    units: int, stages: int
) -> None:
    """As an embedding and the first layer, or the halves of a layer: cuts are at ``bounds``."""
    dice = random.Random(1000 + 100 * units + stages)
    joined = fitting = 0
    for _ in range(16):
        costs, loads, _ = random_case(dice, units, stages)
        inner = sorted(dice.sample(range(1, units), dice.randint(stages - 1, units - 1)))
        costs = replace(costs, bounds=(0, *inner, units))
        every = list(all_cuts(len(inner) + 1, stages))
        now = dice.choice(every)

        def in_units(cuts: tuple[int, ...], bounds: tuple[int, ...] = costs.bounds) -> Cuts:
            return tuple(bounds[cut] for cut in cuts)

        table = {cuts: brute_seconds(costs, loads, in_units(cuts)) for cuts in every}
        best_s = min(table.values())
        if best_s == float("inf"):
            with pytest.raises(ConfigurationError, match=f"no partition of {len(inner) + 1} lay"):
                partitions(costs, loads, now=now)
            continue
        fitting += 1
        # Whether the units that are held together forbid what would be best without that.
        free = replace(costs, bounds=tuple(range(units + 1)))
        joined += min(brute_seconds(free, loads, c) for c in all_cuts(units, stages)) < best_s
        for slack, found in zip(SLACKS, partitions(costs, loads, now=now), strict=True):
            allowed = [cuts for cuts, s in table.items() if s <= best_s * (1 + slack) * (1 + 1e-9)]
            assert found.cuts in allowed
            assert found.seconds == pytest.approx(table[found.cuts])
            moved = {c: brute_bytes(costs, loads, in_units(c), in_units(now)) for c in allowed}
            assert found.moved_bytes == pytest.approx(min(moved.values()))
            assert found.moved_bytes == pytest.approx(moved[found.cuts])
    assert fitting >= 4 and (joined or stages in (1, units))


def test_every_assignment_of_two_costs_to_six_units_equals_brute_force() -> None:
    loads = [StageLoad(samples=samples, width=1) for samples in (3, 2, 4)]
    for sizes in product((1.0, 2.0), repeat=6):
        units = tuple(
            UnitCost(name=f"unit {n}", forward_s=s, backward_s=s, weight_bytes=s)
            for n, s in enumerate(sizes)
        )
        costs = CostModel(units=units, bounds=tuple(range(7)))
        found = minimax(costs, loads, now=(0, 2, 4, 6))
        best_s = min(brute_seconds(costs, loads, cuts) for cuts in all_cuts(6, 3))
        assert found.seconds == best_s


def test_a_slack_moves_fewer_bytes() -> None:
    """Two per cent of time against a hundred times the bytes."""
    units = tuple(
        UnitCost(name=f"unit {n}", forward_s=s, backward_s=0, weight_bytes=w)
        for n, (s, w) in enumerate([(5.0, 1.0), (0.1, 100.0), (5.0, 1.0), (4.9, 1.0)])
    )
    costs = CostModel(units=units, bounds=(0, 1, 2, 3, 4))
    loads = [StageLoad(samples=1, width=1)] * 2
    tight, loose = partitions(costs, loads, now=(0, 1, 4), slacks=(0.0, 0.02))
    assert (tight.cuts, tight.seconds, tight.moved_bytes) == ((0, 2, 4), 9.9, 100.0)
    assert (loose.cuts, loose.seconds, loose.moved_bytes) == ((0, 1, 4), 10.0, 0.0)


@pytest.mark.parametrize("wounded", range(8))
def test_a_slack_of_one_per_cent_saves_a_quarter_of_the_bytes_or_more(wounded: int) -> None:
    """96 workers, TP1 x PP8 x DP12: 48 layers that may be cut in half, a head, and one loss."""
    costs = uniform_costs(
        num_layers=48, forward_s=1.0, backward_s=2.0, head_s=1.5, weight_bytes=4e8, halves=True
    )
    widths = [12 - (stage == wounded) for stage in range(8)]
    loads = [StageLoad(samples=16 * 12 / width, width=width) for width in widths]
    tight, loose = partitions(costs, loads, now=range(0, 97, 12), slacks=(0.0, 0.01))
    print(f"{loose.moved_bytes / tight.moved_bytes:.2f} of the bytes")
    assert 0 < loose.moved_bytes <= 0.75 * tight.moved_bytes
    assert tight.seconds < loose.seconds <= 1.01 * tight.seconds


def test_halves_and_a_head_are_units_and_the_head_stays_at_the_end() -> None:
    costs = uniform_costs(num_layers=2, forward_s=2.0, backward_s=4.0, head_s=1.0, halves=True)
    assert [unit.forward_s for unit in costs.units] == [1, 1, 1, 1, 1]
    assert costs.bounds == (0, 1, 2, 3, 5)
    loads = [StageLoad(samples=1, width=1)] * 2
    found = minimax(costs, loads, now=(0, 2, 4))
    assert found.cuts == (0, 2, 4) and found.seconds == 9
    assert minimax(costs, loads, now=(0, 2, 4), slack=0.5).moved_bytes == 0


def costs_of_moving() -> CostModel:
    """Six layers of 100 bytes of weights, over links of 50 bytes a second."""
    return uniform_costs(
        num_layers=6,
        forward_s=1.0,
        backward_s=2.0,
        weight_bytes=100.0,
        transfer_bytes_per_s=50.0,
        rebind_s=0.5,
    )


def test_a_pause_is_the_most_weights_that_one_worker_waits_for() -> None:
    costs = costs_of_moving()
    loads = [StageLoad(samples=1, width=2)] * 2
    assert pause_seconds(costs, loads, (0, 3, 6), now=(0, 3, 6)) == 0
    assert pause_seconds(costs, loads, (0, 5, 6), now=(0, 3, 6)) == 2 * 100 / 50 + 0.5
    joins = [StageLoad(samples=1, width=2), StageLoad(samples=1, width=2, incoming=1)]
    assert pause_seconds(costs, joins, (0, 3, 6), now=(0, 3, 6)) == 3 * 100 / 50 + 0.5


@pytest.mark.parametrize(
    ("gain", "pause_s", "horizon_s"),
    # Break-even horizons of 2 C / g.
    [(0.01, 0.13, 26), (0.05, 0.13, 5.2), (0.01, 0.74, 148), (0.05, 0.2, 8)],
)
def test_a_move_pays_from_its_break_even_horizon_on(
    gain: float, pause_s: float, horizon_s: float
) -> None:
    facts = {"before_s": 1.0, "after_s": 1 - gain, "pause_s": pause_s}
    assert benefit_seconds(**facts, tail_s=0, horizon_s=horizon_s * 1.01) > 0
    assert benefit_seconds(**facts, tail_s=0, horizon_s=horizon_s * 0.99) < 0
    late = {**facts, "tail_s": 10 * gain}
    assert benefit_seconds(**late, horizon_s=horizon_s * 1.01 + 10) > 0
    assert benefit_seconds(**late, horizon_s=horizon_s * 0.99 + 10) < 0


def test_optimizer_state_is_on_its_way_for_as_long_as_whoever_receives_most() -> None:
    costs = costs_of_moving()
    loads = [StageLoad(samples=1, width=2), StageLoad(samples=1, width=4)]
    assert follow_seconds(costs, loads, (0, 3, 6), now=(0, 3, 6)) == 0
    # 12 bytes of optimizer state for 2 of weights, of two layers, in shards of 2 and of 4 workers.
    assert follow_seconds(costs, loads, (0, 5, 6), now=(0, 3, 6)) == 2 * 600 / 2 / 50
    assert follow_seconds(costs, loads, (0, 1, 6), now=(0, 3, 6)) == 2 * 600 / 4 / 50
    joins = [*loads[:1], StageLoad(samples=1, width=4, incoming=1)]
    assert follow_seconds(costs, joins, (0, 3, 6), now=(0, 3, 6)) == 3 * 600 / 4 / 50


def test_a_step_is_slower_while_state_follows_and_waits_for_what_takes_longer() -> None:
    assert tail_seconds(follow_s=3.0, step_s=10.0, slowdown=0.5) == 1.5
    assert tail_seconds(follow_s=12.0, step_s=10.0, slowdown=0.5) == 5 + 2
    # As if compute stood still meanwhile.
    assert tail_seconds(follow_s=12.0, step_s=10.0, slowdown=1.0) == 12.0


def test_granularity_decides_whether_layers_can_help() -> None:
    """Checked against the partition itself: one loss of D0, six layers a stage."""
    for dp in range(2, 12):
        costs = uniform_costs(num_layers=24, forward_s=1.0, backward_s=2.0)
        widths = (dp, dp - 1, dp, dp)
        loads = [StageLoad(samples=1000 / width, width=width) for width in widths]
        now = (0, 6, 12, 18, 24)
        better = (
            minimax(costs, loads, now=now).seconds < evaluate(costs, loads, now, now=now).seconds
        )
        assert better == layers_can_help(layers=6, launch_width=dp, lost=1), dp
    assert not layers_can_help(layers=100, launch_width=2, lost=0)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (
            lambda: minimax(
                uniform_costs(num_layers=2, forward_s=1, backward_s=2),
                [StageLoad(samples=1, width=1)] * 3,
                now=(0, 1, 2, 2),
            ),
            "2 layers for 3 stages",
        ),
        (
            lambda: minimax(
                uniform_costs(
                    num_layers=4,
                    forward_s=1,
                    backward_s=2,
                    weight_bytes=2**30,
                    memory_bytes=2**31,
                ),
                [StageLoad(samples=1, width=1)] * 2,
                now=(0, 2, 4),
            ),
            "no partition of 4 layers over 2 stages fits into 2 GiB a worker",
        ),
        (
            lambda: uniform_costs(num_layers=1, forward_s=-1.0, backward_s=2),
            "layer 0: forward_s is -1.0, wanted a number from 0",
        ),
        (
            lambda: uniform_costs(num_layers=1, forward_s=1, backward_s=2, memory_bytes=0.0),
            "memory_bytes is 0.0",
        ),
    ],
)
def test_bad_input_is_one_sentence_with_the_numbers(build: object, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        build()  # type: ignore[operator]
