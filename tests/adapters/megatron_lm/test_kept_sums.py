"""Survivors of a loss in an unmodified pretrain_gpt.py go on from their own gradient sums."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.adapters.megatron_lm.conftest import Launch
from tests.adapters.megatron_lm.harness import (
    NO_EVALUATION,
    ScriptSpec,
    needs_repository,
    printed,
)
from tests.adapters.megatron_lm.test_not_finite import AGAIN, check_ended
from tests.faults.harness import check_equal
from tests.faults.test_kept_sums import check_only_missing, kept
from tests.proofs import Kind, Promise, proves

pytestmark = [needs_repository, pytest.mark.timeout(300)]

# Three micro-batches a replica; both overlaps, dropout.
SPEC = ScriptSpec(global_batch=12)


@proves(Kind.KILL, Promise.EQUAL, victim="1")
@pytest.mark.parametrize("phase", ["reduce", "optimizer"])
def test_behind_the_last_pass_nothing_is_run_twice(
    run: Launch, reference: Launch, phase: str
) -> None:
    spec = replace(SPEC, kills=(f"1@2:{phase}",))
    struck, undisturbed = run(spec), reference(spec)
    check_equal(struck, undisturbed)
    assert printed(struck) == printed(undisturbed)
    check_only_missing(struck, lost=range(1, 12, 4), in_flight=int(phase == "reduce"))


@proves(Kind.KILL, Promise.EQUAL, moment="2:backward")
@pytest.mark.parametrize("slot", [0, 3])
def test_a_pass_that_is_met_is_completed(run: Launch, reference: Launch, slot: int) -> None:
    spec = replace(SPEC, kills=(f"{slot}@2:backward",))
    struck, undisturbed = run(spec), reference(spec)
    check_equal(struck, undisturbed)
    assert printed(struck) == printed(undisturbed)
    passed = kept(struck)
    assert sorted(passed) == [(2, one) for one in range(4) if one != slot] and any(passed.values())


# In the third step the loss of these passes of a worker is no number: the first three are those
# before the loss, the fourth is the first one of the redo.
REJECTED = """
from megatron.core import rerun_state_machine as reruns
import torch
validate, passes = reruns.RerunStateMachine.validate_result, []
def found(self, result, rejection_func, message, **more):
    if self.current_iteration == 3 and rejection_func is torch.isnan and "loss" in message:
        passes.append(message)
        result = result * float("nan" if len(passes) WHICH else 1)
    return validate(self, result, rejection_func, message, **more)
reruns.RerunStateMachine.validate_result = found
"""


@proves(Kind.KILL, Promise.EQUAL, victim="1", moment="2:optimizer")
def test_a_result_of_the_redo_that_is_rejected_once(run: Launch, reference: Launch) -> None:
    """The rerun machine then judges the step as a whole, of which it has read what is missing."""
    spec = replace(SPEC, kills=("1@2:optimizer",))
    struck = run(replace(spec, sabotage=REJECTED.replace("WHICH", "== 4")))
    check_equal(struck, reference(spec))
    assert all(kept(struck).values()) and "Need to rerun step" in struck.output


@proves(Kind.KILL, Promise.SAME, victim="1", moment="2:optimizer")
def test_a_result_of_the_redo_that_is_rejected_again(run: Launch, data: Path) -> None:
    """The job ends as its script does, with a checkpoint of the steps before."""
    options = (*NO_EVALUATION, "--save-interval", "9", "--save", "{data}/rejected")
    spec = replace(SPEC, kills=("1@2:optimizer",), dump="never", options=options)
    struck = run(replace(spec, sabotage=REJECTED.replace("WHICH", "> 3")))
    assert all(kept(struck).values())
    check_ended(struck, data / "rejected", AGAIN)
