"""Plans by bytes: nobody holds more state and activations than there is memory for."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import assume, given, reject, settings
from hypothesis import strategies as st

from elaswave_plugin.core.layout.layout import ParallelLayout, launch_layout
from elaswave_plugin.core.planner.costs import StateBytes, within_memory
from elaswave_plugin.core.planner.layer_times import HELD, LAYER, LayerTimes, PassTimes, agreed
from elaswave_plugin.core.planner.pipeline_flow import (
    PipelineFlow,
    SplitBackward,
    flow_of,
)
from elaswave_plugin.core.step.schedule import peak_in_flight
from elaswave_plugin.errors import ConfigurationError
from tests.core.test_pipeline_flow import after_losses

TIMES = LayerTimes(held_bytes=(5.0, 100.0, 300.0))


def state_of(num_layers: int, limit_bytes: float) -> StateBytes:
    """An embedding of 40 elements, layers of 20, a norm and a head of 10 and 30."""
    units = {0: 40, **{number + 1: 20 for number in range(num_layers)}}
    return StateBytes(
        units=units | {num_layers + 1: 10, num_layers + 2: 30},
        weight_bytes=2,
        gradient_bytes=4,
        optimizer_bytes=12,
        limit_bytes=limit_bytes,
    )


def most_bytes(layout: ParallelLayout, size: int, limit: float, **more: object) -> float:
    """Of any worker, by its own list: counted here from the numbers of `state_of` and `TIMES`."""
    split: SplitBackward = "auto" if more.pop("splits", False) else "never"
    work = {"num_microbatches": 4 * layout.dp, "micro_batch_size": size}
    state = state_of(layout.num_layers, limit)
    flow = flow_of(
        layout=layout,
        times=TIMES,
        launch_cuts=layout.cuts,
        move_workers=True,
        split_backward=split,
        state=state,
        **work,
    )
    layout = flow.layout
    most = 0.0
    for stage, groups in enumerate(layout.stages):
        start, stop = layout.layers(stage)[0]
        first, last = start == 0, stop == layout.num_layers
        elements = 20 * (stop - start) + 40 * first + 40 * last
        sample = 100 * (stop - start) + 5 * first + 300 * last
        for slot in (group.slots[0] for group in groups):
            held = peak_in_flight(flow.ops(slot), lambda op: op.stop - op.start)
            most = max(most, elements * (6 + 12 / len(groups)) + held * sample)
    return most


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from([(1, 2, 2), (1, 2, 4), (1, 4, 2), (1, 3, 4)]),
    st.lists(st.integers(0, 15), min_size=1, max_size=4, unique=True),
    st.integers(1, 3),
    st.floats(2000, 12000),
    st.booleans(),
)
def test_nobody_holds_more_bytes_than_the_limit(
    sizes: tuple[int, int, int], losses: Sequence[int], size: int, limit: float, splits: bool
) -> None:
    tp, pp, dp = sizes
    layout = after_losses(tp=tp, pp=pp, dp=dp, losses=losses)
    assume(layout is not None and not layout.is_rectangular)
    assert layout is not None
    try:
        held = most_bytes(layout, size, limit, splits=splits)
    except ConfigurationError:
        reject()
    assert held <= limit


def test_without_a_limit_they_would_and_below_some_limit_there_is_no_plan() -> None:
    """The control: what the limit keeps out is what would be chosen."""
    layout = launch_layout(tp=1, pp=2, dp=2, num_layers=8).without([0])
    free = most_bytes(layout, 2, float("inf"))
    assert 0.6 * free < most_bytes(layout, 2, 0.8 * free) <= 0.8 * free
    with pytest.raises(ConfigurationError, match="fits into"):
        most_bytes(layout, 2, 0.2 * free)


@pytest.mark.parametrize(("pp", "vpp", "dp"), [(2, 2, 2), (2, 4, 3), (4, 2, 2), (4, 4, 2)])
def test_interleaved_chunks_count_as_they_are(pp: int, vpp: int, dp: int) -> None:
    """The head's chunk holds four times what another does; what truly fits is planned as it is."""
    layout = launch_layout(tp=1, pp=pp, dp=dp, num_layers=pp * vpp, vpp=vpp)
    for lost in (0, pp * dp - 1):
        work = {"layout": layout.without([lost]), "num_microbatches": 4 * pp * dp}
        planned = partial(flow_of, times=TIMES, **work)
        free = planned()
        need = most_chunk_bytes(free)
        assert planned(state=state_of(pp * vpp, need)) == free
        for part in (0.99, 0.8, 0.6):
            try:
                less = planned(state=state_of(pp * vpp, part * need))
            except ConfigurationError:
                continue
            assert most_chunk_bytes(less) <= part * need
        with pytest.raises(ConfigurationError):
            planned(state=state_of(pp * vpp, 0.3 * need))


