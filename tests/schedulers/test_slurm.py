"""Jobs under a real Slurm: srun's tasks, suspension, scancel, a lost node, the time limit."""

import itertools
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from elaswave_plugin.tracking.events import EVENTS_FILE, STEPS_FILE, read_lines
from tests.faults.conftest import Reference
from tests.faults.harness import JobSpec, check_equal, left_alive, pids_of
from tests.idle import Deadline
from tests.proofs import Kind, Promise, proves
from tests.schedulers.batch import LAUNCHERS, Submitted, hold, left_in_shared_memory, submit
from tests.schedulers.slurm import OVER, Slurm

# Above all waits of a test together: what hangs is then told by the wait that it hangs in.
pytestmark = pytest.mark.timeout(400)
SPEC = JobSpec(steps=80, dump="last")
ENDLESS = JobSpec(nodes=4, steps=100_000, dump="never")
START_S = 100.0
SUSPENDED_S = 30.0


def wait_for_step(slurm: Slurm, job: Submitted, step: int) -> None:
    """Wait until some worker has completed a step."""
    deadline = Deadline(START_S)
    while max((line["step"] for line in read_lines(job.directory / STEPS_FILE)), default=-1) < step:
        assert deadline.left_s(), (slurm.shown(job.number), job.output[-4000:])
        assert slurm.state(job.number) not in OVER, job.output[-4000:]
        time.sleep(0.02)  # the file is all that a running job shows


@proves(Kind.NOTHING, Promise.EQUAL)
def test_srun_with_one_task_a_worker(
    slurm: Slurm, data: Path, tmp_path: Path, reference: Reference
) -> None:
    spec = replace(SPEC, nodes=4)
    run = submit(slurm, spec, data=data, directory=tmp_path).outcome(slurm)
    check_equal(run, reference(SPEC))
    nodes = {event["slot"]: event["node"] for event in run.events("worker_started")}
    assert nodes == {0: 0, 1: 1, 2: 2, 3: 3}


@proves(Kind.KILL, Promise.EQUAL, victim="3")
def test_srun_does_not_see_the_loss_of_a_trainer(
    slurm: Slurm, data: Path, tmp_path: Path, reference: Reference
) -> None:
    spec = replace(SPEC, nodes=2, lost_trainers=(3,))
    job = submit(slurm, spec, data=data, directory=tmp_path)
    wait_for_step(slurm, job, 3)
    events = read_lines(tmp_path / EVENTS_FILE)
    (pid,) = [e["pid"] for e in events if e["kind"] == "worker_started" and e["slot"] == 3]
    os.kill(pid, signal.SIGKILL)
    run = job.outcome(slurm)
    check_equal(run, reference(SPEC))
    assert [view["ranks"] for view in run.events("view_committed")] == [[0, 1, 2, 3], [0, 1, 2]]
    # It was lost in the middle of training.
    assert 0 <= max(r["step"] for r in run.files.steps if r["slot"] == 3) < SPEC.steps - 1


@proves(Kind.SUSPEND, Promise.EQUAL)
def test_scontrol_suspend_and_resume(
    slurm: Slurm, data: Path, tmp_path: Path, reference: Reference
) -> None:
    spec = replace(SPEC, nodes=4)
    job = submit(slurm, spec, data=data, directory=tmp_path, by=LAUNCHERS)
    wait_for_step(slurm, job, 3)
    slurm.suspend(job.number)
    processes = slurm.processes(job.number)
    # The batch script and srun beside a guardian, an agent and a trainer a node.
    assert {process.pid for process in processes} > {*pids_of(tmp_path)}
    assert len(processes) >= 2 + 3 * 4
    deadline = Deadline(SUSPENDED_S)
    while awake := [one for one in processes if one.status() != psutil.STATUS_STOPPED]:
        assert deadline.left_s(), awake
        time.sleep(0.02)  # Slurm asks first, and stops them 2 s later
    lines = read_lines(tmp_path / STEPS_FILE)
    time.sleep(SUSPENDED_S)
    assert {one.status() for one in processes} == {psutil.STATUS_STOPPED}
    assert read_lines(tmp_path / STEPS_FILE) == lines
    assert max(line["step"] for line in lines) < SPEC.steps - 1
    slurm.resume(job.number)
    run = job.outcome(slurm)
    check_equal(run, reference(SPEC))
    assert len(run.events("view_committed")) == 1
    assert not run.events("hang_found")
    times = sorted(record["time_s"] for record in run.files.steps)
    assert max(b - a for a, b in itertools.pairwise(times)) > SUSPENDED_S


