"""The throughput benchmark: scenarios, simulated rows, how rows are judged, bad input, a run."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.measured_throughput import summary
from benchmarks.scenarios import Scenario, bars, judged, scenarios
from benchmarks.simulated_throughput import rows_of
from benchmarks.throughput import USUAL, is_good, main
from benchmarks.throughput_report import show_row

LIMIT_S = 60.0
SMALLEST = Scenario(pp=2, dp=2, layers=8, slots=4, place="one", losses=1)


def test_every_bar_and_every_usual_scenario_is_known() -> None:
    known = scenarios()
    assert {bar.scenario for bar in bars()} <= known.keys() and set(USUAL) <= known.keys()
    for one in known.values():
        for stage in one.stages:
            after = one.layout().without(one.dead(stage))
            replicas = {slot % one.dp for slot in one.dead(stage)}
            assert len(replicas) == one.losses == one.dp - one.whole_replicas
            assert sum(after.widths) == one.pp * one.dp - one.losses


def test_simulated_rows_beside_their_ceilings() -> None:
    rows = rows_of(SMALLEST)
    assert [row["stage"] for row in rows] == [0, 1]
    for row in rows:
        seconds = row["step_s"]
        assert row["rho"] == 1.5 and row["live_share"] == 0.75 and row["simulated"]
        assert seconds["ours_split"] <= seconds["ours"] <= seconds["rerouted"]
        assert seconds["ours_clocks_1.1"] < seconds["ours"] < seconds["dropped"]
        assert 1 < row["over_rerouting"] == seconds["rerouted"] / seconds["ours"]
        assert seconds["ours"] <= seconds["rerouted_in_our_orders"] <= seconds["rerouted"]
        # Somebody computes an even share: 4 slots x 4 layers of 3 at launch.
        assert seconds["ours"] >= 4 * 4 * 3 / 0.75
    # A first stage that does more than the second saves filling, which Gmax has in full.
    assert (
        rows[0]["over_rerouting"] < rows[0]["gmax"] and rows[1]["over_rerouting"] > rows[1]["gmax"]
    )


def test_a_stage_without_anybody_can_be_filled_by_ours_alone() -> None:
    (row, _) = rows_of(Scenario(pp=2, dp=2, layers=8, slots=4, place="one", losses=2))
    assert row["step_s"]["rerouted"] is row["over_rerouting"] is row["gmax"] is None
    assert row["step_s"]["dropped"] is row["over_dropping"] is None
    assert row["of_live_share"] > 0.9
    lines: list[str] = []
    show_row(row, lines.append)
    assert "rerouting cannot go on (Gmax -, rho -), dropping cannot go on" in lines[0]


def test_a_bar_holds_where_its_worst_row_does() -> None:
    name = "pp4dp4-m16-one-2"
    rows = [{"scenario": name, "over_rerouting": value} for value in (1.6, 1.5)]
    (bar,) = judged([*rows, {"scenario": "pp4dp4-m16-one-1", "of_live_share": None}])
    assert (bar["worst"], bar["best"], bar["holds"]) == (1.5, 1.6, True)
    (bar,) = judged([*rows, {"scenario": name, "over_rerouting": 1.41}])
    assert not bar["holds"]
    assert not is_good({"measured": {"bars": [bar]}, "simulated": {"bars": []}})


def test_rounds_are_compared_within_themselves() -> None:
    simulated = {"ours_split": 2.0, "rerouted_split": 3.0}
    rounds = [
        {
            "cuts": [0, 8, 24],
            "step_s": {"healthy": 1.0 * load, "ours": 1.25 * load, "rerouted": 2.5 * load},
            "predicted_s": {"healthy": 1.0, "ours": 1.25, "rerouted": None},
            "simulated_s": simulated,
        }
        for load in (1.0, 2.0)
    ]
    row = summary({"live_share": 0.75}, rounds)
    assert row["over_rerouting"] == 2.0 and row["over_dropping"] is None
    assert row["of_live_share"] == pytest.approx(1 / 1.25 / 0.75)
    assert row["prediction_error"] == {"healthy": -0.25, "ours": -0.25, "rerouted": None}
    assert row["over_rerouting_both_split"] is None
    assert row["simulated_over_rerouting_both_split"] == 1.5


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--scenario", "pp4dp4-m16-two"],
            "'pp4dp4-m16-two', wanted one of 25 such as pp4dp4-m16-one-",
        ),
        (["--rounds", "0"], "--rounds is 0, wanted 1 or more"),
        (["--layer-ms", "0"], "--layer-ms is 0, wanted a number above 0"),
        (["--layer-ms", "nan"], "--layer-ms is nan, wanted a number above 0"),
        (["--split-backward", "--only", "simulated"], "which has them; leave it out"),
        (["--only", "real"], "--only is 'real', wanted measured or simulated"),
        (["--json", "nowhere/t.json"], "--json is 'nowhere/t.json', whose folder does not exist"),
        (["--plot", "."], "--plot is '.', which is a folder, wanted a file"),
        (
            ["--scenario", "pp8dp12-m16-one-6", "--only", "measured"],
            "'pp8dp12-m16-one-6', whose 96 workers are only simulated",
        ),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and words in captured.err


def test_the_command_prints_writes_and_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    json_file, picture = tmp_path / "t.json", tmp_path / "t.png"
    chosen = ["--scenario=pp2dp2-m8-one-1", "--only=simulated"]
    assert main([*chosen, f"--json={json_file}", f"--plot={picture}"]) == 0
    result = json.loads(json_file.read_text())
    assert result["measured"] == {"bars": [], "rows": []}
    (bar,) = result["simulated"]["bars"]
    assert bar["holds"] and bar["worst"] >= bar["wanted"] == 1.35
    assert picture.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "simulated pp2dp2-m8-one-1 of stage 1: rerouting 1.469" in printed
    assert printed.count("x in our orders") == 2
    assert "holds  simulated pp2dp2-m8-one-1" in printed


# Its layers sleep for a minute in all, and who shares the machine makes that more.
@pytest.mark.timeout(400)
@pytest.mark.slow
def test_a_small_run_measures_and_predicts(tmp_path: Path) -> None:
    json_file, picture = tmp_path / "t.json", tmp_path / "t.png"
    chosen = ["--scenario=pp2dp2-m8-one-1", "--only=measured", "--layer-ms=10"]
    code = main([*chosen, f"--json={json_file}", f"--plot={picture}"])
    result: dict[str, Any] = json.loads(json_file.read_text())
    (row,) = result["measured"]["rows"]
    assert code == (0 if is_good(result) else 1)
    rules = {"healthy", "ours", "rerouted", "dropped"}
    assert row["step_s"].keys() == row["predicted_s"].keys() == rules
    # The narrow stage has given layers away, and a step cannot be shorter than its layers asleep.
    assert row["cuts"][1] < 12
    busiest_s = 16 * row["cuts"][1] * 3 * 0.010
    assert busiest_s < row["step_s"]["ours"] < row["step_s"]["rerouted"]


def test_a_benchmark_that_is_ended_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.throughput", "--only", "measured"]
    deadline_s = time.monotonic() + LIMIT_S
    with subprocess.Popen(command, env={**os.environ, "TMPDIR": str(tmp_path)}) as bench:
        started: list[psutil.Process] = []
        while not started:  # its log is there before it is: a file would say too much
            assert bench.poll() is None and time.monotonic() < deadline_s
            started = psutil.Process(bench.pid).children(recursive=True)
            time.sleep(0.02)
        bench.send_signal(signal.SIGTERM)
        assert bench.wait(LIMIT_S) == 143
    assert psutil.wait_procs(started, timeout=LIMIT_S)[1] == []
    assert list(tmp_path.iterdir()) == []
