"""The demo with made-up runs in the place of training: what it shows, writes and returns."""

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from elaswave_plugin.config import Kill
from elaswave_plugin.core.layout.layout import launch_layout
from elaswave_plugin.demo import demo, jobs
from elaswave_plugin.demo.options import DemoOptions
from elaswave_plugin.demo.text import TextSource
from elaswave_plugin.observer.observer import summarize
from elaswave_plugin.observer.run import read_run
from tests.observer.made_up import HYBRID, KILL_STEP, KILLED, STEPS

ROOT = Path(__file__).resolve().parents[2]
FAKE_JOB = """
import sys
from pathlib import Path
from tests.observer.made_up import make_alternated, make_run, write_state
folder, killed, flip = Path(sys.argv[1]), sys.argv[2] == "True", sys.argv[3] == "True"
if sys.argv[4] == "snapshots":
    make_alternated(folder, steps=int(sys.argv[5]), on_s=0.102, off_s=0.1)
else:
    make_run(folder, killed=killed, hybrid=sys.argv[6] == "True")
    write_state(folder, workers=3 if killed else 4, flip=killed and flip)
"""


def made_options(tmp_path: Path) -> DemoOptions:
    return DemoOptions(
        source=TextSource(name="text", paths=(Path("a"),), num_bytes=2**21),
        layout=launch_layout(tp=1, pp=1, dp=4, num_layers=4),
        steps=STEPS,
        kills=(Kill(slot=KILLED, step=KILL_STEP),),
        seed=1,
        json_file=tmp_path / "copy.json",
        out=tmp_path / "out",
        script=Path("train.py"),
    )


def play(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    job: str,
    flip: bool = False,
    alternated_steps: int = 0,
    hybrid: bool = False,
) -> Any:
    """Run the demo with `job` as the training process; returns (exit code, what was shown)."""

    @contextmanager
    def no_zygote(log: Path, preload: Any) -> Iterator[tuple[None, Path]]:
        yield None, Path("socket")

    def command(
        options: Any, *, directory: Path, kill: bool, alternate: str, **rest: Any
    ) -> list[str]:
        words = (directory, kill, flip, alternate, alternated_steps or options.steps, hybrid)
        return [sys.executable, "-c", job, *map(str, words)]

    monkeypatch.setattr(jobs, "zygote", no_zygote)
    monkeypatch.setattr(jobs, "wait_until_ready", lambda *rest: None)
    monkeypatch.setattr(jobs, "write_dataset", lambda *rest: None)
    monkeypatch.setattr(jobs, "job_command", command)
    # The two runs hold 12 samples a step; the real demo has 8.
    monkeypatch.setattr(demo, "GLOBAL_BATCH", 12)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    options = made_options(tmp_path)
    if hybrid:
        options = replace(options, layout=HYBRID)
    options.out.mkdir()
    shown = io.StringIO()
    code = demo.run_demo(options, None, Console(file=shown, width=120))
    return code, shown.getvalue()


def test_demo_shows_the_kill_the_view_change_the_phases_and_the_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, shown = play(tmp_path, monkeypatch, FAKE_JOB)
    assert code == 0
    for text in (
        "text: text: 1 files, 2.0 MiB",
        "step    0  loss 5.0000, 4 workers, 100 ms",
        "worker 2 killed in step 3, backward (pid 1002, SIGKILL)",
        "view 1 -> 2: workers 0 1 3; worker 2 (node 0) exited: killed by SIGKILL",
        "recovered: state of step 3 restored, 0 KiB moved",
        "detect 2.0  agree 10.0  edit 2.0  move 20.0  rebind 3.0  verify 4.0  replay 130.0",
        "loss 1.0000, 3 workers",
        "0 lost, 0 repeated",
        "step time with snapshots / without, in turn: 1.020",
        "parameters equal to the run without failure: yes",
    ):
        assert text in shown, f"{text!r} is not in\n{shown}"
    assert shown.index("worker 2 killed") < shown.index("view 1 -> 2") < shown.index("recovered")


