"""Loops as DeepSpeed's users write them: all survivors lose the same batches, or it is refused."""

import json
from dataclasses import replace

import pytest

from tests.deepspeed.conftest import Launch
from tests.deepspeed.harness import SCRIPTS, EngineSpec
from tests.faults.harness import Outcome
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled

OWN_CALLS = EngineSpec(script=str(SCRIPTS / "own_calls.py"), nproc=3, global_batch=6, steps=6)


@proves(Kind.WRONG_SCRIPT, Promise.REFUSED)
@pytest.mark.parametrize(
    ("what", "stage", "named"),
    [
        ("no_sync", 1, "engine.no_sync() was called"),
        ("coalesce", 1, "engine.coalesce_grad_reduction() was called"),
        ("compiled_autograd", 2, "engine.compile was called with compiled_autograd_enabled=True"),
        ("model", 1, "the model was called (its Embedding), and not by engine(batch)"),
        ("model", 3, "and not by engine(batch)"),
        ("second", 1, "deepspeed.initialize was called a second time"),
        ("gan", 1, "deepspeed.initialize was called a second time"),
        ("unbound", 0, "an optimizer that is not bound (SGD) steps in this job"),
        ("unbound", 2, "an optimizer that is not bound (SGD) steps in this job"),
        ("mean", 1, "elaswave_plugin.deepspeed.mean is called between two steps"),
        ("twin", 1, "deepspeed.initialize was called a second time"),
    ],
)
def test_what_nobody_could_redo_is_refused_at_its_first_use(
    run: Launch, what: str, stage: int, named: str
) -> None:
    alone = replace(OWN_CALLS, nproc=1, global_batch=2)
    refused = run(replace(alone, stage=stage, options=(f"--what={what}",)))
    assert refused.returncode == 2, refused.output[-4000:]
    assert sum(named in line for line in refused.output.splitlines()) == 1
    assert "Traceback" not in refused.output
    assert not refused.orphans
    # Before anybody joins there is not even a file of steps.
    assert what == "twin" or not refused.files.steps


@proves(Kind.KILL, Promise.PLANNED)
@pytest.mark.parametrize("stage", sampled([0, 2]))
def test_an_optimizer_that_the_engines_drives_is_a_part_of_it(run: Launch, stage: int) -> None:
    done = run(replace(OWN_CALLS, stage=stage, options=("--what=nested",)))
    assert done.returncode == 0 and not done.orphans, done.output[-4000:]
    assert [one["steps"] for one in found(done)] == 3 * [OWN_CALLS.steps]


# Some survivors have had the first batch of step 3 when a worker dies, and others ask for it: the
# worker of slot 0 looks on from there, until the victim, which has had it, is dead.
APART = """
import os, signal, time
from elaswave_plugin.adapters.deepspeed.engine.job import EngineJob
serve, done = EngineJob._serve, []
def serve_apart(self, loader, step, iteration):
    worker = self._worker
    if (step, iteration) == (3, 0) and worker.view.epoch == 1 and worker.slot == 0:
        deadline_s = time.monotonic() + 30
        while True:
            worker.member.check()
            assert time.monotonic() < deadline_s, "nobody died"
            time.sleep(0.005)
    batch = serve(self, loader, step, iteration)
    if (step, iteration) == (3, {iteration}) and worker.view.epoch == 1 and worker.slot == 2:
        time.sleep(0.3)  # nothing is waited for: slot 1 is to have the batch as well by then
        worker.events.emit("died_apart", slot=2)
        os.kill(os.getpid(), signal.SIGKILL)
    return batch
EngineJob._serve = serve_apart
"""


def found(run: Outcome) -> list[dict[str, int]]:
    return [json.loads(path.read_text()) for path in sorted(run.directory.glob("own-calls-*"))]


@proves(Kind.KILL, Promise.PLANNED)
@pytest.mark.parametrize("what", ["next", "enumerate"])
@pytest.mark.parametrize(("stage", "iteration"), sampled([(1, 0), (1, 1), (2, 0), (0, 1)]))
def test_survivors_on_both_sides_of_a_step_lose_the_same_batches(
    run: Launch, reference: Launch, what: str, stage: int, iteration: int
) -> None:
    spec = replace(OWN_CALLS, stage=stage, options=(f"--what={what}",), dump="never")
    killed = run(replace(spec, sabotage=APART.format(iteration=iteration)))
    assert killed.events("died_apart"), killed.output[-4000:]
    steps = [record["step"] for record in killed.files.steps if record["slot"] == 0]
    assert killed.returncode == 0 and not killed.orphans, killed.output[-4000:]
    both = found(killed)
    assert len(both) == 2 and both[0] == both[1], both
    assert both[0]["seen"] == 12 and both[0]["applied"] == both[0]["steps"] == len(set(steps))
    assert both[0]["steps"] == spec.steps - 1
    whole = reference(spec).files
    losses = {record["step"]: record["loss"] for record in whole.steps}
    for record in killed.files.steps:
        assert record["loss"] == pytest.approx(losses[record["step"]], rel=1e-6)
