"""A worker that was stopped, given up, and goes on: nothing of it reaches the others any more."""

import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from elaswave_plugin.tracking.events import EVENTS_FILE, Tail
from tests.faults.conftest import Launch, Reference
from tests.faults.harness import (
    JobSpec,
    Outcome,
    Zygote,
    check_equal,
    left_alive,
    processes_of,
    started,
)
from tests.faults.test_outside_a_step import saved_tensors
from tests.faults.test_signals import wait_for_step
from tests.idle import Deadline
from tests.proofs import Kind, Promise, proves
from tests.tracking.wandb_files import history, run_ids

# A node each: the others cannot kill it, they can only shut it out.
# When it goes on it sees nobody, and stops after the wait for a majority.
SPEC = JobSpec(nproc=4, nodes=4, steps=20, dump="last", launcher=("--quorum-wait-s=1",))
ZOMBIE = 2
LIMIT_S = 60.0

# It stops right before it does something for the job, and says so when it has done it.
STOP_BEFORE = """
import os, signal, time
{imports}
act, done = {act}, []
def stop_first(self, *args, **kwargs):
    if os.environ["ELASWAVE_SLOT"] == "{slot}" and {when} and not done:
        done.append(True)
        from elaswave_plugin.tracking.events import EventLog
        with EventLog(os.environ["ELASWAVE_DIR"] + "/events.jsonl") as events:
            events.emit("stops", slot={slot})
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(0.5)  # it reaches a thread beside the main one a moment later
            result = act(self, *args, **kwargs)
            events.emit("acted", slot={slot})
            return result
    return act(self, *args, **kwargs)
{act} = stop_first
"""
SEAL = STOP_BEFORE.format(
    imports="from elaswave_plugin.recovery.state_keeper import StateKeeper",
    act="StateKeeper._seal_shard",
    when="args[1] == 5",
    slot=ZOMBIE,
)
COMPLETE = STOP_BEFORE.format(
    imports="from elaswave_plugin.loops.guarded_steps import GuardedSteps",
    act="GuardedSteps.complete",
    when="self.worker.completed == 5",
    slot=ZOMBIE,
)
TELL = STOP_BEFORE.format(
    imports="from elaswave_plugin.adapters.recording import Recording",
    act="Recording.step",
    when="args[0] == 5",
    slot=ZOMBIE,
)
SAVE = STOP_BEFORE.format(
    imports="from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest",
    act="AsyncRequest.execute_sync",
    when="True",
    slot=ZOMBIE,
)
LOG = STOP_BEFORE.format(
    imports="from elaswave_plugin.tracking.tracker import Tracker",
    act="Tracker._write",
    when="args[2] == 5",
    slot=0,
)
# What is to hold it back does not: a negative control.
UNFENCED = """
from elaswave_plugin.ipc.progress_page import ProgressPage
ProgressPage.may_act = True
"""

Undead = Callable[..., tuple[Outcome, float]]


@pytest.fixture
def undead(zygote: Zygote, data: Path, tmp_path: Path) -> Undead:
    """Has a worker stop, with all of its node, until the others are without it, and go on."""

    def run(spec: JobSpec, slot: int) -> tuple[Outcome, float]:
        with started(spec, zygote=zygote, data=data, directory=tmp_path) as launchers:
            wait_for_step(tmp_path, 3)
            events, seen = Tail(tmp_path / EVENTS_FILE), []
            deadline = Deadline(LIMIT_S)

            def wait_for(kind: str, **wanted: object) -> None:
                while not any(e["kind"] == kind and wanted.items() <= e.items() for e in seen):
                    seen.extend(events.new())
                    assert deadline.left_s(), (tmp_path / "output").read_text()[-3000:]
                    time.sleep(0.02)  # the file is all that a running job shows

            wait_for("worker_started", slot=slot)
            pids = processes_of(tmp_path, node=slot)
            if spec.sabotage:
                wait_for("stops")
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            wait_for("view_committed", epoch=2)
            assert left_alive(pids, limit_s=0.0) == pids
            awake_s = time.time()
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
            assert left_alive(pids, limit_s=LIMIT_S) == ()
            codes = [launcher.wait(LIMIT_S) for launcher in launchers]
        assert [bool(code) for code in codes] == [one == slot for one in range(4)]
        output = (tmp_path / "output").read_text()
        outcome = Outcome(spec=spec, directory=tmp_path, returncode=0, output=output, seconds=0)
        return outcome, awake_s

    return run


