"""After a loss the narrow stage's clock goes up, the others' as low as keeps the step time."""

import pytest

from elaswave_plugin.core.layout.layout import launch_layout
from elaswave_plugin.core.planner.dvfs import ClockTable
from elaswave_plugin.core.planner.layer_times import LayerTimes
from elaswave_plugin.core.planner.pipeline_flow import PipelineFlow, flow_of
from elaswave_plugin.errors import ConfigurationError

TABLE = ClockTable(clocks=(0.6, 0.8, 1.0, 1.2))
LAUNCH = launch_layout(tp=2, pp=2, dp=2, num_layers=8)
TIMES = LayerTimes(layer=(0.004, 0.008), is_measured=True)


LAUNCH_W = 8 * TABLE.watts(1.0)


def flow(lost: tuple[int, ...], cap_w: float = LAUNCH_W) -> PipelineFlow:
    layout = LAUNCH.without(lost)
    return flow_of(layout=layout, num_microbatches=8, times=TIMES, clocks=TABLE, power_cap_w=cap_w)


def test_up_where_the_others_wait_down_where_it_waits() -> None:
    after = flow((0,))
    assert after.clocks == (1.2, 1.0)
    assert [after.clock(slot) for slot in (0, 1, 2, 3, 4, 7)] == [1.0, 1.0, 1.2, 1.2, 1.0, 1.0]
    plain = flow_of(layout=LAUNCH.without((0,)), num_microbatches=8, times=TIMES)
    assert not plain.clocks and plain.clock(2) == 1.0
    assert after.compute_s == pytest.approx((plain.compute_s or 0) / 1.2, rel=0.05)
    assert "clocks: 1.2 1 give" in "\n".join(after.reasons)
    # What is compared between workers knows them.
    assert repr(after) != repr(plain)


def test_a_whole_layout_runs_at_clock_1() -> None:
    assert flow(()).clocks == () and flow(()).clock(0) == 1.0


def test_the_cap_counts_every_worker_of_a_tp_group() -> None:
    for cap_w, clocks in ((6000.0, (1.2, 0.8)), (3000.0, (1.0, 0.6)), (float("inf"), (1.2, 1.2))):
        after = flow((0,), cap_w)
        assert after.clocks == clocks
        assert sum(TABLE.watts(after.clock(slot)) for slot in (2, 3, 4, 5, 6, 7)) <= cap_w
    with pytest.raises(ConfigurationError, match="power cap is 500 W"):
        flow((0,), 1000.0)
