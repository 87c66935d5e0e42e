"""Steps on and off in turn: which ones count, and what is made of them."""

from pathlib import Path

import pytest

from benchmarks.alternate import CPU_EVENT
from benchmarks.overhead import cpu_times_s
from elaswave_plugin.observer.blocks import OnOff, is_measured, is_on, step_times_s
from elaswave_plugin.observer.run import RunFiles, read_run
from tests.observer.made_up import make_alternated


def test_blocks_switch_every_ten_steps_and_drop_the_warm_up_and_the_switch() -> None:
    measured = [step for step in range(40) if is_measured(step)]
    on = [step for step in measured if is_on(step)]
    assert on == [*range(2, 10), *range(21, 30)]
    assert [step for step in measured if step not in on] == [*range(11, 20), *range(31, 40)]


def test_step_times_are_those_of_the_slowest_worker(tmp_path: Path) -> None:
    times = step_times_s(read_run(make_alternated(tmp_path, steps=30, on_s=0.3, off_s=0.2)))
    assert times == OnOff(on=(0.3,) * 17, off=(0.2,) * 9)
    assert times.ratio_of_medians == pytest.approx(1.5)


@pytest.mark.parametrize("steps", [0, 2, 10, 11])
def test_a_run_without_both_kinds_of_steps_has_no_ratio(tmp_path: Path, steps: int) -> None:
    run = read_run(make_alternated(tmp_path, steps=steps, on_s=0.3, off_s=0.2))
    assert step_times_s(run).ratio_of_medians is None


def test_cpu_times_are_differences_summed_over_the_workers() -> None:
    events = [
        {"kind": CPU_EVENT, "slot": slot, "step": step, "trainer_s": clock_s, "agent_s": 0.0}
        for slot in (0, 1)
        for step in range(-1, 13)
        for clock_s in [1.0 + slot + (0.25 * step if step < 10 else 2.25 + 0.5 * (step - 9))]
    ]
    run = RunFiles(directory=Path(), events=tuple(events), steps=(), ledger=())
    assert cpu_times_s(run, "trainer") == OnOff(on=(0.5,) * 8, off=(1.0,) * 2)
    assert cpu_times_s(run, "agent") == OnOff(on=(0.0,) * 8, off=(0.0,) * 2)
