"""Clocks equal brute force over all of them; by prediction no clock can be lower for nothing."""

import random
from itertools import product

import pytest

from elaswave_plugin.core.planner.dvfs import (
    ClockTable,
    minimax_clocks,
    predicted_clocks,
    total_watts,
)
from elaswave_plugin.core.planner.microbatch_split import redeal
from elaswave_plugin.core.planner.slot_time import slot_flow
from elaswave_plugin.core.step.schedule import window_sizes
from elaswave_plugin.core.step.simulate import LinkTime, StageTime
from elaswave_plugin.errors import ConfigurationError

TABLE = ClockTable(clocks=(0.7, 0.8, 0.9, 1.0, 1.1), compute_share=0.8)


def test_minimax_clocks_equal_brute_force() -> None:
    dice = random.Random(3)
    for _ in range(60):
        stages = dice.randint(1, 4)
        work_s = [dice.uniform(1, 2) for _ in range(stages)]
        widths = [dice.randint(1, 5) for _ in range(stages)]
        cap_w = dice.choice([float("inf"), dice.uniform(0.5, 1.1) * 900 * sum(widths)])
        options = []
        for clocks in product(TABLE.clocks, repeat=stages):
            watts = total_watts(clocks, widths, TABLE)
            if watts <= cap_w:
                time_s = max(w / TABLE.speed(f) for w, f in zip(work_s, clocks, strict=True))
                options.append((time_s, watts, clocks))
        facts = {"work_s": work_s, "widths": widths, "table": TABLE, "power_cap_w": cap_w}
        if not options:
            with pytest.raises(ConfigurationError, match="workers draw"):
                minimax_clocks(**facts)
            continue
        best_s = min(options)[0]
        least_w = min(watts for time_s, watts, _ in options if time_s <= best_s * (1 + 1e-12))
        found = minimax_clocks(**facts)
        assert found.seconds == pytest.approx(best_s)
        assert found.watts == pytest.approx(least_w)


def test_the_bottleneck_goes_up_and_the_others_only_as_far_as_needed() -> None:
    found = minimax_clocks(
        work_s=(10, 12, 9), widths=(4, 3, 4), table=ClockTable(clocks=(0.8, 0.9, 1.0, 1.1))
    )
    assert found.clocks == (1.0, 1.1, 0.9)


@pytest.mark.parametrize("cap_w", [float("inf"), 11_000.0])
def test_predicted_clocks_are_lowest_for_the_simulated_step(cap_w: float) -> None:
    widths = (4, 3, 4, 4)
    flow = slot_flow(redeal(widths=widths, num_microbatches=32, microbatch_size=1, slot_width=3))

    def predict(clocks: tuple[float, ...]) -> float:
        times = [
            StageTime(forward_s=6 / TABLE.speed(clock), backward_s=12 / TABLE.speed(clock))
            for clock in clocks
        ]
        return flow.seconds(times, LinkTime(latency_s=0.05), window_sizes(4, extra=1))

    work_s = [18 * -(-32 // width) for width in widths]
    found = predicted_clocks(
        work_s=work_s, widths=widths, table=TABLE, predict=predict, power_cap_w=cap_w
    )
    assert found.watts == total_watts(found.clocks, widths, TABLE) <= cap_w
    assert found.seconds == predict(found.clocks)
    assert found.seconds <= predict(
        minimax_clocks(work_s=work_s, widths=widths, table=TABLE, power_cap_w=cap_w).clocks
    )
    for stage, clock in enumerate(found.clocks):
        if clock > TABLE.clocks[0]:
            lower = TABLE.clocks[TABLE.clocks.index(clock) - 1]
            slower = (*found.clocks[:stage], lower, *found.clocks[stage + 1 :])
            assert predict(slower) > found.seconds * (1 + 1e-9), "a clock was higher than needed"
    if cap_w == float("inf"):
        assert found.seconds < predict((1.0,) * 4)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"clocks": ()}, "wanted rising numbers above 0"),
        ({"clocks": (1.0, 0.9)}, r"clocks are \(1.0, 0.9\)"),
        ({"clocks": (1.0,), "compute_share": 1.5}, "compute_share is 1.5, wanted 0 to 1"),
    ],
)
def test_a_clock_outside_reason_is_refused(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        ClockTable(**arguments)  # type: ignore[arg-type]
