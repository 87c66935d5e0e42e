"""The shipped job of one allocation: it outlives its first node, whose place a spare one takes."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from elaswave_plugin.tracking.events import STEPS_FILE, read_lines
from tests.faults import own_scripts
from tests.faults.conftest import Reference
from tests.faults.harness import JobSpec
from tests.proofs import Kind, Promise, proves
from tests.schedulers.batch import JOB_S, hold, submit_shipped
from tests.schedulers.slurm import OVER, Slurm

pytestmark = pytest.mark.timeout(400)
TRACKER = "latest_checkpointed_iteration.txt"
SPEC = JobSpec(nproc=3, nodes=3, global_batch=6, steps=80, dump="last", respawn=1)
# The last node is slow: the job starts on the others, and it stands by.
SLOW = """#!/bin/bash
if [ "$SLURMD_NODENAME" = n4 ]; then
    timeout 100 bash -c 'until [ -e "{path}" ]; do sleep 0.1; done' || exit 1
fi
exec {elaswave} "$@"
"""


@proves(Kind.NODE_RETURN, Promise.EQUAL)
def test_an_allocation_outlives_its_first_node(
    slurm: Slurm, data: Path, tmp_path: Path, reference: Reference
) -> None:
    go_on, programs = tmp_path / "go_on", tmp_path / "programs"
    programs.mkdir()
    slow, started = programs / "elaswave", tmp_path / "started"
    slow.write_text(SLOW.format(path=started, elaswave=Path(sys.executable).parent / "elaswave"))
    slow.chmod(0o755)
    job = submit_shipped(
        slurm,
        "allocation.sbatch",
        SPEC,
        "--nodes=4",
        data=data,
        folder=tmp_path,
        before=hold({SPEC.steps - 20: go_on}),
        programs=programs,
    )
    job.wait(lambda: len(job.events("worker_started")) == 3, "workers")
    started.touch()
    job.wait(lambda: job.step >= 3, "step 3")
    standby = job.directory / "node-3.out"
    job.wait(lambda: "a slot of the job, which runs" in standby.read_text(), "node that stands by")
    nodes = {job.launcher_of(node).environ()["SLURMD_NODENAME"]: node for node in range(3)}
    assert {*nodes} == {"n1", "n2", "n3"}
    # With the batch script and srun.
    slurm.lose_node("n1")
    try:
        job.wait_for_workers_back(1)
        go_on.touch()
        # The last node gives it back, once Slurm has taken the first one out of it.
        assert slurm.wait_for(job.number, *OVER, limit_s=JOB_S) == "CANCELLED"
        assert slurm.shown(job.number)["NodeList"] == "n[2-4]"
        assert slurm.processes(job.number) == []
    finally:
        slurm.bring_back("n1")
    run = job.outcome()
    assert not run.orphans
    rest = [slot for slot in range(3) if slot != nodes["n1"]]
    ranks = [view["ranks"] for view in run.events("view_committed")]
    assert ranks[:2] == [[0, 1, 2], rest] and ranks[-1] == [0, 1, 2]
    assert run.trace() == reference(replace(SPEC, nodes=1, respawn=0)).trace()
    # Each node writes its own words: no node needs srun for that.
    said = [(job.directory / f"node-{number}.out").read_text() for number in range(4)]
    assert "the job is done" in "".join(said[1:])


@proves(Kind.ALL_LEAVE, Promise.EQUAL)
def test_the_time_limit_leaves_a_checkpoint_from_which_the_next_life_goes_on(
    slurm: Slurm,
    data: Path,
    tmp_path: Path,
    reference: Reference,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ELASWAVE_NOTICE_TIMEOUT_S", "60")
    told, saved = tmp_path / "told", tmp_path / "saved"
    spec = replace(
        SPEC,
        nproc=2,
        nodes=2,
        options=(f"--save={saved}",),
        script=own_scripts.write(tmp_path, *own_scripts.goes_on(saved)),
    )
    job = submit_shipped(
        slurm,
        "allocation.sbatch",
        spec,
        "--nodes=2",
        "--time=30",
        "--signal=TERM@119",
        data=data,
        folder=tmp_path,
        before=hold({10: told}, told=told),
    )
    job.wait(lambda: job.step == 9, "step 9")
    # It has one to two minutes more: Slurm sends the signal when it looks next, within 30 s.
    slurm.allow(job.number, minutes=2 + slurm.minutes(job.number))
    job.wait(lambda: slurm.shown(job.number)["Restarts"] == "1", "second life")
    first = len(read_lines(job.directory / STEPS_FILE))
    done = int((saved / TRACKER).read_text())
    assert done == job.step + 1 < SPEC.steps
    slurm.allow(job.number, minutes=30)
    assert slurm.wait_for(job.number, *OVER, limit_s=JOB_S) == "COMPLETED"
    assert (slurm.shown(job.number)["Restarts"], slurm.exit_code(job.number)) == ("1", 0)
    assert "every worker was told to leave, and they write a last checkpoint first" in job.output
    assert min(line["step"] for line in read_lines(job.directory / STEPS_FILE)[first:]) == done
    run = job.outcome()
    assert not run.orphans
    undisturbed = replace(spec, nodes=1, options=(), script=SPEC.script, respawn=0)
    assert run.trace() == reference(undisturbed).trace()


# A worker of the first life is lost before it has sealed anything.
LOST_AT_ONCE = """
import os, signal
if os.environ["RANK"] == "1" and "SLURM_RESTART_COUNT" not in os.environ:
    os.kill(os.getpid(), signal.SIGKILL)
"""


@proves(Kind.KILL_AT_START, Promise.EQUAL, victim="1")
def test_a_loss_before_the_first_seal_has_slurm_start_the_job_again(
    slurm: Slurm, data: Path, tmp_path: Path, reference: Reference
) -> None:
    """Of an allocation with the node that stands by, which would wait for the others."""
    spec = replace(SPEC, nproc=2, nodes=1, steps=10, respawn=0)
    jobs = [
        submit_shipped(
            slurm, script, spec, option, data=data, folder=tmp_path / script, before=LOST_AT_ONCE
        )
        for script, option in (("allocation.sbatch", "--nodes=2"), ("array.sbatch", "--array=0"))
    ]
    for name in (str(jobs[0].number), f"{jobs[1].number}_0"):
        assert slurm.wait_for(name, *OVER, limit_s=JOB_S) == "COMPLETED"
        assert (slurm.exit_code(name), slurm.shown(name)["Restarts"]) == (0, "1")
    for job in jobs:
        run = job.outcome()
        assert not run.orphans
        assert {event["exit_code"] for event in run.events("job_ended")} == {75, 0}
        assert run.trace() == reference(spec).trace()


@proves(Kind.WRONG_INPUT, Promise.REFUSED)
def test_bad_input_is_not_tried_again(slurm: Slurm, data: Path, tmp_path: Path) -> None:
    spec = replace(SPEC, nodes=3, script="nowhere.py")
    for script, option in (("allocation.sbatch", "--nodes=4"), ("array.sbatch", "--array=0")):
        job = submit_shipped(slurm, script, spec, option, data=data, folder=tmp_path / script)
        name = str(job.number) + ("_0" if "array" in option else "")
        assert slurm.wait_for(name, *OVER, limit_s=JOB_S) == "FAILED"
        assert (slurm.exit_code(name), slurm.shown(name)["Restarts"]) == (2, "0")
        assert "elaswave run: script 'nowhere.py' is no file" in job.output
