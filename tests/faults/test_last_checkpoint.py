"""Every worker is told to leave: a last checkpoint is written first, and nothing is done twice."""

import signal
from dataclasses import replace
from pathlib import Path

import pytest

from elaswave_plugin.observer.run import read_run
from tests.faults import own_scripts
from tests.faults.conftest import Launch, Reference
from tests.faults.harness import JobSpec, Outcome, Zygote, left_alive, pids_of, started
from tests.faults.test_outside_a_step import saved_tensors
from tests.faults.test_signals import wait_for_step
from tests.proofs import Kind, Promise, proves

# Megatron-Core's first save imports torch in a process of its own, on two cores that others share.
SAVE_S = 90.0
END = '\n\nif __name__ == "__main__":\n'
# What scripts do at the end of their training.
FINAL = """    print_rank_0(f"final {job.evaluate(evaluate):.6f}")
    job.run(save, phase="save")
"""
LONG = JobSpec(steps=60, dump="last", launcher=(f"--notice-timeout-s={SAVE_S:g}",))


def told_to_end(spec: JobSpec, *, zygote: Zygote, data: Path, directory: Path) -> Outcome:
    """The job, whose launcher is told to end in the middle of it."""
    with started(spec, zygote=zygote, data=data, directory=directory) as (launcher,):
        wait_for_step(directory, 3)
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(SAVE_S) == 128 + signal.SIGTERM
    output = (directory / "output").read_text()
    assert left_alive(pids_of(directory), limit_s=0.0) == ()
    assert "Traceback" not in output
    assert "every worker was told to leave, and they write a last checkpoint first" in output
    return Outcome(spec=spec, directory=directory, returncode=0, output=output, seconds=0)


def completed_once(run: Outcome) -> int:
    """The steps of a run, of which none was computed twice."""
    files = read_run(run.directory)
    attempts = {(line["step"], line["epoch"]) for line in files.ledger}
    done = 1 + max(record["step"] for record in files.steps)
    assert len(attempts) == done < run.spec.steps
    return done


def check_saved(run: Launch, folder: Path, done: int) -> None:
    """Check that a job saved to "told" what it saves when its interval says so."""
    assert (folder / "told" / "latest_checkpointed_iteration.txt").read_text() == str(done)
    options = (f"--save={folder / 'undisturbed'}", f"--save-interval={done}")
    undisturbed = run(replace(LONG, options=options))
    assert undisturbed.returncode == 0, undisturbed.output[-4000:]
    left, right = (
        saved_tensors(folder / name / f"iter_{done:07d}") for name in ("told", "undisturbed")
    )
    assert len(left) > 20 and left.keys() == right.keys()
    assert all(left[name].equal(right[name]) for name in left)


@proves(Kind.ALL_LEAVE, Promise.WHOLE)
def test_a_loop_of_ours_calls_the_function_that_it_was_given(
    run: Launch, zygote: Zygote, data: Path, tmp_path: Path, reference: Reference
) -> None:
    script = own_scripts.write(tmp_path, (END, FINAL + END))
    spec = replace(LONG, script=script, options=(f"--save={tmp_path / 'told'}",))
    told = told_to_end(spec, zygote=zygote, data=data, directory=tmp_path / "run")
    done = completed_once(told)
    check_saved(run, tmp_path, done)
    for phase in ("evaluation", "save"):
        left_out = f"the job has ended with its last checkpoint, and left out: {phase}"
        assert told.output.count(left_out) == 1


# One dies as it is told to leave, before all of them learn that they all have to.
DIE_TOLD = """
import os, signal
from elaswave_plugin.trainer.member import Member
take = Member._on_frame
def die(self, frame):
    if frame["t"] == "notice" and self.slot == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    take(self, frame)
Member._on_frame = die
"""


@proves(Kind.ALL_LEAVE, Promise.WHOLE)
@pytest.mark.slow
def test_one_that_dies_when_all_are_told_takes_nothing_away(
    run: Launch, zygote: Zygote, data: Path, tmp_path: Path
) -> None:
    spec = replace(LONG, options=(f"--save={tmp_path / 'told'}",), sabotage=DIE_TOLD)
    told = told_to_end(spec, zygote=zygote, data=data, directory=tmp_path / "run")
    assert {e["slot"] for e in told.events("worker_exited") if "SIGKILL" in e["status"]} == {2}
    done = 1 + max(record["step"] for record in told.files.steps)
    check_saved(run, tmp_path, done)


@proves(Kind.WRONG_INPUT, Promise.REFUSED)
def test_a_folder_for_it_is_for_deepspeed(run: Launch) -> None:
    refused = run(JobSpec(options=("--elaswave-last-checkpoint-dir=last",)))
    assert refused.returncode == 2
    assert "last_checkpoint_dir is 'last', which is for DeepSpeed; leave it out" in refused.output
