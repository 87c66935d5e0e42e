"""Dealing a step over a ragged pipeline: complete, exact in its order of sums, without deadlock."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from elaswave_plugin.core.layout.layout import FreeWorker, ParallelLayout, launch_layout
from elaswave_plugin.core.planner.layer_times import LayerTimes
from elaswave_plugin.core.planner.microbatch_split import REDEAL, REROUTE, RESIZE
from elaswave_plugin.core.planner.pipeline_flow import (
    AS_LAUNCHED,
    PipelineFlow,
    Policy,
    SplitBackward,
    flow_of,
)
from elaswave_plugin.core.step.dataflow import Samples
from elaswave_plugin.core.step.schedule import BACKWARD, FORWARD, WEIGHTS, peak_in_flight
from elaswave_plugin.core.step.simulate import LinkTime, StageTime, simulate
from elaswave_plugin.errors import ConfigurationError


def after_losses(*, tp: int, pp: int, dp: int, losses: Sequence[int]) -> ParallelLayout | None:
    """The layout after losses one by one; None where a stage has nobody left."""
    layout = launch_layout(tp=tp, pp=pp, dp=dp, num_layers=2 * pp)
    for slot in losses:
        if slot in layout.workers:
            layout = layout.without([slot]).reformed_in_place()
    return layout if all(layout.widths) else None


def lists_of(flow: PipelineFlow) -> tuple[tuple[tuple[object, ...], ...], ...]:
    return tuple(
        tuple(flow.ops(group.slots[0]) for group in groups) for groups in flow.layout.stages
    )


def check_weights(flow: PipelineFlow, slot: int) -> None:
    """Split backwards are all of a step's or none; weight gradients come later, in their order."""
    ops = flow.ops(slot)
    weights = [op for op in ops if op.kind == WEIGHTS]
    backwards = [op for op in ops if op.kind == BACKWARD]
    if not flow.lists:
        assert not weights
        return
    assert [op._replace(kind=BACKWARD) for op in weights] == backwards
    assert all(ops.index(one) > ops.index(two) for one, two in zip(weights, backwards, strict=True))


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([(1, 2, 2), (2, 2, 2), (1, 4, 2), (1, 3, 4), (2, 2, 4)]),
    st.lists(st.integers(0, 15), max_size=6, unique=True),
    st.integers(1, 3),
    st.sampled_from(["auto", "redeal", "reroute"]),
    st.integers(1, 3),
    st.dictionaries(st.integers(0, 15), st.floats(1.3, 20.0), max_size=3),
    st.sampled_from(["never", "auto", "always"]),
)
def test_every_step_is_complete_and_runs(
    sizes: tuple[int, int, int],
    losses: Sequence[int],
    rounds: int,
    policy: Policy,
    size: int,
    slow: dict[int, float],
    split: SplitBackward,
) -> None:
    tp, pp, dp = sizes
    layout = after_losses(tp=tp, pp=pp, dp=dp, losses=losses)
    if layout is None:
        return
    slow = {slot: factor for slot, factor in slow.items() if slot in layout.workers}
    flow = flow_of(
        layout=layout,
        num_microbatches=rounds * dp,
        micro_batch_size=size,
        policy=policy,
        slow=slow,
        split_backward=split,
    )
    for stage in range(pp):
        for position in range(tp):
            # Raises unless every micro-batch is placed exactly once.
            assert len(flow.shard_group(stage, position).fold()) == dp
    for groups in layout.stages:
        for slot in (slot for group in groups for slot in group.slots):
            backwards = [op.start // size for op in flow.ops(slot) if op.kind == BACKWARD]
            assert all(before < after for before, after in pairwise(backwards))
            forwards = [op.start // size for op in flow.ops(slot) if op.kind == FORWARD]
            assert tuple(forwards) == flow.microbatches(slot) == tuple(backwards)
            check_weights(flow, slot)
            coordinate = flow.coordinate(slot)
            assert coordinate is not None
            reports = flow.microbatches(slot) if coordinate.stage == pp - 1 else ()
            assert flow.reports(slot) == reports
    # Micro-batches pass whole.
    for stage in range(pp - 1):
        passing = flow.crossings(stage)
        assert [(one.start, one.stop) for one in passing] == [
            tuple(Samples.of(k, size=size)) for k in range(rounds * dp)
        ]
    # Raises where the lists block each other.
    assert (
        simulate(
            lists_of(flow), [StageTime(forward_s=1.0, backward_s=2.0)] * pp, LinkTime()
        ).seconds
        > 0
    )


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([(1, 2, 2), (1, 4, 2), (1, 3, 4), (2, 2, 4), (1, 4, 4)]),
    st.lists(st.integers(0, 15), min_size=1, max_size=4, unique=True),
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from([1.0, 1.5]),
    st.booleans(),
    st.sampled_from(["never", "auto"]),
)
def test_nobody_holds_more_than_there_is_room_for(
    sizes: tuple[int, int, int],
    losses: Sequence[int],
    rounds: int,
    size: int,
    room: float,
    moves: bool,
    split: SplitBackward,
) -> None:
    """With room for what the first stage holds at launch there always is a plan."""
    tp, pp, dp = sizes
    layout = after_losses(tp=tp, pp=pp, dp=dp, losses=losses)
    assume(layout is not None and not layout.is_rectangular)
    assert layout is not None
    work = {"num_microbatches": rounds * dp, "micro_batch_size": size, "activation_room": room}
    may_move = {"launch_cuts": layout.cuts, "move_workers": True} if moves else {}
    flow = flow_of(layout=layout, split_backward=split, **work, **may_move)
    layout = flow.layout
    for stage, groups in enumerate(layout.stages):
        start, stop = layout.layers(stage)[0]
        for slot in (group.slots[0] for group in groups):
            held = peak_in_flight(flow.ops(slot), lambda op: op.stop - op.start)
            assert held * (stop - start) <= room * size * layout.num_layers


def test_more_room_is_used() -> None:
    layout = launch_layout(tp=1, pp=4, dp=4, num_layers=8).without([0, 1])
    one, two, usual = (
        flow_of(layout=layout, num_microbatches=32, activation_room=room) for room in (1, 2, None)
    )
    assert one.simulated(LayerTimes(), {}).seconds > two.simulated(LayerTimes(), {}).seconds
    assert two.simulated(LayerTimes(), {}).seconds >= usual.simulated(LayerTimes(), {}).seconds


@pytest.mark.parametrize(
    ("pp", "dp", "layers", "rounds", "lost", "gain"),
    [(4, 4, 24, 16, (4, 5), 1.08), (4, 4, 32, 8, (0,), 1.06), (2, 2, 24, 8, (1,), 1.0)],
)
def test_layers_move_as_split_backwards_want_it(
    pp: int, dp: int, layers: int, rounds: int, lost: tuple[int, ...], gain: float
) -> None:
    """The best layers are others if weight gradients fill the waits."""
    launch = launch_layout(tp=1, pp=pp, dp=dp, num_layers=layers)
    times = LayerTimes(layer=(0.02, 0.04), link=(0.0005, 0.0005), is_measured=True)
    seconds = []
    for splits in ("never", "auto"):
        layout = flow_of(
            layout=launch.without(lost),
            times=times,
            launch_cuts=launch.cuts,
            num_microbatches=dp * rounds,
            split_backward=splits,
            move_workers=True,
        ).layout
        flow = flow_of(
            layout=layout, num_microbatches=dp * rounds, times=times, split_backward="auto"
        )
        assert flow.compute_s is not None
        seconds.append(flow.compute_s)
    assert seconds[0] >= gain * seconds[1] and flow.is_split


def test_a_rectangular_layout_is_healthy() -> None:
    flow = flow_of(layout=launch_layout(tp=2, pp=2, dp=2, num_layers=2), num_microbatches=4)
    assert flow.is_healthy and not flow.reasons
    assert flow.microbatches(0) == (0, 2) and flow.microbatches(7) == (1, 3)


def test_stages_wider_than_at_launch_sum_as_at_launch() -> None:
    """Micro-batches stay those of the replicas of the launch, and nobody is left without any."""
    launch = launch_layout(tp=1, pp=2, dp=2, num_layers=4, reserve=1)
    wide = launch.returned([FreeWorker(4, 0, 0), FreeWorker(5, 1, 0)]).reformed_in_place()
    assert wide.widths == (3, 3)
    flow = flow_of(layout=wide, num_microbatches=6)
    assert not flow.is_healthy and flow.policy == "redeal"
    assert [len(pieces) for stage in flow.pieces for pieces in stage] == [2] * 6
    for stage in range(2):
        shard_group = flow.shard_group(stage, 0)
        assert shard_group.num_replicas == 2
        summed = [[link[1].microbatches for link in term.chain] for term in shard_group.fold()]
        assert [[k for ks in chain for k in ks] for chain in summed] == [[0, 2, 4], [1, 3, 5]]
    assert "6 replicas are live, 4 at launch (1.500)" in flow.reasons[0]
    # As many as at the launch, but others: not by Megatron-Core's own schedule.
    other = flow_of(layout=wide.without([0, 2]), num_microbatches=6)
    assert not other.is_healthy and other.policy == AS_LAUNCHED


def test_nobody_is_rerouted_to_replicas_beyond_the_launch() -> None:
    """They would have nothing where none of the launch is lost, however even the times are."""
    launch = launch_layout(tp=1, pp=2, dp=2, num_layers=4, reserve=1)
    wide = launch.returned([FreeWorker(4, 0, 0)]).reformed_in_place()
    flow = flow_of(layout=wide, num_microbatches=4)
    assert all(pieces for stage in flow.pieces for pieces in stage)
    with pytest.raises(ConfigurationError, match="allow redeal as well"):
        flow_of(layout=wide, num_microbatches=4, policy="reroute")


def test_free_workers_run_nothing() -> None:
    layout = launch_layout(tp=2, pp=2, dp=2, num_layers=2).without([0])
    flow = flow_of(layout=layout, num_microbatches=4)
    assert flow.coordinate(1) is None and flow.microbatches(1) == ()


@st.composite
def resized_flows(draw: st.DrawFn) -> PipelineFlow:
    """Steps of layouts that have lost workers, cut anew."""
    tp, pp, dp = draw(
        st.sampled_from([(1, 1, 3), (1, 2, 2), (2, 2, 2), (1, 4, 2), (1, 3, 4), (2, 2, 4)])
    )
    losses = draw(st.lists(st.integers(0, 15), min_size=1, max_size=6, unique=True))
    layout = after_losses(tp=tp, pp=pp, dp=dp, losses=losses)
    assume(layout is not None and not layout.is_rectangular)
    assert layout is not None
    return flow_of(
        layout=layout,
        num_microbatches=dp * draw(st.integers(1, 3)),
        micro_batch_size=draw(st.integers(1, 5)),
        policy="resize",
    )


@settings(max_examples=60, deadline=None)
@given(resized_flows())
def test_every_sample_of_a_resized_step_is_computed_once(flow: PipelineFlow) -> None:
    assert flow.is_resized
    with pytest.raises(ValueError, match="no exact order of sums"):
        flow.shard_group(0, 0)
    whole = list(range(flow.num_microbatches * flow.micro_batch_size))
    for groups in flow.layout.stages:
        ran = {kind: [] for kind in (FORWARD, BACKWARD)}
        for group in groups:
            # All of a TP group run the same.
            assert len({flow.ops(slot) for slot in group.slots}) == 1
            for op in flow.ops(group.slots[0]):
                ran[op.kind] += range(op.start, op.stop)
        assert sorted(ran[FORWARD]) == sorted(ran[BACKWARD]) == whole
    # Loads of a stage differ by a sample at most.
    for pieces in flow.pieces:
        loads = [sum(one.stop - one.start for one in mine) for mine in pieces]
        assert max(loads) - min(loads) <= 1
    reported = [k for group in flow.layout.stages[-1] for k in flow.reports(group.slots[0])]
    assert sorted(reported) == list(range(flow.num_reports))
    stage_times = [StageTime(forward_s=1.0, backward_s=2.0)] * len(flow.layout.stages)
    assert not simulate(lists_of(flow), stage_times, LinkTime()).blocked


@settings(max_examples=60, deadline=None)
@given(resized_flows())
def test_every_row_of_a_resized_step_arrives_once(flow: PipelineFlow) -> None:
    """Each side reads what it sends and takes in from the same list, which both compute."""
    num_stages = len(flow.layout.stages)
    for stage in range(num_stages):
        passing = flow.crossings(stage)
        assert [k for one in passing for k in range(one.start, one.stop)] == list(
            range(flow.num_microbatches * flow.micro_batch_size)
        )
        for side, of_stage in (("sender", stage), ("receiver", (stage + 1) % num_stages)):
            for order, pieces in enumerate(flow.pieces[of_stage]):
                mine = [one for one in passing if getattr(one, side) == order]
                for piece in pieces:
                    # The shares of a piece lie within it, one after the other, without a gap.
                    shares = [one for one in mine if piece.start <= one.start < piece.stop]
                    bounds = [piece.start, *(one.stop for one in shares)]
                    assert bounds == [*(one.start for one in shares), piece.stop]
                assert sum(one.stop - one.start for one in mine) == sum(
                    piece.stop - piece.start for piece in pieces
                )


def test_auto_resizes_where_it_may_and_gains_by_it() -> None:
    """Three replicas for four micro-batches of four samples: whole ones leave a worker idle."""
    layout = launch_layout(tp=1, pp=2, dp=4, num_layers=4).without([0])
    sizes = {"num_microbatches": 4, "micro_batch_size": 4}
    free = flow_of(layout=layout, may_resize=True, **sizes)
    assert free.policy == "resize"
    assert flow_of(layout=layout, **sizes).policy in {"redeal", "reroute"}
    times = [StageTime(forward_s=2.0, backward_s=4.0)] * 2
    seconds = {
        policy: simulate(
            lists_of(flow_of(layout=layout, policy=policy, **sizes)), times, LinkTime()
        ).seconds
        for policy in ("redeal", "reroute", "resize")
    }
    assert seconds["resize"] == min(seconds.values()) < seconds["redeal"]


def test_auto_is_no_slower_in_simulation_than_either_policy() -> None:
    layout = launch_layout(tp=1, pp=4, dp=4, num_layers=8).without([0, 1, 6])
    times = {}
    for policy in ("auto", "redeal", "reroute"):
        flow = flow_of(layout=layout, num_microbatches=16, policy=policy)
        seconds = simulate(
            lists_of(flow), [StageTime(forward_s=2.0, backward_s=4.0)] * 4, LinkTime()
        ).seconds
        times[policy] = seconds
        assert any(policy in reason for reason in flow.reasons) or policy == "auto"
    assert times["auto"] <= min(times.values())
    assert times["auto"] < max(times.values())


def test_the_reasons_are_not_compared() -> None:
    layout = launch_layout(tp=1, pp=2, dp=2, num_layers=2).without([0])
    flow = flow_of(layout=layout, num_microbatches=4)
    assert flow.reasons and not any(reason in repr(flow) for reason in flow.reasons)


@pytest.mark.parametrize(
    ("tp", "pp", "dp", "num_layers", "slow"),
    [(2, 2, 3, 12, {2: 6.0, 8: 1.7, 4: 3.0}), (1, 4, 4, 8, {0: 6.0, 1: 6.0, 2: 6.0})],
)
def test_a_deal_that_spares_the_slow_but_does_not_fit_is_not_made(
    tp: int, pp: int, dp: int, num_layers: int, slow: dict[int, float]
) -> None:
    layout = launch_layout(tp=tp, pp=pp, dp=dp, num_layers=num_layers, vpp=2)
    flow = flow_of(layout=layout, num_microbatches=48, slow=slow)
    assert flow == flow_of(layout=layout, num_microbatches=48)


@pytest.mark.parametrize("policy", [REDEAL, REROUTE, RESIZE])
@pytest.mark.parametrize(("pp", "vpp"), [(2, 2), (3, 2), (4, 2), (4, 3), (6, 4), (8, 2)])
def test_interleaved_stages_go_on_after_any_loss(pp: int, vpp: int, policy: Policy) -> None:
    """Nobody set a limit, so that none may end the job; what stage 0 holds at launch is more."""
    layout = launch_layout(tp=1, pp=pp, dp=2, num_layers=pp * vpp, vpp=vpp)
    for lost in layout.workers:
        flow = flow_of(layout=layout.without([lost]), num_microbatches=4 * pp, policy=policy)
        assert flow.policy == policy


def test_nobody_waits_for_a_narrow_first_stage_where_that_gains() -> None:
    """By the window rule workers behind it wait for a forward before a backward that is there."""
    layout = launch_layout(tp=1, pp=4, dp=2, num_layers=8).without([0])
    flow = flow_of(layout=layout, num_microbatches=10)
    assert flow.is_greedy and flow.lists and not flow.is_split
    by_windows = replace(flow, lists=(), is_greedy=False)
    assert flow == by_windows  # no sum is another
    seconds = [one.simulated(LayerTimes(), {}).seconds for one in (by_windows, flow)]
    assert seconds == [74.0, 60.0]
    assert any("greedy, takes 60 s, rerouting 62 s" in reason for reason in flow.reasons)
    apart = flow.with_split_backward()
    assert apart.is_greedy and apart.is_split
    for slot in (1, *range(2, 8)):
        ops = [op for op in apart.ops(slot) if op.kind != WEIGHTS]
        assert ops == list(flow.ops(slot))
    # Slow workers are dealt for by the window rule.
    assert not flow_of(layout=layout, num_microbatches=10, slow={3: 2.0}).is_greedy


def test_weight_gradients_go_apart_where_that_gains() -> None:
    """Few micro-batches in a deep pipeline: workers wait, and weight gradients fill that time."""
    layout = launch_layout(tp=1, pp=4, dp=2, num_layers=8).without([2])
    sizes = {"layout": layout, "num_microbatches": 8}
    whole, apart = flow_of(**sizes), flow_of(**sizes, split_backward="auto")
    assert apart.lists and not whole.lists
    assert {op.kind for op in apart.ops(0)} == {FORWARD, BACKWARD, WEIGHTS}
    seconds = [flow.simulated(LayerTimes(), {}).seconds for flow in (whole, apart)]
    assert seconds == [54.0, 50.0]
    assert "backward: split, weight gradients where a worker would wait" in apart.reasons
    # Where workers are slow nothing is simulated apart, so that only always does it.
    slow = {**sizes, "slow": {0: 2.0}}
    assert not flow_of(**slow, split_backward="auto").lists
    assert flow_of(**slow, split_backward="always").lists


def test_too_many_workers_keep_whole_backwards() -> None:
    layout = launch_layout(tp=1, pp=8, dp=40, num_layers=8).without([3])
    flow = flow_of(layout=layout, num_microbatches=320, split_backward="always")
    assert not flow.lists
    assert any("too many workers to place weight gradients" in why for why in flow.reasons)


def test_the_micro_batches_of_the_replicas_that_are_left() -> None:
    """Each worker runs those of one of them, by their numbers in the whole batch."""
    layout = launch_layout(tp=1, pp=2, dp=3, num_layers=2).without([1, 4])
    numbers = [0, 2, 3, 5, 6, 8]
    flow = flow_of(layout=layout, num_microbatches=6).renumbered(numbers, num_microbatches=9)
    assert str(flow) == "stage 0: w0: 0 3 6 | w2: 2 5 8; stage 1: w3: 0 3 6 | w5: 2 5 8"
    assert (flow.num_reports, flow.reports(5), flow.reports(0)) == (9, (2, 5, 8), ())
    assert [op.start for op in flow.ops(2) if op.kind == FORWARD] == [2, 5, 8]
    assert [term.replica for term in flow.shard_group(1, 0).fold()] == [0, 2]
    assert [one.start for one in flow.crossings(0)] == numbers
