"""The same exception in all workers, or in all of a stage, is no loss: the job ends with it."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults.conftest import Launch, Reference
from tests.faults.harness import SCRIPT, JobSpec, Outcome, check_equal

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
    """Exit code 1, one traceback, the sentences, and nobody was started again."""
    assert run.returncode == 1, run.output[-4000:]
    assert run.output.count("Traceback (most recent call last)") == 1, run.output[-4000:]
    assert all(sentence in run.output for sentence in sentences), run.output[-4000:]
    assert "no live worker remains" not in run.output
    assert {event["incarnation"] for event in run.events("worker_started")} == {0}
    assert not run.orphans


def test_the_same_exception_in_all_workers_ends_the_job(run: Launch) -> None:
    failed = run(JobSpec(sabotage=RAISE.format(slots="(0, 1, 2, 3)"), respawn=10, dump="never"))
    check_ended(failed, "the job stops: all workers failed alike in step 2: ValueError: a broken")


def test_the_same_exception_in_all_of_a_stage_ends_the_job(run: Launch, tmp_path: Path) -> None:
    text = SCRIPT.read_text()
    line = "def loss_func(mask, per_token, output):\n"
    assert text.count(line) == 1
    script = tmp_path / "train_gpt.py"
    script.write_text(text.replace(line, NINTH.lstrip()))
    failed = run(JobSpec(options=PIPELINE, script=str(script), respawn=10, dump="never"))
    said = "the job stops: all workers of stage 1 failed alike in step 2: ValueError: the ninth"
    check_ended(failed, said)


@pytest.mark.parametrize("options", [(), PIPELINE], ids=["data parallel", "pipeline"])
def test_one_worker_of_a_stage_of_two_is_lost(
    run: Launch, reference: Reference, options: tuple[str, ...]
) -> None:
    spec = JobSpec(options=options)
    broken = run(replace(spec, sabotage=RAISE.format(slots="(1,)")))
    check_equal(broken, reference(spec))
    (lost,) = [one["reason"] for one in broken.events("view_committed") if one["epoch"] == 2]
    assert "worker 1 (node 0) exited: exit code 1, ValueError: a broken sample (" in lost


def test_a_worker_that_failed_alone_is_started_again_later(
    run: Launch, reference: Reference
) -> None:
    """Not before the others are past the step: they might have failed alike."""
    spec = JobSpec(steps=9)
    waits = replace(spec, respawn=10, awaits=((6, 1),), sabotage=RAISE.format(slots="(1,)"))
    broken = run(waits)
    check_equal(broken, reference(spec))
    assert len(broken.events("worker_ready")) == 1