def most_chunk_bytes(flow: PipelineFlow) -> float:
    """Of any worker."""
    return max(
        chunk_bytes(flow, stage, group.slots[0])
        for stage, groups in enumerate(flow.layout.stages)
        for group in groups
    )


def chunk_bytes(flow: PipelineFlow, stage: int, slot: int) -> float:
    """State and samples of a worker of interleaved stages, chunk by chunk."""
    layout = flow.layout
    elements, samples = 0, []
    for start, stop in layout.layers(stage):
        first, last = start == 0, stop == layout.num_layers
        elements += 20 * (stop - start) + 40 * first + 40 * last
        samples.append(100 * (stop - start) + 5 * first + 300 * last)
    held = peak_in_flight(flow.ops(slot), lambda op: (op.stop - op.start) * samples[op.chunk])
    return elements * (6 + 12 / layout.widths[stage]) + held


@pytest.mark.parametrize("moves", [False, True])
def test_what_a_device_is_thought_to_have_ends_no_job(*, moves: bool) -> None:
    layout = launch_layout(tp=1, pp=2, dp=2, num_layers=8).without([0])
    cuts = layout.cuts if moves else None
    planned = partial(flow_of, layout=layout, times=TIMES, num_microbatches=8, launch_cuts=cuts)
    small = state_of(8, 100)
    with pytest.raises(ConfigurationError):
        within_memory(small, planned)
    free = within_memory(replace(small, is_estimate=True), planned)
    assert free == planned(state=state_of(8, float("inf")))


def test_a_plan_says_that_it_counts_no_limit() -> None:
    layout = launch_layout(tp=1, pp=2, dp=2, num_layers=8).without([0])
    planned = partial(flow_of, layout=layout, times=TIMES, num_microbatches=8)
    thought = replace(state_of(8, 2.0**20), is_estimate=True)
    fits = within_memory(thought, planned)
    assert not any(reason.startswith("memory") for reason in fits.reasons)
    tight = within_memory(replace(thought, limit_bytes=100.0), planned)
    assert tight.reasons[-1].startswith(
        "memory: counted without a limit, since nothing fits the 9."
    )


def test_state_counts_alone_until_activations_are_measured() -> None:
    state = state_of(4, 1e6)
    units = LayerTimes().costs(num_layers=4, state=state).units
    assert [unit.activation_bytes for unit in units] == [0] * 6
    assert [unit.resident_bytes for unit in units] == [240, 120, 120, 120, 120, 240]
    assert [unit.optimizer_bytes for unit in units] == [480, 240, 240, 240, 240, 480]
    held = [unit.activation_bytes for unit in TIMES.costs(num_layers=4, state=state).units]
    assert held == [5, 100, 100, 100, 100, 300]


def test_whoever_holds_most_counts_and_the_first_step_does_not() -> None:
    times = PassTimes()
    assert not times.lacks_held([LAYER])
    times.note(LAYER, "forward", 1.0)
    times.step_over()
    assert times.lacks_held([LAYER])
    times.note_held(LAYER, 100.0)
    assert not times.lacks_held([LAYER]) and times.medians() == {HELD: [0.0, 100.0, 0.0]}
    told = {0: times.medians(), 1: {HELD: [0.0, 101.0, 7.0]}, 2: {}}
    assert agreed(told) == LayerTimes(held_bytes=(0.0, 101.0, 7.0))
    assert agreed(dict(reversed(told.items()))) == agreed(told)


def test_layers_whose_weights_take_too_long_to_move_stay() -> None:
    """Ten minutes at a gain of a third are 200 s, the pause counts twice: once the way back."""

    def cuts(byte_s: float) -> tuple[int, ...]:
        layout = launch_layout(tp=1, pp=2, dp=2, num_layers=8).without([0])
        times = LayerTimes(byte_s=byte_s, is_measured=True)
        return flow_of(
            layout=layout,
            times=times,
            launch_cuts=layout.cuts,
            num_microbatches=16,
            state=state_of(8, float("inf")),
        ).layout.cuts

    # 40 bytes of weights a layer.
    assert cuts(0.0) == cuts(0.1) == (0, 3, 8) and cuts(3.0) == (0, 4, 8)
