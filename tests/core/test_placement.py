"""Any layout that a job can come to is told, and understood by whoever was not there."""

from hypothesis import given, settings
from hypothesis import strategies as st

from elaswave_plugin.core.layout.group_rules import coordinates_of, grown_coordinates
from elaswave_plugin.core.layout.layout import ParallelLayout, launch_layout
from elaswave_plugin.core.layout.layout_delta import layout_delta, layout_with
from elaswave_plugin.core.planner.layer_times import LayerTimes
from elaswave_plugin.core.planner.pipeline_flow import PipelineFlow, flow_of
from elaswave_plugin.core.recovery_plan.placement import GridPlacement
from elaswave_plugin.core.step.dataflow import Slowness
from elaswave_plugin.errors import LayoutError

LAUNCH = launch_layout(tp=2, pp=2, dp=3, num_layers=8, reserve=1)
# 12 of the launch, 4 beyond.
WORKERS = range(16)


def moved(*, layout: ParallelLayout, times: LayerTimes, slow: Slowness) -> PipelineFlow:
    """Workers and layers go to and fro, as what was measured says."""
    if layout.is_rectangular:
        return flow_of(layout=layout.recut(LAUNCH.cuts), num_microbatches=4)
    wide = layout.widths.index(max(layout.widths))
    if times.layer[0] > 1 and layout.widths[wide] > layout.widths[1 - wide]:
        layout = layout.moved(source=wide, target=1 - wide)
    return flow_of(layout=layout.recut((0, round(times.layer[0]) + 1, 8)), num_microbatches=4)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.sets(st.sampled_from(WORKERS), min_size=6), st.integers(0, 5))))
def test_a_layout_is_understood_as_it_was_told(changes: list[tuple[set[int], int]]) -> None:
    launch_slots = {**coordinates_of(LAUNCH), **grown_coordinates(LAUNCH)}
    placement = newcomer = GridPlacement(
        layout=LAUNCH, launch_slots=launch_slots, rules={}, units={}, partition=moved
    )
    for present, forward_s in changes:
        try:
            placement = placement.after(sorted(present), LayerTimes(layer=(forward_s, 1.0)))
        except LayoutError:
            return
        told = placement.state()
        assert layout_with(told, LAUNCH, launch_slots) == placement.layout
        assert newcomer.with_state(told).layout == placement.layout


def test_what_is_told_of_the_launch_is_short() -> None:
    launch = launch_layout(tp=8, pp=16, dp=64, num_layers=64)
    told = layout_delta(launch.without([5]), coordinates_of(launch))
    assert told["gone"] == [5] and len(told["free"]) == 7 and "moved" not in told
