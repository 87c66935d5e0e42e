"""`elaswave plan` and `python -m benchmarks.plan`: output and refusals."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.plan import Job, measure, run_bench
from elaswave_plugin.cli.main import run_command

SMALL = ["plan", "--pp", "2", "--tp", "2", "--dp", "2", "--layers", "4", "--microbatches", "4"]


def test_plan_shows_before_after_and_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.json"
    stays_away = ["--respawn", "0", "--split-backward", "never"]
    lost = ["--dead", "0", "--dead", "6"]
    assert run_command([*SMALL, *stays_away, *lost, "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "stage 0, layers 0-1: r0 w0+w1 | r1 w2+w3" in printed
    assert "stage 0, layers 0-2: r0 w7+w1 | r1 w2+w3" in printed, "two broken groups made one"
    assert "3 of 4 replicas are live (0.750)" in printed
    record = json.loads(file.read_text())
    assert record["simulated"] is True
    assert record["layout_before"]["stages"][0] == [[0, [0, 1]], [1, [2, 3]]]
    assert record["layout_after"]["free"] == []
    plan = record["plan"]
    assert plan["predicted_step_s"] > plan["predicted_step_before_s"]
    assert plan["samples_per_worker"] == [{"least": 4, "most": 4}, {"least": 8, "most": 8}]
    assert plan["layers_per_stage"] == [[[0, 3]], [[3, 4]]]
    assert plan["bytes_to_move"] > 0 and plan["pause_s"] > 0.1
    assert plan["reasons"] and len(plan["candidates"]) > 10


def test_plan_shows_what_a_job_does_by_default(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lost workers come back, so layers stay; micro-batches stay whole for the same bits."""
    file = tmp_path / "plan.json"
    assert run_command([*SMALL, "--dead", "5", "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "since lost workers come back (respawn is 10); --respawn 0 shows" in printed
    plan = json.loads(file.read_text())["plan"]
    assert plan["bytes_to_move"] == 0 and plan["width_moves"] == []
    assert f"dataflow: {plan['dataflow']}, {plan['order']}, takes" in printed
    assert not any("resize" in candidate for candidate in plan["candidates"])
    assert run_command([*SMALL, "--dead", "5", "--consistency=fast", "--json", str(file)]) == 0
    plan = json.loads(file.read_text())["plan"]
    assert any("resize" in candidate for candidate in plan["candidates"])


def test_plan_tells_the_bytes_of_a_worker_before_and_after(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four layers of 1 GiB: 3 GiB of weights and gradients, 6 of optimizer state, each.

    Of the gradients, 2 GiB a layer, a worker copies its share in each step.
    """
    file = tmp_path / "plan.json"
    lost = ["plan", "--dp", "4", "--layers", "4", "--weights-mib", "1024", "--dead", "1"]
    assert run_command([*lost, "--json", str(file)]) == 0
    told = (
        "stage 0: 18.00 GiB (kept sums: 2.00, in a redo 8.00 more) and 12.00 GiB of snapshots -> "
        "20.00 GiB (kept sums: 2.67, in a redo 8.00 more) and 16.00 GiB of snapshots"
    )
    assert told in capsys.readouterr().out
    found = json.loads(file.read_text())["worker_bytes"]
    both = {"redone": 8 * 2**30}
    before = {"state": 18 * 2**30, "snapshots": 12 * 2**30, "kept": 2 * 2**30}
    after = {"state": 20 * 2**30, "snapshots": 16 * 2**30, "kept": 8 * 2**30 / 3}
    assert found["before"] == [before | both]
    assert found["after"] == [after | both]


def test_plan_of_many_workers_is_a_summary(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--pp", "8", "--workers", "8000", "--dead", "0-9", "--layers", "24"]
    assert run_command(arguments) == 0
    printed = capsys.readouterr().out
    assert "stage 0, layers 0-2: 990 of 1000 replicas" in printed
    assert "estimated: stages flow as fluids" in printed


def test_plan_obeys_what_is_forced(tmp_path: Path) -> None:
    for policy in ("redeal", "reroute", "resize"):
        file = tmp_path / f"{policy}.json"
        held = ["--move-layers=never", "--consistency=fast", "--dataflow", policy]
        assert run_command([*SMALL, *held, "--dead", "5", "--json", str(file)]) == 0
        plan = json.loads(file.read_text())["plan"]
        assert plan["dataflow"].split()[0] == policy
        assert plan["bytes_to_move"] == 0 and plan["width_moves"] == []
    file = tmp_path / "clocks.json"
    clocks = ["--clocks", "0.9,1,1.1", "--split-backward=auto", "--respawn=0"]
    deep = ["plan", "--pp", "4", "--dp", "2", "--layers", "8", "--microbatches", "4"]
    assert run_command([*deep, *clocks, "--dead", "5", "--json", str(file)]) == 0
    plan = json.loads(file.read_text())["plan"]
    assert plan["split_backward"] is True and max(plan["clocks"]) == 1.1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tp", "2", "--pp", "2", "--workers", "10"], "10 workers do not factor into tp 2 x pp"),
        (["--pp", "4", "--dp", "2", "--layers", "3"], "3 layers for 4 stages"),
        (["--pp", "2", "--dp", "2", "--memory-gib", "1", "--respawn=0"], "no partition of 24"),
        (["--pp", "2"], "--dp is None and --workers is None, wanted exactly one"),
        (["--dp", "2", "--dead", "x"], "--dead is 'x', wanted a slot or a range"),
        (["--dp", "2", "--dead", "9"], "worker 9 is not in the layout, wanted one of 0-1"),
        (
            ["--dp", "2", "--dataflow", "deal"],
            "key 'dataflow' is 'deal', wanted 'auto', 'red",
        ),
        (["--dp", "2", "--dataflow", "resize"], "dataflow is resize and consistency is exact"),
        (["--dp", "2", "--respawn", "-1"], "key 'respawn' is -1, wanted"),
        (["--dp", "2", "--clocks", "fast"], "--clocks is 'fast', wanted rising numbers"),
        (["--dp", "2", "--clocks", "1,0.9"], "--clocks is '1,0.9', wanted rising"),
        (["--dp", "2", "--power-cap-w", "9"], "--power-cap-w is given without --clocks"),
        (["--dp", "2", "--clocks", "1", "--power-cap-w", "9"], "power cap is 9 W, and 2 workers"),
        (["--dp", "2", "--forward-ms", "0"], "--forward-ms is 0, wanted a number above 0"),
        (["--dp", "2", "--dead", "1-0"], "--dead is '1-0', wanted the lower slot first"),
        (["--dp", "2", "--microbatches", "-3"], "--microbatches is -3, wanted 1 or more"),
        (["--dp", "2", "--latency-ms", "-1"], "--latency-ms is -1, wanted a number from 0"),
        (["--dp", "2", "--sample-ms", "nan"], "--sample-ms is nan, wanted a number from 0"),
        (["--dp", "2", "--weights-mib", "-1"], "--weights-mib is -1, wanted a number from 0"),
        (["--dp", "2", "--memory-gib", "0"], "--memory-gib is 0, wanted a number above 0"),
        (["--dp", "2", "--clocks", "1", "--power-cap-w", "nan"], "--power-cap-w is nan, wanted"),
        (["--dp", "2", "--clocks", "1.2"], "--clocks is '1.2', wanted .* with 1 among them"),
        (["--dp", "2", "--json", "."], "--json is '.', which is a folder, wanted a file"),
        (["--dp", "2", "--json", "nowhere/plan.json"], "--json is 'nowhere/plan.json', whose"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["plan", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert re.search(words, captured.err), captured.err


def test_too_few_groups_stop_with_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["plan", "--pp", "2", "--dp", "1", "--dead", "1"]) == 1
    assert "1 worker left for 2 stages" in capsys.readouterr().err


def test_bench_plan_writes_its_rows_and_judges_them(tmp_path: Path) -> None:
    job = Job(tp=2, pp=4, dp=8, dead=3, bar_s=30.0)
    lines: list[str] = []
    file = tmp_path / "rows.json"
    assert run_bench(lambda: measure((job,), repeat=1), file, lines.append) == 0
    row = json.loads(file.read_text())["rows"][0]
    assert (row["workers"], row["dead"], row["layout"]) == (64, 3, "TP2 x PP4 x DP8")
    assert 0 < row["seconds"] == row["slowest_s"] < 30
    parts = row["layout_s"] + row["plan_s"] + row["ops_s"]
    assert parts == pytest.approx(row["seconds"], abs=0.001)
    late = Job(tp=2, pp=4, dp=8, dead=3, bar_s=1e-6)
    assert run_bench(lambda: measure((late,), repeat=1), None, lines.append) == 1
