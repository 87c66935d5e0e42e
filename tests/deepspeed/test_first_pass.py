"""A worker that comes back knows what a first forward pass leaves in a model, or is sent away.

The model of scripts/external.py has `nn.MultiheadAttention`, a tied embedding, a registered
external parameter, and a table that its first pass makes.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from elaswave_plugin.observer.observer import audit_samples, disagreeing_steps
from tests.deepspeed.conftest import Launch, Twin
from tests.deepspeed.harness import FP32_BOUND, SCRIPTS, EngineSpec, check_recovered
from tests.deepspeed.test_join import entered
from tests.faults.harness import Outcome, check_survived, max_relative_difference
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled

BACK = 5
EXTERNAL = EngineSpec(
    script=str(SCRIPTS / "external.py"), stage=3, nproc=3, global_batch=12, steps=8
)
RETURN = replace(EXTERNAL, respawn=5, kills=("1@2:backward",), changes=(f"+1@{BACK}",))
# Worker 1 is lost when worker 0 has found the first external parameter and worker 2 has not.
ONE_HAS_FOUND_IT = """
import time
from pathlib import Path
from deepspeed.runtime.zero import parameter_offload
from elaswave_plugin.adapters.deepspeed.engine.job import EngineJob
attached, register, jobs, mark = (
    EngineJob._attached, parameter_offload.register_external_parameter, [], Path({mark!r})
)
def keep(self):
    jobs.append(self)
    attached(self)
def found(module, param):
    parameter_offload.register_external_parameter = register
    worker = jobs[0]._worker
    deadline_s = time.monotonic() + 60
    while worker.slot and time.monotonic() < deadline_s:
        if mark.exists():
            worker.phases.fire("gather")
        worker.member.check()
        time.sleep(0.001)
    register(module, param)
    mark.touch()
EngineJob._attached, parameter_offload.register_external_parameter = keep, found
"""
# One that comes later takes part in the exchange, and takes nothing from it.
LEARNS_NOTHING = """
import os
from elaswave_plugin.adapters.deepspeed.zero import zero3
from elaswave_plugin.values.plain import gathered
if os.environ["ELASWAVE_INCARNATION"] != "0":
    zero3.agree_on_external = lambda model: gathered([])
"""


@proves(Kind.RETURN, Promise.PLANNED)
@pytest.mark.parametrize(("stage", "options"), sampled([(3, ()), (3, ("--evaluate",)), (1, ())]))
def test_who_comes_back_has_what_the_first_pass_of_the_others_has_left(
    run: Launch, twin: Twin, reference: Launch, stage: int, options: tuple[str, ...]
) -> None:
    """Also where it has evaluated, before it came to the others."""
    spec = replace(RETURN, stage=stage, options=options)
    killed = run(spec)
    check_recovered(killed, twin=twin(killed), reference=reference(spec))
    assert entered(killed) == [(1, 1, BACK)]
    assert killed.output.count("evaluated:") == 4 * len(options)


@proves(Kind.KILL, Promise.PLANNED, victim="1", moment="0:gather")
def test_a_loss_in_the_first_pass_leaves_all_with_the_same(
    run: Launch, reference: Launch, tmp_path: Path
) -> None:
    sabotage = ONE_HAS_FOUND_IT.format(mark=str(tmp_path / "found"))
    killed = run(replace(EXTERNAL, kills=("1@0:gather",), sabotage=sabotage))
    check_survived(killed)
    assert (tmp_path / "found").exists()
    assert max_relative_difference(killed, reference(EXTERNAL)) <= FP32_BOUND


def check_sent_away(run: Outcome, reason: str) -> None:
    """Worker 1 came back once, said why it does not fit, and the others have trained on."""
    assert run.returncode == 0, run.output[-4000:]
    ranks = [sorted(event["ranks"]) for event in run.events("view_committed")]
    assert ranks == [[0, 1, 2], [0, 2], [0, 1, 2], [0, 2]]
    assert run.output.count(f"worker 1, started again: {reason}") == 1
    assert not disagreeing_steps(run.files)
    assert audit_samples(run.files, batches=run.spec.batches) == (0, 0)
    assert len(run.trace()) == run.spec.steps


@proves(Kind.RETURN, Promise.SENT_AWAY)
def test_who_comes_back_to_another_model_is_sent_away_and_the_job_goes_on(run: Launch) -> None:
    """The first pass of the others has made a module, which no newcomer can be given."""
    killed = run(replace(RETURN, options=("--late",), changes=(), awaits=((BACK, 1),)))
    check_sent_away(killed, "this worker's model has no module 'places.norm' of kind LayerNorm")


@proves(Kind.RETURN, Promise.SENT_AWAY)
def test_who_does_in_its_first_step_what_the_others_do_not_is_sent_away(
    run: Launch, reference: Launch
) -> None:
    """For any cause; all of them ended by it before."""
    more = {"changes": (), "awaits": ((BACK, 1),), "sabotage": LEARNS_NOTHING}
    killed = run(replace(RETURN, **more))  # type: ignore[arg-type]
    check_sent_away(killed, "this worker came later and does not do in its first step what the")
    assert max_relative_difference(killed, reference(EXTERNAL)) <= FP32_BOUND
