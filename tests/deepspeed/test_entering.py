"""The only worker that knows the script's loop is lost while another one enters, in an engine."""

from dataclasses import replace
from itertools import product

import pytest

from tests.deepspeed import hf_runs
from tests.deepspeed.conftest import Launch
from tests.deepspeed.harness import FP32_BOUND, EngineSpec
from tests.faults.harness import check_survived, max_relative_difference
from tests.faults.test_join import entered
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled

LOST = {"changes": ("+1@4",), "respawn": 5}
# The survivor dies before it has agreed to the view that lets the other one in, or behind that.
PHASES = ("agree", "move")
OWN = EngineSpec(nproc=2, steps=7, global_batch=4, accumulation=1)


@proves(Kind.IN_RECOVERY, Promise.CLOSE, victim="0")
@pytest.mark.parametrize(("stage", "phase"), sampled([*product([0, 2, 3], PHASES)]))
def test_the_last_that_knows_an_own_loop_is_lost(
    run: Launch, reference: Launch, stage: int, phase: str
) -> None:
    # An own loop has not come to its step yet.
    spec = replace(OWN, stage=stage, kills=("1@1:backward", f"0@3:{phase}"), **LOST)
    survived = run(spec)
    check_survived(survived)
    assert max_relative_difference(survived, reference(spec)) <= FP32_BOUND
    assert entered(survived)[0] == (1, 1)


@pytest.mark.slow
@proves(Kind.IN_RECOVERY, Promise.CLOSE, victim="0")
@pytest.mark.parametrize("phase", PHASES)
def test_the_last_that_knows_a_trainer_is_lost(run: Launch, reference: Launch, phase: str) -> None:
    """Steps, schedule and the place in its data go on."""
    spec = hf_runs.spec_of(nproc=2, steps=7, global_batch=4, accumulation=2)
    spec = replace(spec, kills=("1@1:backward", f"0@4:{phase}"), **LOST)
    survived = run(spec)
    check_survived(survived)
    undisturbed = reference(spec)
    assert max_relative_difference(survived, undisturbed) <= FP32_BOUND
    hf_runs.check_newcomer(survived, undisturbed, first=4)


# It has made the step's update, or not; another one waits to be let in behind that step.
IN_STEP = ("backward", "snapshot", "body")
WAITED = {"awaits": ((4, 1),), "respawn": 5}


@proves(Kind.RETURN_LOSS, Promise.CLOSE, victim="0")
@pytest.mark.parametrize(("stage", "phase"), sampled([*product([0, 2, 3], IN_STEP)]))
def test_the_last_in_an_own_loop_is_lost_in_a_step_while_another_waits(
    run: Launch, reference: Launch, stage: int, phase: str
) -> None:
    spec = replace(OWN, stage=stage, kills=("1@1:backward", f"0@4:{phase}"), **WAITED)
    survived = run(spec)
    check_survived(survived)
    assert max_relative_difference(survived, reference(replace(spec, awaits=()))) <= FP32_BOUND
    assert entered(survived)[0] == (1, 1)


@pytest.mark.slow
@proves(Kind.RETURN_LOSS, Promise.CLOSE, victim="0")
@pytest.mark.parametrize("phase", IN_STEP)
def test_the_last_in_a_trainer_is_lost_in_a_step_while_another_waits(
    run: Launch, reference: Launch, phase: str
) -> None:
    spec = hf_runs.spec_of(nproc=2, steps=7, global_batch=4, accumulation=2)
    spec = replace(spec, kills=("1@1:backward", f"0@4:{phase}"), **WAITED)
    survived = run(spec)
    check_survived(survived)
    undisturbed = reference(replace(spec, awaits=()))
    assert max_relative_difference(survived, undisturbed) <= FP32_BOUND
    hf_runs.check_newcomer(survived, undisturbed, first=4)
