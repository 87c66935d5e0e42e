"""A thousand noisy steps in which nobody hangs, and nobody is taken for a worker that does."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.conftest import Launch
from tests.faults.harness import JobSpec

# Half of what a hang may take is what noise takes here; announced work takes longer than that.
LIMIT_S = 1.0
NOISE = """
import random, time
from elaswave_plugin.runtime.phases import Phases
fire, draw = Phases.fire, random.Random()
def noisily(self, name):
    if name in ("evaluation", "save") and self._slot == self.step // 250 % 2:
        pause_s = {announced_s}
    elif name == "data" and self.step % 100 == 50 and self._slot == self.step // 100 % 2:
        pause_s = {hiccup_s}
    elif name == "data" and 600 <= self.step < 606:
        pause_s = {loader_s}
    else:
        pause_s = draw.expovariate(1000) if draw.random() < 0.1 else 0.0
    if pause_s >= {hiccup_s}:
        self._events.emit("slow", slot=self._slot, phase=name, step=self.step)
    time.sleep(pause_s)
    fire(self, name)
Phases.fire = noisily
"""
# As cheap as a step can be: one layer, two workers with a micro-batch each.
TINY = ("--num-layers=1", "--hidden-size=32", "--seq-length=16", "--num-attention-heads=2")


def noisy(steps: int, limit_s: float, saved: Path) -> JobSpec:
    noise = NOISE.format(announced_s=1.3 * limit_s, hiccup_s=0.6 * limit_s, loader_s=0.7 * limit_s)
    return JobSpec(
        nproc=2,
        steps=steps,
        global_batch=2,
        dump="never",
        sabotage=noise,
        options=(
            *TINY,
            f"--elaswave-hang-timeout-s={limit_s}",
            "--eval-interval=250",
            "--eval-iters=1",
            f"--save={saved}",
            "--save-interval=500",
        ),
    )


@pytest.mark.slow
def test_no_false_alarm_in_a_thousand_noisy_steps(run: Launch, tmp_path: Path) -> None:
    """With evaluations and saves of one slow worker, and a loader that stutters and slows down."""
    outcome = run(noisy(1000, LIMIT_S, tmp_path / "saved"))
    assert outcome.returncode == 0, outcome.output[-4000:]
    assert len(outcome.files.steps) == 2 * 1000
    slow = outcome.events("slow")
    assert {event["phase"] for event in slow} >= {"data", "evaluation", "save"}
    assert {event["slot"] for event in slow} == {0, 1}
    assert not outcome.events("hang_found")
    assert len(outcome.events("view_committed")) == 1
    assert not outcome.orphans


@contextlib.contextmanager
def load(processes: int) -> Iterator[None]:
    """As many processes that do nothing but compute."""
    compute = f"import os\nwhile os.getppid() == {os.getpid()}: sum(range(10000))"
    busy = [subprocess.Popen([sys.executable, "-c", compute]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


@pytest.mark.slow
def test_no_false_alarm_on_a_loaded_machine(run: Launch) -> None:
    """Twelve processes that compute beside four workers, on two cores, at the default limit."""
    with load(12):
        outcome = run(JobSpec(steps=20, dump="never", options=("--eval-interval=10",)))
    assert outcome.returncode == 0, outcome.output[-4000:]
    assert not outcome.events("hang_found")
    assert len(outcome.events("view_committed")) == 1
