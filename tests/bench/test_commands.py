"""The benchmark tools judge as they should, and refuse what they cannot measure."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.hang_moments import WAYS, moments
from benchmarks.hangs import with_hang
from benchmarks.hybrid_recovery import result_of
from benchmarks.overhead import comparison, percentile_s
from benchmarks.recovery import passed
from elaswave_plugin.config import RECOVERY_PHASES, Kill
from elaswave_plugin.observer.blocks import OnOff
from elaswave_plugin.observer.run import RunFiles
from tests.bench.conftest import Refused


def good_row(**changes: Any) -> dict[str, Any]:
    row = {"returncode": 0, "fired": True, "beyond_step_s": 0.1, "parameters_equal": True}
    row |= {"max_abs_loss_diff": 0.0, "survivor_pids_unchanged": True}
    return {**row, "samples_lost": 0, "samples_repeated": 0, **changes}


@pytest.mark.parametrize(
    "change",
    [
        {"returncode": 1},
        {"fired": False},
        {"beyond_step_s": None},
        {"parameters_equal": None},
        {"max_abs_loss_diff": 1e-9},
        {"survivor_pids_unchanged": False},
        {"samples_lost": 1},
        {"samples_repeated": 1},
    ],
)
def test_a_run_passes_only_if_nothing_was_lost(change: dict[str, Any]) -> None:
    assert passed(good_row())
    assert not passed(good_row(**change))


def test_overhead_compares_medians_and_the_cpu_time_of_both_processes() -> None:
    cpu = {
        "trainer": OnOff(on=(0.4, 0.6), off=(0.4, 0.4)),
        "agent": OnOff(on=(0.1, 0.1), off=(0.0, 0.0)),
    }
    found = comparison(OnOff(on=(1.0, 1.1, 9.0), off=(1.0, 1.0, 1.0)), cpu)
    assert found["ratio_of_medians"] == pytest.approx(1.1)
    assert found["ratio_of_cpu_s"] == pytest.approx(0.6 / 0.4)
    assert found["on"]["p99_step_s"] == 9.0 and found["on"]["steps"] == 3


def test_slices_of_the_hybrid_recovery_are_judged_together() -> None:
    def row(beyond_s: float | None, passed: bool = True) -> dict[str, Any]:
        times = {"beyond_step_s": beyond_s, "mttr_s": beyond_s, "passed": passed}
        return {**times, "phases_s": dict.fromkeys(RECOVERY_PHASES, beyond_s)}

    slices = [{"rows": [row(0.1), row(0.5)]}, {"rows": [row(0.2), row(None, passed=False)]}]
    found = result_of(slices)
    assert (found["runs"], found["passed"]) == (4, 3)
    assert found["beyond_step_s"] == found["mttr_s"] == {"median": 0.2, "max": 0.5}
    assert found["phases_s"]["move"] == 0.2
    assert result_of([{"rows": [row(None, passed=False)]}])["beyond_step_s"]["median"] is None


def test_hangs_cover_every_slot_and_phase_and_each_of_them_in_every_way() -> None:
    moment = moments()["step"]
    first, drawn = moment.hangs(12, 4), moment.hangs(36, 4)
    places = {(slot, phase) for slot in range(4) for phase in moment.phases}
    assert {(one.slot, one.phase) for one in first} == places
    assert len({(one.slot, one.phase, one.how) for one in drawn}) == len(places) * len(WAYS)


def test_a_run_passes_only_where_the_hang_was_the_wanted_one() -> None:
    hang = Kill(slot=1, step=10, phase="data", how="gil")
    found = {"kind": "hang_found", "slot": 1, "step": 10, "phase": "data"}
    found |= {"limit_s": 2.0, "stalled_s": 2.1}
    row = {"passed": True, "beyond_step_s": 2.25}

    def judge(*events: dict[str, Any]) -> dict[str, Any]:
        run = RunFiles(directory=Path(), events=events, steps=(), ledger=())
        return with_hang(row, run, hang, moments()["step"])

    assert judge(found)["passed"]
    assert judge(found)["beyond_limit_and_step_s"] == pytest.approx(0.25)
    for wrong in ((), (found, found), ({**found, "slot": 2},), ({**found, "phase": "forward"},)):
        assert not judge(*wrong)["passed"]


def test_a_percentile_is_one_of_the_values() -> None:
    assert percentile_s([float(value) for value in range(1, 101)], 0.99) == 99.0
    assert percentile_s([5.0], 0.99) == 5.0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("overhead", "--what=snapshots", "--steps=19"), "--steps is 19, wanted at least 20"),
        (("overhead", "--what=snapshots", "--repeat=0"), "--repeat is 0, wanted at least 1"),
        (("overhead", "--what=snapshots", "--nproc=9"), "nproc is 9, wanted at most 8"),
        (("overhead", "--what=lunch"), "invalid choice: 'lunch'"),
        (("recovery", "--runs=0"), "--runs is 0, wanted at least 1"),
        (("recovery", "--json=nowhere/at/all"), "whose folder does not exist"),
        (("hybrid_recovery", "--runs=0"), "--runs is 0, wanted at least 1"),
        (("hybrid_recovery", "--add"), "--add is given and --json is None"),
        (("hybrid_recovery", "--nproc=4"), "unrecognized arguments: --nproc=4"),
        (("hangs", "--runs=0"), "--runs is 0, wanted at least 1"),
        (("recovery", "--zero=2"), "zero is 2 with framework 'megatron'"),
        (("recovery", "--framework=deepspeed", "--zero=4"), "zero is 4, wanted a ZeRO stage"),
        (("import_hook", "--repeat=0"), "--repeat is 0, wanted at least 1"),
    ],
)
def test_bad_options_are_refused_before_anything_starts(
    arguments: tuple[str, ...], words: str, refused: Refused
) -> None:
    assert words in refused(*arguments)
