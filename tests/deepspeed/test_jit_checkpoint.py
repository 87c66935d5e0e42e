"""A Trainer with `enable_jit_checkpoint`: a signal has all workers save one checkpoint together."""

import os
import signal
from pathlib import Path

import pytest

from tests.deepspeed.hf_runs import checkpoints, spec_of
from tests.deepspeed.test_save import writers
from tests.faults.harness import Outcome, Zygote, started
from tests.faults.test_last_checkpoint import SAVE_S, completed_once
from tests.faults.test_signals import wait_for_step
from tests.proofs import Kind, Promise, proves

JIT = spec_of(steps=60, options=("--jit",), launcher=(f"--notice-timeout-s={SAVE_S:g}",))


@proves(Kind.ALL_LEAVE, Promise.WHOLE)
@pytest.mark.timeout(300)
def test_all_workers_of_a_trainer_save_at_sigterm(zygote: Zygote, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    with started(JIT, zygote=zygote, data=tmp_path, directory=directory) as (launcher,):
        wait_for_step(directory, 2)
        run = Outcome(spec=JIT, directory=directory, returncode=0, output="", seconds=0)
        trainers = [one["pid"] for one in run.events("worker_started")]
        # A scheduler may signal one of them alone, which is no request to the job.
        os.kill(trainers[2], signal.SIGTERM)
        wait_for_step(directory, 4)
        # To all processes of the job, as Slurm's --signal.
        for pid in trainers:
            os.kill(pid, signal.SIGTERM)
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(SAVE_S) == 128 + signal.SIGTERM
    output = (directory / "output").read_text()
    assert "Traceback" not in output
    assert "every worker was told to leave, and they write a last checkpoint first" in output
    told = Outcome(spec=JIT, directory=directory, returncode=0, output=output, seconds=0)
    done = completed_once(told)
    ((name, state),) = checkpoints(told).items()
    assert name == f"checkpoint-{done}" and state["global_step"] == done
    folder = directory / "trainer" / name
    assert writers(folder / (folder / "latest").read_text()) == 4
    # The script goes on behind train(), in every worker.
    assert output.count(f"trained {done} steps") == 4
