"""Slow workers get fewer micro-batches, their stage fewer layers or a higher clock; nobody else."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elaswave_plugin.core.layout.layout import ParallelLayout, launch_layout
from elaswave_plugin.core.planner.costs import uniform_costs
from elaswave_plugin.core.planner.dvfs import ClockTable
from elaswave_plugin.core.planner.joint import joint_plan
from elaswave_plugin.core.planner.layer_times import LayerTimes
from elaswave_plugin.core.planner.microbatch_split import redeal
from elaswave_plugin.core.planner.payback import (
    LEAST_GAIN,
    PAYS_WITHIN_STEPS,
    STEPS_TO_JUDGE,
    Payback,
    gain_of_view,
    more_sums,
)
from elaswave_plugin.core.planner.pipeline_flow import PipelineFlow, flow_of
from elaswave_plugin.core.planner.prediction import StepWork
from elaswave_plugin.core.planner.slot_time import slot_flow
from elaswave_plugin.core.recovery_plan.placement import FlatPlacement, GridPlacement
from elaswave_plugin.core.step.dataflow import Dataflow, deal, fair_counts, share, slowest_seconds
from elaswave_plugin.core.step.schedule import Piece, window_lists
from elaswave_plugin.core.step.simulate import LinkTime, StageTime, simulate

TIMES = LayerTimes(layer=(0.004, 0.008), is_measured=True)
PP2 = launch_layout(tp=1, pp=2, dp=2, num_layers=12)
SLOWNESS = st.floats(1.0, 9.0).map(lambda factor: float(f"{factor:.2g}"))


@given(st.integers(0, 9), st.lists(SLOWNESS, min_size=1, max_size=4))
def test_fair_counts_equal_brute_force(spare: int, slowness: list[float]) -> None:
    total, width = len(slowness) + spare, len(slowness)
    counts = fair_counts(total, slowness)
    assert sum(counts) == total and min(counts) >= 1
    found = max(count * each for count, each in zip(counts, slowness, strict=True))
    best = min(
        max(count * each for count, each in zip(some, slowness, strict=True))
        for some in itertools.product(range(1, total + 1), repeat=width)
        if sum(some) == total
    )
    assert found == best == slowest_seconds(total, slowness)


def test_a_slow_replica_gives_micro_batches_away() -> None:
    flow = deal(num_microbatches=16, launch_slots=(0, 1, 2, 3), live=(3, 1, 0, 2), slow={2: 2.0})
    assert str(flow) == "w0: 0 4 8 12 10 | w1: 1 5 9 13 14 | w2: 2 6 | w3: 3 7 11 15"
    assert not flow.is_healthy and flow.seconds({2: 2.0}) == 5
    # Complete, in the order of sums of the launch.
    assert [term.replica for term in flow.fold()] == [0, 1, 2, 3]
    lost = deal(num_microbatches=16, launch_slots=(0, 1, 2, 3), live=(0, 2, 3), slow={2: 2.0})
    assert [len(ks) for _, ks in lost.placement] == [7, 3, 6]
    assert deal(num_microbatches=16, launch_slots=(0, 1), live=(0, 1), slow={}).is_healthy


def test_slow_replicas_take_smaller_shares_of_samples() -> None:
    shares = share(num_samples=8, launch_slots=(0, 1), live=(0, 1), slow={0: 3.0})
    assert str(shares) == "w0: [0, 2) | w1: [2, 8)"
    assert [shares.weight(slot) for slot in (0, 1)] == [0.5, 1.5]


def seconds_of_deal(workers: Sequence[int], slow: float, windows: Sequence[int]) -> float:
    """The step where stage 0 runs micro-batch k on ``workers[k]``, and stage 1 evenly."""
    dealt = [
        [
            [Piece(k // 2, k, k + 1) for k, one in enumerate(some) if one == worker]
            for worker in (0, 1)
        ]
        for some in (workers, [k % 2 for k in range(len(workers))])
    ]
    lists = window_lists(tuple(tuple(map(tuple, stage)) for stage in dealt), windows)
    times = [StageTime(forward_s=1.0, backward_s=2.0)] * 2
    return simulate(lists, times, LinkTime(), slowness=[[1.0, slow], [1.0, 1.0]]).seconds


@pytest.mark.parametrize("slow", [1.6, 2.0, 3.0, 5.0])
def test_the_plan_is_close_to_the_best_of_all_deals(slow: float) -> None:
    layout = launch_layout(tp=1, pp=2, dp=2, num_layers=2)
    flow = flow_of(layout=layout, num_microbatches=8, times=TIMES, slow={1: slow})
    assert flow.compute_s is not None
    planned = flow.compute_s / 0.004
    best = min(
        seconds_of_deal(workers, slow, windows)
        for workers in itertools.product((0, 1), repeat=8)
        if set(workers) == {0, 1}
        for windows in ((2, 1), (3, 1), (4, 1))
    )
    even = seconds_of_deal([0, 1] * 4, slow, (2, 1))
    print(f"slow {slow}: planned {planned:g}, best {best:g}, even {even:g}")
    assert best <= planned * (1 + 1e-9)
    assert planned <= 1.2 * best and planned < even


@given(
    st.sampled_from([(1, 2, 2), (1, 3, 4), (2, 2, 2)]),
    st.dictionaries(st.integers(0, 7), SLOWNESS, min_size=1, max_size=2),
    st.integers(2, 4),
)
def test_no_plan_is_slower_than_the_even_deal(
    sizes: tuple[int, int, int], slow: dict[int, float], each: int
) -> None:
    tp, pp, dp = sizes
    layout = launch_layout(tp=tp, pp=pp, dp=dp, num_layers=2 * pp)
    facts = {"layout": layout, "num_microbatches": each * dp, "times": TIMES}
    flow, even = flow_of(**facts, slow=slow), flow_of(**facts)
    assert flow == flow_of(**facts, slow=dict(reversed(slow.items())))
    planned_s, even_s = (one.simulated(TIMES, slow).seconds for one in (flow, even))
    assert planned_s <= even_s * (1 + 1e-9)
    as_before = all(len(flow.microbatches(slot)) == each for slot in layout.workers)
    assert flow.is_healthy == as_before and even.is_healthy
    # What the planner simulates by slots is what the op lists of all workers take.
    assert flow.compute_s == (None if as_before else pytest.approx(planned_s))


def level(layout: ParallelLayout, slow: dict[int, float]) -> ParallelLayout:
    return flow_of(
        layout=layout, times=TIMES, slow=slow, launch_cuts=PP2.cuts, num_microbatches=16
    ).layout


def test_the_stage_of_a_slow_worker_has_fewer_layers_until_it_is_over() -> None:
    slow = {1: 4.0}
    moved = level(PP2, slow)
    assert moved.cuts == (0, 5, 12) and moved.widths == PP2.widths
    stays, moves = (
        flow_of(layout=one, num_microbatches=16, times=TIMES, slow=slow) for one in (PP2, moved)
    )
    assert moves.compute_s is not None and stays.compute_s is not None
    assert moves.compute_s < 0.95 * stays.compute_s
    assert level(moved, {}).cuts == PP2.cuts
    # A little slower is not worth a layer.
    assert level(PP2, {1: 1.3}).cuts == PP2.cuts


def test_of_a_tp_group_the_slowest_counts() -> None:
    layout = launch_layout(tp=2, pp=1, dp=2, num_layers=2)
    flow = flow_of(layout=layout, num_microbatches=8, times=TIMES, slow={2: 1.5, 3: 3.0})
    assert [len(flow.microbatches(slot)) for slot in (0, 1, 2, 3)] == [6, 6, 2, 2]


def test_the_stage_of_a_slow_worker_runs_at_a_higher_clock() -> None:
    table = ClockTable(clocks=(0.8, 0.9, 1.0, 1.1, 1.2))
    limits = {"clocks": table, "power_cap_w": 4 * table.watts(1.0)}
    flow = flow_of(layout=PP2, num_microbatches=16, times=TIMES, slow={3: 2.0}, **limits)
    assert flow.clocks[1] > 1 > flow.clocks[0]
    assert flow_of(layout=PP2, num_microbatches=16, times=TIMES, **limits).clocks == ()


def remedies(
    layout: ParallelLayout, slow: dict[int, float], num_microbatches: int
) -> tuple[bool, bool, tuple[float, ...]]:
    """Of a plan that may do all: who is slow has less to do, layers have moved, and the clocks."""
    table = ClockTable(clocks=(0.8, 0.9, 1.0, 1.1, 1.2))
    flow = flow_of(
        layout=layout,
        launch_cuts=layout.cuts,
        num_microbatches=num_microbatches,
        times=TIMES,
        slow=slow,
        clocks=table,
        power_cap_w=len(layout.workers) * table.watts(1.0),
    )
    counts = [len(flow.microbatches(slot)) for slot in layout.workers]
    less = all(counts[slot] < num_microbatches / layout.dp for slot in slow)
    return less, flow.layout.cuts != layout.cuts, flow.clocks


@pytest.mark.parametrize(
    ("pp", "dp", "slowness", "layers_move", "clocks_change"),
    [
        # Less work is enough, nearly: what more would give is not worth a layer, nor is a clock.
        (2, 2, 1.3, False, False),
        (2, 4, 4.0, False, False),
        # It is not, and layers make the rest.
        (2, 2, 4.0, True, False),
        (4, 4, 3.0, True, False),
        # Nor are layers: clocks come on top of both.
        (4, 4, 2.0, True, True),
    ],
)
def test_remedies_come_in_the_order_of_their_cost(
    pp: int, dp: int, slowness: float, layers_move: bool, clocks_change: bool
) -> None:
    """Dataflow, then layers, then clocks: each only where those before it leave something."""
    layout = launch_layout(tp=1, pp=pp, dp=dp, num_layers=6 * pp)
    num_microbatches = (8 if pp == 2 else 16) * dp
    less, moved, clocks = remedies(layout, {1: slowness}, num_microbatches)
    assert less and moved == layers_move
    assert (set(clocks) != {1.0}) == clocks_change


def test_clocks_take_the_place_of_layers_only_where_these_may_not_move() -> None:
    table, slow = ClockTable(clocks=(0.8, 0.9, 1.0, 1.1, 1.2)), {1: 4.0}
    _, moved, clocks = remedies(PP2, slow, 16)
    assert moved and set(clocks) == {1.0}
    facts = {"num_microbatches": 16, "times": TIMES, "slow": slow, "clocks": table}
    held = flow_of(layout=PP2, power_cap_w=4 * table.watts(1.0), **facts)
    assert held.clocks[0] > 1


def test_of_very_wide_stages_a_slow_worker_counts_by_its_speed() -> None:
    widths, slowness = (32, 32), ((1.0,) * 32, (*(2.0,) * 4, *(1.0,) * 28))
    work = StepWork(num_microbatches=32 * 400, microbatch_size=1, launch_width=32)
    layout = launch_layout(tp=1, pp=2, dp=32, num_layers=8)
    costs = uniform_costs(num_layers=8, forward_s=1.0, backward_s=2.0)
    plan = joint_plan(
        before=layout,
        after=layout,
        costs=costs,
        work=work,
        slow=dict.fromkeys(range(32, 36), 2.0),
    )
    assert "estimated: stages flow as fluids, too many workers to simulate each" in plan.reasons
    assert plan.slowness == slowness
    split = redeal(
        widths=widths,
        num_microbatches=work.num_microbatches,
        microbatch_size=1,
        slot_width=plan.chosen.choice.slot_width,
        slowness=slowness,
    )
    exact_s = slot_flow(split).seconds(
        costs.stage_times(plan.layout.cuts), LinkTime(), plan.chosen.windows
    )
    print(f"estimate / exact {plan.seconds / exact_s:.3f}")
    assert 0.95 < plan.seconds / exact_s < 1.05


def test_a_seating_tells_who_is_slow_and_moves_nothing_for_the_same_ones() -> None:
    def move_all(*, layout: ParallelLayout, times: LayerTimes, slow: object) -> PipelineFlow:
        moved = layout.recut((0, 1, 12) if slow else (0, 6, 12))
        return flow_of(layout=moved, num_microbatches=4)

    units = dict.fromkeys(range(14), 10)
    grid = GridPlacement.at_launch(PP2, groups={}, units=units, partition=move_all)
    ranks = (0, 1, 2, 3)
    slow = grid.after(ranks, TIMES, {1: 2.0, 9: 3.0})
    assert slow.layout.cuts == (0, 1, 12) and slow.dealt_over["slow"] == {1: 2.0}
    asked = slow.recut((0, 3, 12))
    assert asked.after(ranks, TIMES, {1: 2.0}).layout.cuts == (0, 3, 12)
    assert grid.with_state(asked.state()).after(ranks, TIMES, {1: 2.0}).layout.cuts == (0, 3, 12)
    assert asked.after(ranks, TIMES, {}).layout.cuts == (0, 6, 12)
    flat = FlatPlacement(launch_slots=ranks, ranks=ranks)
    told = flat.after((0, 1, 2), TIMES, {1: 2.0, 3: 2.0}).state()
    assert told == {"slow": [[1, 2.0]]} and flat.state() == {}
    again = flat.with_state(told).dealt_over
    assert again == {"launch_slots": ranks, "live": ranks, "slow": {1: 2.0}}


def gain(slow: float, each: int) -> float:
    launch_slots, factors = (0, 1, 2, 3), {1: slow}
    now, wanted = (
        deal(num_microbatches=4 * each, launch_slots=launch_slots, live=launch_slots, slow=some)
        for some in ({}, factors)
    )
    return gain_of_view(now, wanted, slow=factors, times=TIMES)


def test_little_gain_counts_as_none_while_somebody_is_slow() -> None:
    # Two micro-batches each: one of 1.3 times is dealt as before.
    assert gain(1.3, 2) == 0 < LEAST_GAIN < gain(1.3, 8) == pytest.approx(1 - 9 / 10.4)
    launch_slots = (0, 1)
    uneven = Dataflow(
        num_microbatches=80,
        num_replicas=2,
        placement=((0, tuple(range(41))), (1, tuple(range(41, 80)))),
    )
    even = deal(num_microbatches=80, launch_slots=launch_slots, live=launch_slots)
    assert 0 < gain_of_view(uneven, even, slow={}, times=TIMES) < LEAST_GAIN


def test_a_view_is_asked_for_where_it_pays_within_a_hundred_steps() -> None:
    payback = Payback()
    payback.pause_s = 1.0
    assert not payback.pays(gain=0.5, step=3)  # nobody knows what a step takes
    for step_s in (0.1, 9.0, 0.1):
        payback.note(step_s=step_s)
    least = 2 * payback.pause_s / (PAYS_WITHIN_STEPS * 0.1)
    assert payback.pays(gain=least * 1.001, step=3)
    assert not payback.pays(gain=least * 0.999, step=3)


def test_sums_that_are_sent_apart_are_taken_from_the_gain() -> None:
    launch = {"num_microbatches": 16, "launch_slots": (0, 1, 2, 3), "live": (0, 1, 2, 3)}
    even, less = deal(**launch), deal(**launch, slow={2: 2.0})
    # Two of its micro-batches go to others, one each; what it keeps is no whole replica.
    assert (even.sent_apart, less.sent_apart) == (0, 2)
    assert more_sums(even, less) == 2 and more_sums(less, even) == -2
    shares = share(num_samples=8, launch_slots=(0, 1), live=(0, 1), slow={0: 3.0})
    assert more_sums(shares, shares) == 0
    staged = {"layout": PP2, "num_microbatches": 8, "times": TIMES}
    assert more_sums(flow_of(**staged), flow_of(**staged, slow={1: 3.0})) > 0
    payback = Payback()
    payback.pause_s = 1.0
    payback.note(step_s=1.0)
    assert payback.pays(gain=0.3, step=3, more_s=0.27)
    assert not payback.pays(gain=0.3, step=3, more_s=0.29)
    # Cheaper sums are no reason for longer passes.
    assert not payback.pays(gain=0.0, step=3, more_s=-1.0)


def judged(after_s: Sequence[float], *, same_members: bool = True) -> str | None:
    """The verdict on steps after a view that was asked for at steps of a second."""
    payback = Payback()
    for _ in range(3):
        payback.note(step_s=1.0)
    payback.ask(step=3)
    payback.restart(payback.asked, same_members=same_members)
    for step_s in after_s:
        payback.note(step_s=step_s)
    return payback.worse()


def test_steps_that_got_longer_speak_for_taking_work_back() -> None:
    assert judged([1.2] * STEPS_TO_JUDGE) == "steps take 1.2 s instead of 1 s"
    assert judged([1.2] * (STEPS_TO_JUDGE - 1)) is None
    assert judged([0.9] * 9 + [1.2] * STEPS_TO_JUDGE) is not None
    assert judged([0.9, 1.1] * STEPS_TO_JUDGE) is None
    # A view that also lost somebody says nothing of it.
    assert judged([1.2] * STEPS_TO_JUDGE, same_members=False) is None


def test_a_view_that_takes_work_back_is_the_last_word_and_is_not_judged() -> None:
    payback = Payback()
    payback.note(step_s=1.0)
    payback.ask(step=3)
    asked = payback.asked
    payback.restart(asked, same_members=True)
    for _ in range(STEPS_TO_JUDGE):
        payback.note(step_s=2.0)
    assert payback.worse() is not None
    payback.take_back(step=12)
    assert payback.asked is not None and asked is not None
    assert payback.asked > asked and payback.asked.takes_back and not asked.takes_back
    payback.restart(payback.asked, same_members=True)
    for _ in range(STEPS_TO_JUDGE):
        payback.note(step_s=3.0)
    assert payback.worse() is None
    # Another try comes as late as a third view.
    assert not payback.pays(gain=0.5, step=51) and payback.pays(gain=0.5, step=52)


def test_a_view_in_which_nobody_is_slow_any_more_is_not_judged() -> None:
    payback = Payback()
    payback.note(step_s=1.0)
    payback.ask(step=3, is_judged=False)
    payback.restart(payback.asked, same_members=True)
    for _ in range(STEPS_TO_JUDGE):
        payback.note(step_s=2.0)
    assert payback.worse() is None


def test_each_view_comes_later_than_the_one_before_also_where_others_take_over() -> None:
    payback, asked = Payback(), []
    for step in range(4000):
        payback.note(step_s=1.0)
        if payback.pays(gain=0.3, step=step):
            payback.ask(step=step)
            asked.append(step)
            told, payback = payback.asked, Payback()
            payback.restart(told)
    assert asked == [0, 10, 50, 210, 850, 1490, 2130, 2770, 3410]
