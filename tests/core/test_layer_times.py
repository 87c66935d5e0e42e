"""The measured times of layers decide the cuts, alike on every worker and past noise."""

from functools import partial

import pytest

from elaswave_plugin.core.layout.layout import launch_layout
from elaswave_plugin.core.planner.layer_times import (
    AROUND,
    BACKWARD,
    BYTE,
    FOLLOWED,
    FORWARD,
    FRONT,
    HELD,
    INPUTS,
    LAYER,
    LINK,
    OPERATION,
    PARTS,
    TAIL,
    WEIGHTS,
    LayerTimes,
    PassTimes,
    agreed,
)
from elaswave_plugin.core.planner.pipeline_flow import flow_of
from elaswave_plugin.core.step.simulate import LinkTime

HELD_BYTES = [123456789.0 if part == LAYER else 0.0 for part in PARTS]
LAYOUT = launch_layout(tp=1, pp=2, dp=2, num_layers=12)


def times_of(steps: list[list[float]]) -> PassTimes:
    times = PassTimes(wanted_steps=3)
    for step in steps:
        for seconds in step:
            times.note(LAYER, FORWARD, seconds)
            times.note(LAYER, BACKWARD, 2 * seconds)
        times.step_over()
    return times


def test_means_over_micro_batches_then_medians_over_steps() -> None:
    """A step takes the sum of its passes; steps that something disturbed do not count."""
    assert times_of([[9, 9, 9], [1, 2, 99]]).medians() == {}
    times = times_of([[9, 9, 9], [1, 2, 99], [1, 3, 5]])
    assert times.medians() == {LAYER: [9, 18]}
    times.note(LAYER, FORWARD, 1e9)
    times.drop_step()
    times.step_over()
    assert times.medians() == {LAYER: [9, 18]}


def test_what_a_step_takes_beside_its_passes_is_told_with_them() -> None:
    times = PassTimes(wanted_steps=3)
    times.link_rate, times.sample_bytes = (0.001, 0.0001), 100
    for seconds in (0.1, 0.3, 0.2):
        assert OPERATION not in times.medians()
        times.note(LAYER, FORWARD, 1.0)
        times.note(LAYER, BACKWARD, 2.0)
        times.note_beside(seconds, 10 * seconds)
        times.step_over()
    told = times.medians()
    link = {LINK: [0.001, 0.01], BYTE: [0.0001]}
    assert told == link | {LAYER: [1.0, 2.0], OPERATION: [0.2], AROUND: [2.0]}
    waits = {**told, OPERATION: [0.3], AROUND: [1.0]}
    got = agreed({0: {**told, FRONT: [0.0, 0.0]}, 1: waits, 2: waits})
    assert (got.operation_s, got.around_s, got.link) == (0.3, 2.0, (0.001, 0.01))
    assert LayerTimes.from_json(got.to_json()) == got
    costs = got.costs(num_layers=2)
    assert costs.fixed_s == 0.3 and costs.link == LinkTime(latency_s=0.001, sample_s=0.01)
    assert costs.transfer_bytes_per_s == pytest.approx(1e4)


def test_passes_while_state_follows_are_compared_with_those_of_the_steps_before() -> None:
    times = times_of([[1.0]] * 3)
    # 1.5 and 2 seconds for 1 and 2; what came after the state counts as usual.
    for which, followed_s, usual_s in ((FORWARD, 1.5, 1.0), (BACKWARD, 2.0, 2.0)):
        times.note(LAYER, which, followed_s, followed=True)
        times.note(LAYER, which, usual_s)
    assert FOLLOWED not in times.medians()
    times.step_over()
    told = times.medians()
    assert told[FOLLOWED] == [pytest.approx(3.5 / 3 - 1)]
    got = agreed({0: told, 1: {**told, FOLLOWED: [0.3]}, 2: {**told, FOLLOWED: [0.9]}})
    assert got.slowdown == 0.3 == got.costs(num_layers=2).slowdown
    assert LayerTimes.from_json(got.to_json()) == got


def test_what_was_not_compared_counts_as_if_compute_stood_still() -> None:
    times = times_of([[1.0]] * 2)
    times.note(LAYER, FORWARD, 3.0, followed=True)
    times.step_over()
    times.note(LAYER, FORWARD, 3.0, followed=True)
    times.drop_step()
    times.step_over()
    assert FOLLOWED not in times.medians(), "too few steps before it; an interrupted step"
    assert agreed({0: {LAYER: [1.0, 2.0]}}).costs(num_layers=2).slowdown == 1.0


def test_a_wait_for_the_first_stage_is_not_what_a_step_takes_around_its_passes() -> None:
    """If no worker of the first stage is left, the others' waits for it are all that is known."""
    waited = {LAYER: [1.0, 2.0], AROUND: [7.0]}
    assert agreed({1: waited, 2: waited}).around_s == 0.0


def test_a_prediction_knows_what_rounding_took_away() -> None:
    times = agreed({0: {FRONT: [0, 0], LAYER: [1.049, 2.049], AROUND: [0.5]}})
    assert times.layer == (1.0, 2.0)
    flow = flow_of(layout=LAYOUT.without([0]), num_microbatches=8, times=times)
    assert flow.compute_s is not None
    assert flow.step_s == pytest.approx(flow.compute_s * 3.098 / 3 + 0.5)
    assert flow_of(layout=LAYOUT.without([0]), num_microbatches=8).step_s is None


