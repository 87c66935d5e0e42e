"""Slurm tells a job to end, in each of its ways: what becomes of the job."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults.test_last_checkpoint import SAVE_S
from tests.faults.test_told import Wanted, check, spec_of
from tests.faults.test_told import wanted as wanted
from tests.faults.told import BATCH, SLURM_CASES, TASKS, Becomes, Case
from tests.proofs import Kind, Promise, proves
from tests.schedulers import batch
from tests.schedulers.slurm import Slurm
from tests.schedulers.test_slurm import wait_for_step

# Slurm looks for jobs whose time is nearly over every 30 s.
LIMIT_S = 150.0


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    """Two nodes on this host; who is cancelled has the time that a last checkpoint takes."""
    with Slurm(nodes=2, kill_wait_s=int(SAVE_S)) as running:
        yield running


def tell(case: Case, slurm: Slurm, job: int) -> None:
    """Say it to the job, or have Slurm say it."""
    if case.told.startswith("#SBATCH"):
        # It has one to two minutes more, and the signal is due 119 s before its end.
        slurm.allow(job, minutes=2 + slurm.minutes(job))
    else:
        slurm.cancel(job, *case.told.split()[1:])


@proves(Kind.ALL_LEAVE, Promise.WHOLE)
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("case", SLURM_CASES, ids=lambda case: case.name)
def test_slurm_tells_a_job_to_end(
    case: Case, slurm: Slurm, data: Path, tmp_path: Path, wanted: Wanted
) -> None:
    go_on = tmp_path / "told"
    spec = replace(spec_of(case, tmp_path), nodes=1 if case.launcher == BATCH else 2)
    options = [case.told.split()[1].replace("@S", "@119")] if "#" in case.told else []
    job = batch.submit(
        slurm,
        replace(spec, sabotage=""),
        data=data,
        directory=tmp_path / "run",
        by=batch.TASKS if case.launcher == TASKS else batch.LAUNCHERS,
        options=("--time=30", *options),
        start="" if case.launcher == BATCH else "srun",
        before=batch.hold({6: go_on}, told=go_on),
    )
    wait_for_step(slurm, job, 5)
    tell(case, slurm, job.number)
    if case.becomes is Becomes.UNHEARD:
        go_on.touch()
        wait_for_step(slurm, job, 20)
        slurm.cancel(job.number)
        return
    run = job.outcome(slurm, LIMIT_S)
    assert not run.orphans
    check(case, run, tmp_path, run.returncode, wanted)
    code = 138 if "USR1" in case.told else 143
    assert run.returncode == (137 if case.becomes is Becomes.KILLED else code)
