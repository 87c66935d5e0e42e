"""The time of a plan; on an idle machine, since other work on its core makes it slower."""

import time

import pytest

from elaswave_plugin.core.layout.layout import launch_layout
from elaswave_plugin.core.planner.search import PlanRules
from tests.core.test_planner_joint import plan_for


@pytest.mark.slow
@pytest.mark.parametrize("splits", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize(
    "dead", [[12, 13, 14, 40, 41, 77], [12, 13, 14, 15, 16, 17]], ids=["scattered", "one stage"]
)
def test_planning_96_workers_takes_under_half_a_second(splits: bool, dead: list[int]) -> None:
    """Seconds of this process, the least of three, since others may use the core; bar 0.5 s."""
    layout = launch_layout(tp=1, pp=8, dp=12, num_layers=48)
    seconds = []
    for _ in range(3):
        start = time.process_time()
        plan = plan_for(layout, dead, rules=PlanRules(split_backward=splits))
        seconds.append(time.process_time() - start)
    assert 20 <= len(plan.candidates) <= 120 and plan.split_backward == splits
    assert min(seconds) < 0.5, seconds
