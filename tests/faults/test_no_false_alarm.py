"""A thousand noisy steps without a hang, in which no worker is taken for a hung one."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elaswave_plugin.config import ElasticConfig
from tests.faults import harness
from tests.faults.conftest import Launch
from tests.faults.harness import JobSpec
from tests.proofs import Kind, Promise, proves

# Steps in which other processes compute beside the workers, six for each of two cores.
LOADED, COMPUTING = range(700, 760), 12
COMPUTE = "import os\nwhile os.getppid() == {parent}: sum(range(10000))"
# More than half of what a hang may take is what noise takes here; announced work takes longer.
NOISE = """
import os, random, subprocess, sys, time, torch
from elaswave_plugin.recovery.phases import Phases
fire, draw, load, compiled = Phases.fire, random.Random(), [], []
def compile_slowly(module, inputs):
    time.sleep({announced_s})
    return module.forward
def noisily(self, name):
    if self._slot == 0 and self.step in {loaded} and not load:
        compute = {compute!r}.format(parent=os.getpid())
        load.extend(subprocess.Popen([sys.executable, "-c", compute]) for _ in range({computing}))
        self._events.emit("loaded", step=self.step)
    elif self.step not in {loaded}:
        for process in load:
            process.kill()
            process.wait()
        load.clear()
    if (self._slot, self.step, name) == (1, 400, "forward") and not compiled:
        compiled.append(self.step)
        self._events.emit("slow", slot=1, phase="compilation", step=self.step)
        torch.compile(lambda x: x + 1, backend=compile_slowly)(torch.ones(1))
        pause_s = 0.0
    elif name in ("evaluation", "save") and self._slot == self.step // 250 % 2:
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


def noisy(steps: int, saved: Path) -> JobSpec:
    """At the default limit of a hang."""
    limit_s = ElasticConfig().hang_timeout_s
    noise = NOISE.format(
        announced_s=1.3 * limit_s,
        hiccup_s=0.6 * limit_s,
        loader_s=0.7 * limit_s,
        loaded=LOADED,
        compute=COMPUTE,
        computing=COMPUTING,
    )
    return JobSpec(
        nproc=2,
        steps=steps,
        global_batch=2,
        dump="never",
        sabotage=noise,
        options=(
            *TINY,
            "--eval-interval=250",
            "--eval-iters=1",
            f"--save={saved}",
            "--save-interval=500",
        ),
    )


@proves(Kind.NOISE, Promise.NOBODY_LOST)
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_no_false_alarm_in_a_thousand_noisy_steps(
    run: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With evaluations, saves and compilations of one worker, a loader that stutters, and load."""
    monkeypatch.setattr(harness, "RUN_LIMIT_S", 300.0)
    outcome = run(noisy(1000, tmp_path / "saved"))
    assert outcome.returncode == 0, outcome.output[-4000:]
    assert len(outcome.files.steps) == 2 * 1000
    slow = outcome.events("slow")
    assert {event["phase"] for event in slow} >= {"data", "evaluation", "save", "compilation"}
    assert {event["slot"] for event in slow} == {0, 1}
    (loaded,) = outcome.events("loaded")
    assert loaded["step"] == LOADED.start
    assert not outcome.events("hang_found")
    assert len(outcome.events("view_committed")) == 1
    assert not outcome.orphans


@contextlib.contextmanager
def load(processes: int) -> Iterator[None]:
    """As many processes that do nothing but compute."""
    compute = COMPUTE.format(parent=os.getpid())
    busy = [subprocess.Popen([sys.executable, "-c", compute]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


@proves(Kind.NOISE, Promise.NOBODY_LOST)
@pytest.mark.slow
def test_no_false_alarm_on_a_loaded_machine(run: Launch) -> None:
    """Twelve processes that compute beside four workers, on two cores, at the default limit."""
    with load(12):
        outcome = run(JobSpec(steps=20, dump="never", options=("--eval-interval=10",)))
    assert outcome.returncode == 0, outcome.output[-4000:]
    assert not outcome.events("hang_found")
    assert len(outcome.events("view_committed")) == 1


# Others take the whole processor of worker 1 for longer than a hang may take.
STARVED = """
import os, subprocess, sys
from elaswave_plugin.recovery.phases import Phases
fire, done = Phases.fire, []
compute = '''
import os, time
os.sched_setaffinity(0, [PROCESSOR])
end_s = time.monotonic() + 6
while time.monotonic() < end_s: sum(range(10000))
'''
def starved(self, name):
    if self._slot == 1 and (self.step, name) == (5, "forward") and not done:
        done.append(True)
        processor = min(os.sched_getaffinity(0))
        script = compute.replace("PROCESSOR", str(processor))
        for _ in range(8):
            subprocess.Popen([sys.executable, "-c", script])
        for tid in map(int, os.listdir("/proc/self/task")):
            os.sched_setaffinity(tid, [processor])
            os.setpriority(os.PRIO_PROCESS, tid, 19)
        self._events.emit("starved", slot=1)
        sum(range(5_000_000))  # a tenth of a second of its own
    fire(self, name)
Phases.fire = starved
"""


@proves(Kind.NOISE, Promise.NOBODY_LOST)
@pytest.mark.slow
def test_who_waits_for_a_processor_does_not_hang(run: Launch) -> None:
    outcome = run(JobSpec(steps=9, dump="never", sabotage=STARVED))
    assert outcome.returncode == 0, outcome.output[-4000:]
    assert len(outcome.events("starved")) == 1
    slowest_s = max(r["step_s"] for r in outcome.files.steps if r["step"] == 5)
    assert slowest_s > ElasticConfig().hang_timeout_s
    assert not outcome.events("hang_found")
    assert len(outcome.events("view_committed")) == 1
