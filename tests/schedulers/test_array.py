"""The shipped array job: Slurm starts the task of a lost node again, and that node joins."""

import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from elaswave_plugin.tracking.events import EVENTS_FILE, STEPS_FILE, read_lines
from tests.faults.conftest import Reference
from tests.faults.harness import ROOT, SABOTAGED, JobSpec, Outcome, left_alive, pids_of
from tests.proofs import Kind, Promise, proves
from tests.schedulers.batch import JOB_S
from tests.schedulers.slurm import OVER, Slurm
from tests.schedulers.test_slurm import HOLD

pytestmark = pytest.mark.timeout(400)
ARRAY = ROOT / "examples" / "slurm" / "array.sbatch"
SPEC = JobSpec(nproc=4, nodes=2, steps=80, dump="last", respawn=1)
WAIT_S = 100.0


def wait(reached: Callable[[], bool], what: str, folder: Path) -> None:
    """Wait for something that only files show."""
    deadline_s = time.monotonic() + WAIT_S
    while not reached():
        output = folder / "output"
        said = output.read_text()[-4000:] if output.exists() else ""
        assert time.monotonic() < deadline_s, f"no {what}: {said}"
        time.sleep(0.05)


@proves(Kind.NODE_RETURN, Promise.EQUAL)
def test_slurm_brings_a_lost_node_back_and_it_joins(
    slurm: Slurm, data: Path, tmp_path: Path, reference: Reference
) -> None:
    go_on = tmp_path / "go_on"
    hold = HOLD.format(step=SPEC.steps - 20, path=str(go_on))
    program = [str(SABOTAGED), hold, SPEC.script]
    directory = tmp_path / "run"
    array = slurm.submit_array(
        ARRAY,
        *program,
        *SPEC.arguments(data, directory),
        tasks=2,
        folder=tmp_path,
        env={
            "NNODES": "2",
            "NPROC_PER_NODE": "2",
            "RUN_DIR": str(directory),
            "OMP_NUM_THREADS": "1",
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        },
    )
    wait(lambda: len(events(directory, "worker_started")) == 4, "workers", tmp_path)
    wait(lambda: steps_of(directory) >= 3, "step 3", tmp_path)
    task = task_of(directory, node=1)
    lost = slurm.shown(f"{array}_{task}")["NodeList"]
    slurm.lose_node(lost)
    try:
        # Slurm sees the loss, puts the task back into the queue, and starts it on a free node.
        wait(lambda: len(came_back(directory)) == 2, "workers that are back", tmp_path)
        go_on.touch()
        for number in range(2):
            name = f"{array}_{number}"
            assert slurm.wait_for(name, *OVER, limit_s=JOB_S) == "COMPLETED"
        again = slurm.shown(f"{array}_{task}")
    finally:
        slurm.bring_back(lost)
    assert (again["Restarts"], slurm.exit_code(f"{array}_{task}")) == ("1", 0)
    assert again["NodeList"] != lost
    run = Outcome(
        spec=SPEC,
        directory=directory,
        returncode=0,
        output=(tmp_path / "output").read_text(),
        seconds=0.0,
        orphans=left_alive(pids_of(directory), limit_s=10.0),
    )
    assert not run.orphans
    ranks = [view["ranks"] for view in run.events("view_committed")]
    assert ranks[:2] == [[0, 1, 2, 3], [0, 1]] and ranks[-1] == [0, 1, 2, 3]
    assert run.trace() == reference(replace(SPEC, nodes=1, respawn=0)).trace()


def events(directory: Path, kind: str) -> list[dict[str, object]]:
    """The events of a kind so far."""
    return [one for one in read_lines(directory / EVENTS_FILE) if one["kind"] == kind]


def steps_of(directory: Path) -> int:
    """The last step that some worker has completed; -1: none."""
    return max((line["step"] for line in read_lines(directory / STEPS_FILE)), default=-1)


def task_of(directory: Path, *, node: int) -> str:
    """The number of the array task that has begun a node."""
    (begun,) = [one for one in events(directory, "job_started") if one["node"] == node]
    environment = psutil.Process(int(str(begun["launcher_pid"]))).environ()
    return str(environment["SLURM_ARRAY_TASK_ID"])


def came_back(directory: Path) -> list[dict[str, object]]:
    """The workers that are built, and wait to be let in."""
    return [one for one in events(directory, "worker_ready") if one["incarnation"]]