def test_demo_writes_its_files_and_the_summary_can_be_recomputed_from_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(tmp_path, monkeypatch, FAKE_JOB)
    out = tmp_path / "out"
    summary = json.loads((out / "summary.json").read_text())
    assert json.loads((tmp_path / "copy.json").read_text()) == summary
    again = summarize(
        read_run(out / "run"),
        read_run(out / "reference"),
        steps=STEPS,
        global_batch=12,
        kills=[Kill(slot=KILLED, step=KILL_STEP)],
        snapshot_overhead_ratio=0.102 / 0.1,
    )
    assert summary == again
    for name in ("events.jsonl", "ledger.jsonl"):
        assert (out / name).read_bytes() == (out / "run" / name).read_bytes() != b""
    assert (out / "report.png").read_bytes().startswith(b"\x89PNG")


def test_demo_of_a_hybrid_job_shows_the_change_of_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, shown = play(tmp_path, monkeypatch, FAKE_JOB, hybrid=True)
    assert code == 0
    for text in (
        "4 workers (TP1 x PP2 x DP2, 4 layers), 6 steps",
        "layout: TP1 x PP2 x DP2, 4 layers, widths 2 1",
        "  stage 0, layers 0-1: r0 w0 | r1 w1; stage 1, layers 2-3: r1 w3",
    ):
        assert text in shown, f"{text!r} is not in\n{shown}"
    table = " ".join(shown.split())
    assert "simulated step after, ms (4 processors) │ 175" in table
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["plan"]["predicted_step_s"] == pytest.approx(0.175)


def test_demo_says_why_the_cost_of_snapshots_is_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, shown = play(tmp_path, monkeypatch, FAKE_JOB, alternated_steps=10)
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["snapshot_overhead_ratio"] is None
    assert "no steps with or without snapshots" in summary["snapshot_overhead_reason"]
    assert summary["snapshot_overhead_reason"] in shown


def test_demo_control_unequal_state_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, shown = play(tmp_path, monkeypatch, FAKE_JOB, flip=True)
    assert code == 1
    assert "parameters equal to the run without failure: no" in shown


def test_demo_succeeds_only_if_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(tmp_path, monkeypatch, FAKE_JOB)
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert demo.succeeded(summary, STEPS)
    for change in (
        {"steps": STEPS - 1},
        {"kills": [{**summary["kills"][0], "fired": False}]},
        {"parameters_equal": None},
        {"max_abs_loss_diff": 1e-9},
        {"max_abs_loss_diff": None},
        {"survivor_pids_unchanged": False},
        {"samples_lost": 1},
        {"samples_repeated": 1},
    ):
        assert not demo.succeeded({**summary, **change}, STEPS), change


@pytest.mark.parametrize(
    ("code", "text", "words"),
    [
        (1, "Traceback\nValueError: broken", "exit code 1; the end of"),
        (2, "start\ntoo little shared memory", "^too little shared memory$"),
    ],
)
def test_demo_job_that_fails_is_told_in_its_own_words(
    code: int, text: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = f"import sys; print({text!r}); sys.exit({code})"
    with pytest.raises(jobs.JobFailed, match=words) as caught:
        play(tmp_path, monkeypatch, job)
    assert caught.value.exit_code == code


def test_demo_process_dies_with_the_demo(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from elaswave_plugin.demo import jobs\n"
        "with jobs.running(['sleep', '1000'], Path(sys.argv[1])) as process:\n"
        "    print(process.pid, flush=True); sys.stdin.read()"
    )
    for number in (signal.SIGKILL, signal.SIGINT):
        command = [sys.executable, "-c", code, str(tmp_path / "log")]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as parent:
            assert parent.stdout is not None
            child = psutil.Process(int(parent.stdout.readline()))
            os.kill(parent.pid, number)
            parent.wait(30)
            psutil.wait_procs([child], timeout=20)
            assert not child.is_running()