@proves(Kind.ZOMBIE, Promise.EQUAL)
def test_a_zombie_delivers_nothing(undead: Undead, reference: Reference) -> None:
    run, awake_s = undead(SPEC, ZOMBIE)
    check_equal(run, reference(SPEC))
    files = run.files
    assert {r["epoch"] for r in (*files.steps, *files.ledger) if r["slot"] == ZOMBIE} == {1}
    # Not even that of the step whose bytes it had.
    assert not [r for r in files.steps if r["slot"] == ZOMBIE and r["time_s"] > awake_s]
    # Those that may lead count it out; of the fourth it may not have heard by then.
    assert re.search("only [12] of 4 nodes can be reached, which is no majority", run.output)


@proves(Kind.ZOMBIE, Promise.EQUAL)
@pytest.mark.slow
@pytest.mark.parametrize("sabotage", [COMPLETE, SEAL, TELL], ids=["complete", "seal", "tell"])
def test_a_zombie_seals_nothing(undead: Undead, reference: Reference, sabotage: str) -> None:
    run, awake_s = undead(replace(SPEC, sabotage=sabotage), ZOMBIE)
    check_equal(run, reference(SPEC))
    assert len(run.events("stops")) == 1 and not run.events("acted")
    assert not [r for r in run.files.steps if r["slot"] == ZOMBIE and r["time_s"] > awake_s]


@proves(Kind.ZOMBIE, Promise.WHOLE)
def test_a_zombie_writes_no_checkpoint(
    undead: Undead, run: Launch, reference: Reference, tmp_path: Path
) -> None:
    options = (f"--save={tmp_path / 'saved'}", "--save-interval=5")
    zombie, _ = undead(replace(SPEC, sabotage=SAVE, options=options), ZOMBIE)
    check_equal(zombie, reference(SPEC))
    assert len(zombie.events("stops")) == 1 and not zombie.events("acted")
    options = (f"--save={tmp_path / 'undisturbed'}", "--save-interval=5")
    undisturbed = run(replace(SPEC, options=options))
    assert undisturbed.returncode == 0, undisturbed.output[-3000:]
    for done in (5, 10, 15, 20):
        left, right = (
            saved_tensors(tmp_path / name / f"iter_{done:07d}") for name in ("saved", "undisturbed")
        )
        assert len(left) > 20 and left.keys() == right.keys()
        assert all(left[name].equal(right[name]) for name in left)
    assert (tmp_path / "saved" / "latest_checkpointed_iteration.txt").read_text() == "20"


@proves(Kind.ZOMBIE, Promise.LOGGED)
def test_a_zombie_logs_no_point(undead: Undead, reference: Reference, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    options = ("--elaswave-wandb=offline", "--elaswave-wandb-project=tests")
    # W&B is opened beside the first steps.
    long = replace(SPEC, steps=80)
    run, _ = undead(replace(long, sabotage=LOG, options=options), 0)
    check_equal(run, reference(long))
    assert len(run.events("stops")) == 1 and not run.events("acted")
    assert len(run_ids(tmp_path)) == 1
    rows = [row["_step"] for folder in history(tmp_path).values() for row in folder]
    # Its successor logs what it had not.
    assert sorted(rows) == list(range(long.steps))


@proves(Kind.SABOTAGE, Promise.SEEN)
@pytest.mark.slow
def test_without_the_fence_a_zombie_acts(undead: Undead) -> None:
    run, _ = undead(replace(SPEC, sabotage=SEAL + UNFENCED), ZOMBIE)
    assert len(run.events("stops")) == 1
    assert len(run.events("acted")) == 1