@proves(Kind.SIGNAL, Promise.CLEAN)
def test_scancel_leaves_nothing(slurm: Slurm, data: Path, tmp_path: Path) -> None:
    in_memory = set(os.listdir("/dev/shm"))
    job = submit(slurm, ENDLESS, data=data, directory=tmp_path, by=LAUNCHERS)
    wait_for_step(slurm, job, 3)
    processes = slurm.processes(job.number)
    pids = {process.pid for process in processes}
    assert pids > {*pids_of(tmp_path)}
    cancelled_s = time.monotonic()
    slurm.cancel(job.number)
    assert slurm.wait_for(job.number, *OVER, limit_s=30.0) == "CANCELLED"
    left_s = 30.0 - (time.monotonic() - cancelled_s)
    assert left_alive(tuple(pids), limit_s=left_s) == ()
    assert slurm.processes(job.number) == []
    assert left_in_shared_memory(in_memory) == set()


@proves(Kind.NODE, Promise.EQUAL, victim="2")
def test_a_lost_node_ends_neither_the_job_nor_the_step(
    slurm: Slurm, data: Path, tmp_path: Path, reference: Reference
) -> None:
    spec = replace(SPEC, nodes=4, lost_nodes=(2,))
    go_on = tmp_path / "go_on"
    job = submit(
        slurm,
        spec,
        data=data,
        directory=tmp_path,
        by=LAUNCHERS,
        options=("--no-kill",),
        start="srun --no-kill --wait=0 --kill-on-bad-exit=0",
        # Slurm sees the loss after seconds, and the step has to outlive what it does then.
        before=hold({SPEC.steps - 20: go_on}),
    )
    wait_for_step(slurm, job, 3)
    slurm.lose_node("n3")
    try:
        slurm.wait_for_node("n3", "down", limit_s=60.0)
        assert slurm.state(job.number) == "RUNNING"
        go_on.touch()
        run = job.outcome(slurm)
    finally:
        slurm.bring_back("n3")
    check_equal(run, reference(SPEC))
    assert [view["ranks"] for view in run.events("view_committed")] == [[0, 1, 2, 3], [0, 1, 3]]
    assert "StepId=0 on failed node n3" in slurm.log()


@proves(Kind.WRONG_INPUT, Promise.REFUSED)
def test_the_exit_code_of_bad_input_reaches_slurm(slurm: Slurm, data: Path, tmp_path: Path) -> None:
    spec = replace(SPEC, nodes=4, script="nowhere.py")
    job = submit(slurm, spec, data=data, directory=tmp_path)
    assert slurm.wait_for(job.number, *OVER, limit_s=START_S) == "FAILED"
    assert slurm.exit_code(job.number) == 2
    assert "elaswave_plugin.run: script 'nowhere.py' is no file" in job.output


@proves(Kind.WRONG_INPUT, Promise.REFUSED)
def test_a_batch_script_is_no_task_of_srun(slurm: Slurm, data: Path, tmp_path: Path) -> None:
    """It has the number of a task, and of tasks, too."""
    job = submit(slurm, replace(SPEC, nodes=4), data=data, directory=tmp_path, start="")
    assert slurm.wait_for(job.number, *OVER, limit_s=START_S) == "FAILED"
    assert slurm.exit_code(job.number) == 2
    assert "elaswave_plugin.run: RANK, WORLD_SIZE not set: start this with" in job.output
