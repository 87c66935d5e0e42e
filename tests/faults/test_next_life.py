"""The next life of a job, started in the same folder, goes on as if nothing had happened."""

from dataclasses import replace
from pathlib import Path

import pytest

from elaswave_plugin.errors import EXIT_REQUEUE
from tests.faults import own_scripts
from tests.faults.conftest import Reference
from tests.faults.harness import JobSpec, Zygote, launch
from tests.faults.test_last_checkpoint import LONG, completed_once, told_to_end
from tests.proofs import Kind, Promise, proves

# Under a real Slurm: tests/schedulers/test_allocation.py.
pytestmark = pytest.mark.timeout(240)


@proves(Kind.ALL_LEAVE, Promise.EQUAL)
def test_after_all_were_told_to_leave_it_begins_at_their_checkpoint(
    zygote: Zygote, data: Path, tmp_path: Path, reference: Reference
) -> None:
    folder, saved = tmp_path / "run", tmp_path / "saved"
    script = own_scripts.write(tmp_path, *own_scripts.goes_on(saved))
    spec = replace(LONG, options=(f"--save={saved}",), script=script)
    told = told_to_end(spec, zygote=zygote, data=data, directory=folder)
    done, before = completed_once(told), len(told.files.steps)
    assert (saved / "latest_checkpointed_iteration.txt").read_text() == str(done)
    again = launch(spec, zygote=zygote, data=data, directory=folder)
    assert again.returncode == 0, again.output[-4000:]
    assert not again.orphans
    assert min(line["step"] for line in again.files.steps[before:]) == done
    assert again.trace() == reference(replace(LONG, launcher=())).trace()


@proves(Kind.KILL_AT_START, Promise.EQUAL, victim="1", moment="0:startup")
def test_after_a_loss_before_the_first_seal_it_begins_anew(
    zygote: Zygote, data: Path, tmp_path: Path, reference: Reference
) -> None:
    spec = JobSpec(kills=("1@0:startup",))
    stopped = launch(spec, zygote=zygote, data=data, directory=tmp_path)
    assert stopped.returncode == EXIT_REQUEUE
    assert [event["slot"] for event in stopped.events("fault_fired")] == [1]
    again = launch(replace(spec, kills=()), zygote=zygote, data=data, directory=tmp_path)
    assert again.returncode == 0, again.output[-4000:]
    assert not again.orphans
    assert again.trace() == reference(spec).trace()
