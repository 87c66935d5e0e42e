"""The shipped array job: tasks that Slurm takes away or starts again leave it and join it."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults.conftest import Reference
from tests.faults.harness import JobSpec, Outcome
from tests.proofs import Kind, Promise, proves
from tests.schedulers.batch import JOB_S, Shipped, hold, submit_shipped
from tests.schedulers.slurm import GRACE_S, OVER, Slurm

pytestmark = pytest.mark.timeout(400)
SPEC = JobSpec(nproc=4, nodes=2, steps=80, dump="last", respawn=1)


def submit(slurm: Slurm, data: Path, folder: Path, before: str) -> Shipped:
    """Queue the array, a task a node."""
    return submit_shipped(
        slurm, "array.sbatch", SPEC, "--array=0-1", data=data, folder=folder, before=before
    )


def tasks_of(job: Shipped) -> tuple[str, str]:
    """The names of the task that has begun node 1, and of the other one."""
    number = int(job.launcher_of(1).environ()["SLURM_ARRAY_TASK_ID"])
    return f"{job.number}_{number}", f"{job.number}_{1 - number}"


def check_completed(slurm: Slurm, *tasks: str) -> None:
    """Wait for the end of these tasks."""
    for task in tasks:
        assert slurm.wait_for(task, *OVER, limit_s=JOB_S) == "COMPLETED"


def check_back(run: Outcome, reference: Reference) -> list[list[int]]:
    """Check that it went on without node 1, then with all, to the same bits; its views' ranks."""
    assert not run.orphans
    ranks = [view["ranks"] for view in run.events("view_committed")]
    assert ranks[0] == ranks[-1] == [0, 1, 2, 3] and [0, 1] in ranks
    assert run.trace() == reference(replace(SPEC, nodes=1, respawn=0)).trace()
    return ranks


def check_left(run: Outcome) -> None:
    """Check that the workers of node 1 left between two steps: no step was computed twice."""
    reasons = " ".join(view["reason"] for view in run.events("view_committed"))
    assert all(f"worker {slot} (node 1) left: it was told to end" in reasons for slot in (2, 3))
    assert "was lost" not in reasons
    attempts = {(line["step"], line["epoch"]) for line in run.files.ledger}
    assert len(attempts) == SPEC.steps
    assert not run.orphans


@proves(Kind.NODE_RETURN, Promise.EQUAL)
def test_slurm_brings_a_lost_node_back_and_it_joins(
    slurm: Slurm, data: Path, tmp_path: Path, reference: Reference
) -> None:
    go_on = tmp_path / "go_on"
    job = submit(slurm, data, tmp_path, hold({SPEC.steps - 20: go_on}))
    job.wait(lambda: job.step >= 3, "step 3")
    task, other = tasks_of(job)
    lost = slurm.shown(task)["NodeList"]
    slurm.lose_node(lost)
    try:
        # Slurm sees the loss, puts the task back into the queue, and starts it on a free node.
        job.wait_for_workers_back(2)
        go_on.touch()
        check_completed(slurm, task, other)
        again = slurm.shown(task)
    finally:
        slurm.bring_back(lost)
    assert (again["Restarts"], slurm.exit_code(task)) == ("1", 0)
    assert again["NodeList"] != lost
    assert check_back(job.outcome(), reference)[1] == [0, 1]


@proves(Kind.NODE_RETURN, Promise.EQUAL)
def test_a_task_whose_launcher_is_killed_is_queued_again_and_joins(
    slurm: Slurm, data: Path, tmp_path: Path, reference: Reference
) -> None:
    go_on = tmp_path / "go_on"
    job = submit(slurm, data, tmp_path, hold({SPEC.steps - 20: go_on}))
    job.wait(lambda: job.step >= 3, "step 3")
    task, other = tasks_of(job)
    job.launcher_of(1).kill()
    job.wait_for_workers_back(2)
    go_on.touch()
    check_completed(slurm, task, other)
    assert (slurm.shown(task)["Restarts"], slurm.shown(other)["Restarts"]) == ("1", "0")
    assert check_back(job.outcome(), reference)[1] == [0, 1]


@proves(Kind.LEAVE, Promise.EQUAL)
def test_a_preempted_task_leaves_between_two_steps_and_joins_again(
    slurm: Slurm,
    data: Path,
    tmp_path: Path,
    reference: Reference,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ELASWAVE_NOTICE_TIMEOUT_S", str(GRACE_S - 10))
    told, go_on = tmp_path / "told", tmp_path / "go_on"
    before = hold({10: told, SPEC.steps - 20: go_on}, told=told)
    job = submit(slurm, data, tmp_path, before)
    job.wait(lambda: job.step == 9, "step 9")
    task, other = tasks_of(job)
    taken = slurm.shown(task)["NodeList"]
    urgent = slurm.preempt(taken, until=go_on)
    job.wait_for_workers_back(2)
    assert slurm.state(urgent) == "RUNNING"
    again = slurm.shown(task)
    go_on.touch()
    check_completed(slurm, task, other)
    assert again["Restarts"] == "1" and again["NodeList"] != taken
    assert slurm.shown(other)["Restarts"] == "0"
    run = job.outcome()
    check_left(run)
    check_back(run, reference)


@proves(Kind.LEAVE, Promise.EQUAL)
def test_scancel_of_a_task_takes_its_node_and_not_the_job(
    slurm: Slurm, data: Path, tmp_path: Path, reference: Reference
) -> None:
    told = tmp_path / "told"
    job = submit(slurm, data, tmp_path, hold({10: told}, told=told))
    job.wait(lambda: job.step == 9, "step 9")
    task, other = tasks_of(job)
    slurm.cancel(task)
    assert slurm.wait_for(other, *OVER, limit_s=JOB_S) == "COMPLETED"
    assert (slurm.state(task), slurm.shown(task)["Restarts"]) == ("CANCELLED", "0")
    run = job.outcome()
    check_left(run)
    assert run.events("view_committed")[-1]["ranks"] == [0, 1]
    assert run.trace() == reference(replace(SPEC, nodes=1, respawn=0)).trace()
