"""report.png shows what the files say: its lines hold the run's own numbers."""

from pathlib import Path

import pytest

matplotlib = pytest.importorskip("matplotlib")

from elaswave_plugin import report  # noqa: E402
from elaswave_plugin.cli import run_command  # noqa: E402
from elaswave_plugin.observer import losses_of, read_run  # noqa: E402
from tests.observer.made_up import make_run  # noqa: E402


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
        (["--json", "{run}"], "which is a folder, wanted a file"),
        (["--json", "{run}/no/x.json"], "whose folder does not exist"),
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
    alone = make_run(tmp_path / "alone", killed=True)
    assert run_command(["report", str(alone), "--reference", str(run)]) == 2
    assert "run' holds the files of 2 jobs" in capsys.readouterr().err
    assert run_command(["report", str(alone)]) == 0
