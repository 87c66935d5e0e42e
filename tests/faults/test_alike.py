"""The same exception in all workers, or in all of a stage, is no loss: the job ends with it."""

from dataclasses import replace
from pathlib import Path

import pytest

from elaswave_plugin.config import parse_kill
from tests.faults.conftest import Launch, Reference
from tests.faults.harness import SCRIPT, JobSpec, Outcome, check_equal
from tests.proofs import Kind, Promise, proves

PIPELINE = ("--pipeline-model-parallel-size=2",)
# 8 micro-batches over two replicas: the ninth loss of a worker is in step 2.
NINTH = """
CALLS = []


def loss_func(mask, per_token, output):
    CALLS.append(mask)
    if len(CALLS) == 9:
        raise ValueError("the ninth loss")
"""
RAISE = """
from elaswave_plugin.adapters.megatron.microbatches import Microbatches
consume = Microbatches.consume
def fail(self, step, microbatch, ids):
    if step == 2 and self._worker.slot in {slots}:
        raise ValueError("a broken sample")
    consume(self, step, microbatch, ids)
Microbatches.consume = fail
"""


def check_ended(run: Outcome, *sentences: str) -> None:
    """Exit code 1, one traceback, the sentences, and nobody who failed was started again."""
    assert run.returncode == 1, run.output[-4000:]
    assert run.output.count("Traceback (most recent call last)") == 1, run.output[-4000:]
    assert all(sentence in run.output for sentence in sentences), run.output[-4000:]
    assert "no live worker remains" not in run.output
    again = {event["slot"] for event in run.events("worker_started") if event["incarnation"]}
    assert again <= {parse_kill(kill).slot for kill in run.spec.kills}
    assert not run.orphans


@proves(Kind.RAISE, Promise.STOPS)
def test_the_same_exception_in_all_workers_ends_the_job(run: Launch) -> None:
    failed = run(JobSpec(sabotage=RAISE.format(slots="(0, 1, 2, 3)"), respawn=10, dump="never"))
    check_ended(failed, "the job stops: all workers failed alike in step 2: ValueError: a broken")


@proves(Kind.RAISE, Promise.STOPS)
def test_the_same_exception_in_all_of_a_stage_ends_the_job(run: Launch, tmp_path: Path) -> None:
    text = SCRIPT.read_text()
    line = "def loss_func(mask, per_token, output):\n"
    assert text.count(line) == 1
    script = tmp_path / "train_gpt.py"
    script.write_text(text.replace(line, NINTH.lstrip()))
    # The script counts passes, of which a first step that is run twice has twice as many.
    options = (*PIPELINE, "--elaswave-rehearse-first-step=off")
    failed = run(JobSpec(options=options, script=str(script), respawn=10, dump="never"))
    said = "the job stops: all workers of stage 1 failed alike in step 2: ValueError: the ninth"
    check_ended(failed, said)


@proves(Kind.RAISE, Promise.EQUAL)
@pytest.mark.parametrize("options", [(), PIPELINE], ids=["data parallel", "pipeline"])
def test_one_worker_of_a_stage_of_two_is_lost(
    run: Launch, reference: Reference, options: tuple[str, ...]
) -> None:
    spec = JobSpec(options=options)
    broken = run(replace(spec, sabotage=RAISE.format(slots="(1,)"), failing=(1,)))
    check_equal(broken, reference(spec))
    (lost,) = [one["reason"] for one in broken.events("view_committed") if one["epoch"] == 2]
    assert "worker 1 (node 0) exited: exit code 1, ValueError: a broken sample (" in lost


BEFORE = "    last = save if args.save else None\n"
# A script's own barrier between two verbs before training, where none makes it again.
BARRIER = """\
    job.evaluate(evaluate)
    open(f"outside-{torch.distributed.get_rank()}", "w").close()
    torch.distributed.barrier()
"""
# The victim dies on its way into it, once both others are there.
DIES = """
import glob, os, signal, time
import torch.distributed as dist
from elaswave_plugin.loops.call_log import CallLog
start, barrier, loops = CallLog.start, dist.barrier, []
def started(self):
    start(self)
    loops.append(self)
def dying(*args, **kwargs):
    if loops and loops[0].worker.slot == 1 and os.path.exists("outside-1"):
        deadline_s = time.monotonic() + 60
        while len(glob.glob("outside-*")) < 3:
            assert time.monotonic() < deadline_s, "the others are not in the barrier"
            time.sleep(0.005)
        loops[0].worker.events.emit("died_before_training")
        os.kill(os.getpid(), signal.SIGKILL)
    return barrier(*args, **kwargs)
CallLog.start, dist.barrier = started, dying
"""


@proves(Kind.RAISE, Promise.STOPS)
def test_a_collective_that_nobody_makes_again_is_named(run: Launch, tmp_path: Path) -> None:
    """It waits for a worker that dies; all that are left fail there, where no verb redoes it."""
    text = SCRIPT.read_text()
    assert text.count(BEFORE) == 1
    script = tmp_path / "train_gpt.py"
    script.write_text(text.replace(BEFORE, BARRIER + BEFORE))
    spec = JobSpec(nproc=3, global_batch=6, sabotage=DIES, dump="never")
    failed = run(replace(spec, script=str(script), respawn=10))
    assert failed.events("died_before_training")
    check_ended(
        failed,
        "all workers that were left failed alike before the first step: EpochChanged: the workers",
        "during a call that is not made again: have the job's run() call what makes it",
    )


# The others take longer over the step than a lost worker is to wait for its successor.
SLOW_REDO = """
import time
raising = Microbatches.consume
def slowly(self, step, microbatch, ids):
    if (step, self._worker.view.epoch) == (2, 2):
        time.sleep(0.7)
    raising(self, step, microbatch, ids)
Microbatches.consume = slowly
"""


@proves(Kind.RAISE, Promise.EQUAL)
def test_a_worker_that_failed_alone_is_started_again_once_the_others_are_past_that_step(
    run: Launch, reference: Reference
) -> None:
    """Before that they might still fail alike."""
    spec = JobSpec(steps=9)
    sabotage = RAISE.format(slots="(1,)") + SLOW_REDO
    failing = {"sabotage": sabotage, "failing": (1,)}
    broken = run(replace(spec, respawn=10, awaits=((6, 1),), **failing))
    check_equal(broken, reference(spec))
    (again,) = [e for e in broken.events("worker_started") if e["incarnation"] == 1]
    redone = [record for record in broken.files.steps if record["step"] == 2]
    assert len(redone) == 3
    assert again["time_s"] > max(record["time_s"] for record in redone)
