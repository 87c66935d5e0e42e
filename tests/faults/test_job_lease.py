"""A job that cannot renew its lease in the folder of its name trains no further, and goes on."""

import fcntl
import time
from dataclasses import replace
from pathlib import Path

import pytest

from elaswave_plugin.core.agreement.founding import LEASE_S
from elaswave_plugin.tracking.events import STEPS_FILE
from tests.faults.conftest import Reference
from tests.faults.harness import JobSpec, Outcome, Zygote, started
from tests.proofs import Kind, Promise, proves

# Steps of a tenth of a second, so that the job outlasts its lease.
SLOWLY = """
import time
from elaswave_plugin.loops.guarded_steps import GuardedSteps
begin = GuardedSteps.begin
def begin_later(self):
    time.sleep(0.1)
    begin(self)
GuardedSteps.begin = begin_later
"""
SPEC = JobSpec(nproc=2, steps=150, dump="last")
LIMIT_S = 120.0


def lines(directory: Path) -> int:
    """The lines of steps that were logged so far, by all workers."""
    path = directory / STEPS_FILE
    return path.read_bytes().count(b"\n") if path.exists() else 0


@proves(Kind.DISK, Promise.EQUAL)
@pytest.mark.timeout(300)
def test_it_waits_while_the_record_is_locked_and_then_goes_on(
    zygote: Zygote, data: Path, tmp_path: Path, reference: Reference
) -> None:
    shared, directory = tmp_path / "shared", tmp_path / "run"
    spec = replace(SPEC, launcher=(f"--rdzv-dir={shared}", "--rdzv-id=fox"), sabotage=SLOWLY)
    began_s = time.monotonic()
    with started(spec, zygote=zygote, data=data, directory=directory) as (launcher,):
        while lines(directory) < 40:
            assert time.monotonic() < began_s + LIMIT_S, (directory / "output").read_text()
            time.sleep(0.01)
        with open(shared / "fox" / "lock", "r+b") as lock:
            fcntl.lockf(lock, fcntl.LOCK_EX)
            # What was begun before the lease ran out may still be finished.
            time.sleep(LEASE_S + 1.0)
            still = lines(directory)
            time.sleep(3.0)
            assert lines(directory) == still < SPEC.steps * SPEC.nproc
        code = launcher.wait(timeout=LIMIT_S)
    held = Outcome(
        spec=spec,
        directory=directory,
        returncode=code,
        output=(directory / "output").read_text(),
        seconds=time.monotonic() - began_s,
    )
    assert code == 0, held.output
    assert "cannot be renewed" in held.output
    assert "is renewed again" in held.output
    assert not held.events("hang_found")
    assert held.trace() == reference(SPEC).trace()