def test_a_step_is_predicted_from_operations_and_messages_too() -> None:
    """One micro-batch through two stages and back: four operations, two messages, and the rest."""
    layout = launch_layout(tp=1, pp=2, dp=1, num_layers=2)
    times = LayerTimes(operation_s=0.1, link=(0.01, 0.02), around_s=5.0, is_measured=True)
    simulated = flow_of(layout=layout, num_microbatches=1).simulated(times, {})
    assert times.step_s(simulated.seconds) == pytest.approx(2 * 3 + 4 * 0.1 + 2 * 0.03 + 5)


def test_the_pace_is_that_of_the_fastest_pass_that_is_compared() -> None:
    times = PassTimes()
    for compared, pace in ((None, 0.1), (2, 0.2), (1, 0.3)):
        times.compared = compared
        for seconds in (3.0, 2.0, 1.0):
            times.note(LAYER, FORWARD, seconds, tokens=10)
        times.step_over()
        assert times.pace == pace
    times.drop_step()
    assert times.pace is None


def test_split_backwards_tell_the_share_of_weight_gradients() -> None:
    """The workers that saw a whole one tell its time; else it is the sum of its parts."""
    apart, both = PassTimes(wanted_steps=2), times_of([[0.5]] * 3)
    for times in (apart, both):
        for _ in range(2):
            assert WEIGHTS not in times.medians()
            for which, seconds in ((FORWARD, 0.5), (INPUTS, 0.7), (WEIGHTS, 0.3)):
                times.note(LAYER, which, seconds)
            times.step_over()
    assert apart.medians() == {LAYER: [0.5, 1.0], WEIGHTS: [pytest.approx(0.3)]}
    both.note(LAYER, INPUTS, 0.7)
    both.note(LAYER, WEIGHTS, 0.3)
    both.step_over()
    assert both.medians() == {LAYER: [0.5, 1.0], WEIGHTS: [pytest.approx(0.3)]}
    told = agreed({0: apart.medians(), 1: {LAYER: [0.5, 1.1]}})
    assert (told.weights, told.layer) == (0.3, (0.5, 1.1))
    assert LayerTimes.from_json(told.to_json()) == told
    layer = told.costs(num_layers=1).units[1]
    assert (layer.backward_s, layer.weights_s) == (pytest.approx(0.77), pytest.approx(0.33))
    behind = LayerTimes(tail=(1.0, 2.0)).costs(num_layers=1).units[-1]
    assert (behind.backward_s, behind.weights_s) == (2.0, 0.0)


def test_others_are_told_few_digits_of_times_and_all_of_bytes() -> None:
    times = PassTimes(wanted_steps=3)
    times.link_rate, times.sample_bytes = (0.00123456789, 1.23456789e-9), 1_000_000
    times.note_held(LAYER, 123456789.0)
    assert times.told() == {LINK: [0.0012346, 0.0012346], BYTE: [1.2346e-9], HELD: HELD_BYTES}


def test_only_the_last_steps_count() -> None:
    assert times_of([[100.0]] * 20 + [[1.0]] * 15).medians() == {LAYER: [1, 2]}


def test_everyone_agrees_whatever_the_order() -> None:
    told = {
        2: {LAYER: [0.0201, 0.041], TAIL: [0.031, 0.062]},
        0: {LAYER: [0.0199, 0.039], FRONT: [0.001, 0.002]},
        1: {},
    }
    times = agreed(told)
    assert times == agreed(dict(reversed(told.items())))
    assert times.layer == (0.02, 0.04) and times.tail == (0.031, 0.062)
    assert LayerTimes.from_json(times.to_json()) == times


def test_without_a_measured_layer_nothing_counts() -> None:
    assert agreed({0: {}, 1: {FRONT: [1.0, 1.0]}}) == LayerTimes()


def test_times_only_scale_a_plan_of_equal_layers() -> None:
    level = partial(flow_of, launch_cuts=LAYOUT.cuts, num_microbatches=8)
    lost = LAYOUT.without([0])
    assumed, measured = LayerTimes(), LayerTimes(layer=(0.004, 0.008), is_measured=True)
    for times in (assumed, measured):
        assert level(layout=lost, times=times).layout.cuts == (0, 4, 12)
    flow = flow_of(layout=lost, num_microbatches=8, times=measured)
    unit = flow_of(layout=lost, num_microbatches=8, times=LayerTimes(is_measured=True))
    assert flow.compute_s == pytest.approx(0.004 * (unit.compute_s or 0))
    assert flow_of(layout=lost, num_microbatches=8).compute_s is None


def test_a_heavy_head_keeps_layers_at_the_first_stage() -> None:
    def cuts(**more: tuple[float, float]) -> tuple[int, ...]:
        times = LayerTimes(layer=(1.0, 2.0), is_measured=True, **more)
        return flow_of(
            layout=LAYOUT.without([0]),
            times=times,
            launch_cuts=LAYOUT.cuts,
            num_microbatches=16,
        ).layout.cuts

    # One worker against two: a layers and front against half of 12 - a layers and behind.
    assert cuts(tail=(3.0, 6.0)) == (0, 5, 12)
    assert cuts(front=(2.0, 4.0)) == (0, 3, 12)
