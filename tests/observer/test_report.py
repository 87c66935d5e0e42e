"""A report prints and draws what the files say: the run's own numbers and changes."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

matplotlib = pytest.importorskip("matplotlib")

from elaswave_plugin.cli.main import run_command  # noqa: E402
from elaswave_plugin.observer import report  # noqa: E402
from elaswave_plugin.observer.observer import (  # noqa: E402
    changes_of,
    kills_of,
    losses_of,
)
from elaswave_plugin.observer.run import read_run  # noqa: E402
from elaswave_plugin.tracking.events import EventLog  # noqa: E402
from tests.observer.made_up import make_run, run_of  # noqa: E402


def test_report_draws_a_recovered_run_and_its_reference(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "run", killed=True))
    reference = read_run(make_run(tmp_path / "reference", killed=False))
    path = report.draw_report(run, reference, tmp_path / "out" / "report.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 20_000


@pytest.mark.parametrize("killed", [True, False])
def test_report_needs_no_reference_and_no_recovery(tmp_path: Path, killed: bool) -> None:
    run = read_run(make_run(tmp_path / "run", killed=killed))
    assert report.draw_report(run, None, tmp_path / "report.png").is_file()


def test_report_lines_are_the_losses(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "run", killed=True))
    axes = matplotlib.figure.Figure().subplots()
    report._draw_losses(axes, run, run)
    for line in axes.get_lines():
        assert list(line.get_ydata()) == list(losses_of(run).values())


def test_report_says_how_the_layout_changed(tmp_path: Path) -> None:
    hybrid = read_run(make_run(tmp_path / "hybrid", killed=True, hybrid=True))
    assert report.layout_text(hybrid) == [
        "TP1 x PP2 x DP2, 4 layers: stage widths 2 2 -> 2 1, 0 free",
        "step, ms: 100 before, 125 after, 175 simulated after",
    ]
    plain = read_run(make_run(tmp_path / "plain", killed=True))
    assert report.layout_text(plain) == []
    assert report.draw_report(hybrid, plain, tmp_path / "report.png").is_file()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--out", "{run}"], "which is a folder, wanted a file"),
        (["--out", "{run}/report.txt"], "report.txt', wanted a name that ends in one of: "),
        (["--out", "{run}/report"], "report', wanted a name that ends in one of: "),
        (["--out", "{run}/no/x.png"], "whose folder does not exist"),
        (["--global-batch", "0"], "--global-batch is 0, wanted 1 or more"),
        (["--reference", "{run}/no"], "holds no events.jsonl"),
    ],
)
def test_a_bad_option_of_the_report_is_one_sentence(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run", killed=True)
    argv = ["report", str(run), *(one.format(run=run) for one in arguments)]
    assert run_command(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert words in captured.err
    assert not list(tmp_path.rglob("*.png")), "nothing is written"


def test_a_run_without_a_step_is_not_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run", killed=False)
    (run / "steps.jsonl").write_text("")
    assert run_command(["report", str(run)]) == 2
    assert "is of a run that completed no step" in capsys.readouterr().err


def test_the_files_of_two_jobs_are_not_judged_as_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They would give repeated samples that nobody has trained on twice."""
    run = make_run(tmp_path / "run", killed=True)
    make_run(run, killed=False)
    assert run_command(["report", str(run)]) == 2
    assert "holds the files of 2 jobs, wanted those of one; give" in capsys.readouterr().err
    detached = make_run(tmp_path / "alone", killed=True)
    assert run_command(["report", str(detached), "--reference", str(run)]) == 2
    assert "run' holds the files of 2 jobs" in capsys.readouterr().err
    assert run_command(["report", str(detached)]) == 0


def from_outside(name: str, record: dict[str, Any]) -> dict[str, Any] | None:
    """No worker says that a fault was fired: the kill came from outside."""
    return None if record.get("kind") == "fault_fired" else record


def made_to_change(folder: Path) -> Path:
    """Slot 2 is lost in step 3, told from outside; slot 1 leaves before step 6; both are back."""
    run = make_run(folder, killed=True, change=from_outside)
    left = "worker 1 (node 0) left: elaswave drain"
    back = "worker 1 (node 0) joins as 1.1; worker 2 (node 0) joins as 2.1"
    with EventLog(run / "events.jsonl") as events:
        events.emit("view_committed", epoch=3, ranks=[0, 3], reason=left, by=0)
        events.emit("view_committed", epoch=4, ranks=[0, 1, 2, 3], reason=back, by=0)
    with EventLog(run / "steps.jsonl") as steps:
        for view, step, slots in ((3, 6, (0, 3)), (4, 7, (0, 1, 2, 3))):
            for slot in slots:
                place = {"slot": slot, "epoch": view, "step": step, "pid": 1000 + slot}
                steps.write({**place, "time_s": 9.0, "loss": 1.0, "step_s": 0.1})
    return run


