"""A job that is stopped as a whole and continued, as Slurm does, goes on as if nothing had been."""

import itertools
import os
import signal
import time
from pathlib import Path

import pytest

from tests.faults.conftest import Reference
from tests.faults.harness import (
    JobSpec,
    Outcome,
    Zygote,
    check_equal,
    processes_of,
    started,
)
from tests.faults.test_signals import LIMIT_S, wait_for_step
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled

SPEC = JobSpec(nproc=4, nodes=4, steps=20, dump="last")
# Longer than a hang may take, and than an agent may be silent.
SUSPENDED_S = 5.0


@proves(Kind.SUSPEND, Promise.EQUAL)
@pytest.mark.parametrize("everything", sampled([(False,), (True,)]), ids=["trainers", "all"])
def test_a_suspended_job_goes_on_with_everyone(
    zygote: Zygote, data: Path, tmp_path: Path, reference: Reference, everything: bool
) -> None:
    with started(SPEC, zygote=zygote, data=data, directory=tmp_path) as launchers:
        wait_for_step(tmp_path, 3)
        of_nodes = [processes_of(tmp_path, node=node) for node in range(4)]
        pids = [pid for some in of_nodes for pid in (some if everything else some[2:])]
        assert len(pids) == (12 if everything else 4)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(SUSPENDED_S)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        codes = [launcher.wait(LIMIT_S * 2) for launcher in launchers]
    output = (tmp_path / "output").read_text()
    assert codes == [0, 0, 0, 0], output[-3000:]
    run = Outcome(spec=SPEC, directory=tmp_path, returncode=0, output=output, seconds=0)
    check_equal(run, reference(SPEC))
    assert len(run.events("view_committed")) == 1
    assert not run.events("hang_found")
    # It was suspended in the middle of training.
    times = sorted(record["time_s"] for record in run.files.steps)
    assert max(b - a for a, b in itertools.pairwise(times)) > SUSPENDED_S / 2
