"""The real demo, real processes and a real SIGKILL: what it claims, and that it leaves nothing."""

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from statistics import median

import psutil
import pytest

from elaswave_plugin.config import Kill
from elaswave_plugin.observer.observer import summarize
from elaswave_plugin.observer.run import read_run
from tests.idle import completed
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled

pytest.importorskip("megatron.core")

DEMO = [sys.executable, "-m", "elaswave_plugin.cli.main", "demo"]
ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 100.0


def ratio_on_to_off(folder: Path) -> float:
    """Median step with snapshots over median step without, from the raw lines."""
    slowest_s: dict[int, float] = {}
    for line in map(json.loads, (folder / "steps.jsonl").read_text().splitlines()):
        slowest_s[line["step"]] = max(line["step_s"], slowest_s.get(line["step"], 0.0))
    assert sorted(slowest_s) == list(range(60))
    on = [slowest_s[step] for first in (0, 20, 40) for step in range(first + 1, first + 10)]
    off = [slowest_s[step] for first in (10, 30, 50) for step in range(first + 1, first + 10)]
    return median(on[1:]) / median(off)  # without step 1, the warm-up


@proves(Kind.KILL, Promise.EQUAL, victim="1", moment="3:forward")
def test_real_demo_survives_and_its_summary_follows_from_its_files(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    command = [*DEMO, "--steps", "6", "--kill", "1@3:forward", "--out", str(out)]
    done = completed(command, LIMIT_S, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "parameters equal to the run without failure: yes" in done.stdout
    summary = json.loads((out / "summary.json").read_text())
    kill = Kill(slot=1, step=3, phase="forward")
    again = summarize(
        read_run(out / "run"),
        read_run(out / "reference"),
        steps=6,
        global_batch=8,
        kills=[kill],
        snapshot_overhead_ratio=ratio_on_to_off(out / "overhead"),
    )
    assert summary == json.loads(json.dumps(again))
    assert summary["kills"] == [{"slot": 1, "step": 3, "phase": "forward", "fired": True}]
    assert summary["steps"] == 6 and len(summary["recoveries"]) == 1
    assert summary["recoveries"][0]["restored_step"] == 3


@proves(Kind.SIGNAL, Promise.CLEAN)
@pytest.mark.parametrize(
    ("number", "code"),
    sampled([(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)]),
)
def test_real_demo_ended_by_a_signal_leaves_no_process(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    command = [*DEMO, "--steps", "2000", "--kill", "1@1999", "--out", str(tmp_path / "demo")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as demo:
        limit = threading.Timer(LIMIT_S, demo.kill)  # ends the reading below as well
        limit.start()
        assert demo.stdout is not None
        assert any(line.startswith("step ") for line in demo.stdout), "no step was made"
        started = psutil.Process(demo.pid).children(recursive=True)
        demo.send_signal(number)
        assert demo.wait(LIMIT_S) == code
        limit.cancel()
    assert len(started) >= 7  # zygote, launcher (the guardian), agent, 4 trainers
    _, alive = psutil.wait_procs(started, timeout=20)
    assert alive == []