CHANGES = [(3, 2, "lost"), (6, 1, "left"), (7, 1, "came"), (7, 2, "came")]


def test_report_marks_every_loss_departure_and_return(tmp_path: Path) -> None:
    run = read_run(made_to_change(tmp_path / "run"))
    assert not kills_of(run), "nothing was injected"
    axes = matplotlib.figure.Figure().subplots()
    report._mark_changes(axes, run, with_text=True)
    found = {(int(text.xy[0]), text.get_text()) for text in axes.texts}
    assert found == {(step, f"worker {slot} {what}") for step, slot, what in CHANGES}
    assert sorted(int(line.get_xdata()[0]) for line in axes.get_lines()) == [3, 6, 7]


def test_report_says_in_which_phase_a_kill_of_a_test_struck(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "run", killed=True))
    axes = matplotlib.figure.Figure().subplots()
    report._mark_changes(axes, run, with_text=True)
    assert [text.get_text() for text in axes.texts] == ["worker 2 lost, backward"]


def test_a_worker_that_is_replaced_in_one_view_is_lost_and_came() -> None:
    views = [{"epoch": n, "ranks": [0, 1], "reason": "worker 1 (node 0) exited: x"} for n in (1, 2)]
    changes = changes_of(run_of(view_committed=views, entered=[{"epoch": 2, "slot": 1}]))
    assert [(one["what"], one["step"]) for one in changes] == [("lost", None), ("came", None)]


@pytest.mark.parametrize(
    ("over", "said"),
    [
        (None, ["the job has not ended, or no agent saw its end"]),
        ((0, "all workers have finished"), []),
        ((1, "no live worker remains"), ["the job ended with exit code 1: no live worker remains"]),
        ((143, "told to leave", 130), ["the job ended with exit code 130: told to leave"]),
        ((143, "told to leave", 130, 143), ["the job ended with exit code 143: told to leave"]),
    ],
)
def test_report_says_how_a_job_ended(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    over: tuple[Any, ...] | None,
    said: list[str],
) -> None:
    run = make_run(tmp_path / "run", killed=False)
    if over is not None:
        with EventLog(run / "events.jsonl") as events:
            events.emit("job_over", exit_code=over[0], reason=over[1])
            for node, code in enumerate(over[2:]):
                events.emit("job_ended", node=node, exit_code=code)
    assert run_command(["report", str(run), "--global-batch", "12"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in printed if line.startswith("the job ")] == said


def test_report_prints_a_table_and_what_is_wrong_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = made_to_change(tmp_path / "run")
    with (run / "ledger.jsonl").open() as ledger:
        lines = ledger.readlines()
    (run / "ledger.jsonl").write_text("".join(lines[1:]))  # two samples of step 0
    with EventLog(run / "events.jsonl") as events:
        record = read_run(run).of_kind("recovered")[0]
        events.write({**record, "slot": 3, "bytes_moved": 1})
    assert run_command(["report", str(run), "--global-batch", "12", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [(one["step"], one["slot"], one["what"]) for one in document["changes"]] == CHANGES
    lost = document["samples_lost"]
    assert lost >= 2
    assert run_command(["report", str(run), "--global-batch", "12"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == f"samples: {lost} lost, 0 repeated"
    assert printed[1] == "workers 0 and 3 report different bytes_moved of view 2"
    table = [line for line in printed if line.startswith("│")]
    for step, slot, what in CHANGES:
        words = [str(step), str(slot), what]
        assert any(
            [shard_group.strip() for shard_group in line.split("│")[1:4]] == words for line in table
        )


@pytest.mark.parametrize(("equal", "word"), [(True, "equal"), (False, "differs")])
@pytest.mark.parametrize(
    ("kind", "what"), [("first_step_rehearsed", "first step"), ("layer_repeated", "one layer")]
)
def test_report_says_what_running_once_more_found_and_took(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    kind: str,
    what: str,
    equal: bool,
    word: str,
) -> None:
    run = make_run(tmp_path / "run", killed=False)
    assert run_command(["report", str(run), "--global-batch", "12"]) == 0
    assert f"{what} run once more" not in capsys.readouterr().out
    with EventLog(run / "events.jsonl") as events:
        for slot, seconds in ((0, 0.125), (1, 0.25), (1, 0.125)):  # worker 1 made two calls
            events.emit(kind, slot=slot, seconds=seconds, equal=equal or slot > 0)
    assert run_command(["report", str(run), "--global-batch", "12"]) == 0
    assert re.search(rf"{what} run once more \({word}\), ms\W+375\b", capsys.readouterr().out)
