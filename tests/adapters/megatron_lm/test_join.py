"""A lost worker of an unmodified pretrain_gpt.py comes back, as if it had never gone."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.adapters.megatron_lm.conftest import Launch
from tests.adapters.megatron_lm.harness import (
    EVALUATION,
    NO_EVALUATION,
    TP2_PP2,
    ScriptSpec,
    needs_repository,
    printed,
)
from tests.adapters.megatron_lm.test_pieces import check_checkpoints
from tests.faults.harness import Outcome, check_equal, failed_by_themselves
from tests.faults.test_join import IN_TURN
from tests.proofs import Kind, Promise, proves

pytestmark = [needs_repository, pytest.mark.timeout(300)]

# Lines of the log after 4 and 8 steps: the second averages over steps before and after the return.
EVERY_FOURTH = ("--log-interval", "4")
BACK = ScriptSpec(steps=9, dump="last", respawn=10, awaits=((5, 1),))
BACK_IN_TP2_PP2_DP2 = replace(BACK, nproc=8, options=(*NO_EVALUATION, *TP2_PP2))


def check_back(run: Launch, reference: Launch, spec: ScriptSpec, slot: int) -> Outcome:
    """The worker of this slot comes back, and every number is that of the undisturbed run."""
    whole, undisturbed = run(spec), reference(spec)
    check_equal(whole, undisturbed)
    assert printed(whole) == printed(undisturbed)
    assert [(event["slot"], event["incarnation"]) for event in whole.events("entered")] == [
        (slot, 1)
    ]
    assert whole.events("view_committed")[-1]["ranks"] == list(range(spec.nproc))
    assert "Traceback" not in whole.output
    return whole


def saving(name: str) -> ScriptSpec:
    """A run that evaluates after 3, 6 and 9 steps, and saves after 4, 8 and 9."""
    options = (*EVALUATION, *EVERY_FOURTH, "--save", "{data}/" + name)
    return replace(BACK, options=(*options, "--save-interval", "4"))


@proves(Kind.RETURN, Promise.EQUAL)
@pytest.mark.parametrize(
    "slot", [0, *(pytest.param(slot, marks=pytest.mark.slow) for slot in (1, 2, 3))]
)
def test_a_lost_worker_comes_back(run: Launch, reference: Launch, data: Path, slot: int) -> None:
    """Evaluations, saves, the log's averages and the end are those of a loop without a loss."""

    def undisturbed(spec: ScriptSpec) -> Outcome:
        return reference(saving("whole"))

    spec = replace(saving(f"back{slot}"), kills=(f"{slot}@3:backward",))
    check_back(run, undisturbed, spec, slot)
    check_checkpoints(data, f"back{slot}", "whole", 4, 8, 9)


@proves(Kind.RETURN_LOSS, Promise.EQUAL, victim="0 1", moment="1:backward 4:forward")
def test_who_has_come_back_is_interrupted_in_its_first_step(run: Launch, reference: Launch) -> None:
    """It goes back to what the others told it of Megatron-LM's rerun machine."""
    # One return is awaited: the second one who is lost asks for none.
    spec = ScriptSpec(nproc=2, global_batch=4, respawn=1, awaits=((3, 1),))
    spec = replace(spec, kills=("0@1:backward", "1@4:forward"))
    interrupted = run(spec)
    assert interrupted.returncode == 0, interrupted.output[-4000:]
    assert interrupted.trace() == reference(spec).trace()
    assert [event["step"] for event in interrupted.events("fault_fired")] == [1, 4]
    entered = [(event["slot"], event["step"]) for event in interrupted.events("entered")]
    assert entered == [(0, 4)]


@pytest.mark.slow
@proves(Kind.RETURN_LOSS, Promise.EQUAL, victim="1 0")
@pytest.mark.parametrize("phase", ["backward", "body"])
def test_the_last_is_lost_in_a_step_while_another_waits(
    run: Launch, reference: Launch, phase: str
) -> None:
    spec = ScriptSpec(nproc=2, global_batch=4, respawn=5, awaits=((3, 1),))
    spec = replace(spec, kills=("1@1:backward", f"0@3:{phase}"))
    survived = run(spec)
    assert survived.returncode == 0, survived.output[-4000:]
    assert survived.trace() == reference(spec).trace()
    assert survived.events("entered")[0]["slot"] == 1


@proves(Kind.RETURN, Promise.EQUAL)
@pytest.mark.slow
@pytest.mark.parametrize("slot", range(8))
def test_a_lost_worker_of_tp_pp_dp_comes_back(run: Launch, reference: Launch, slot: int) -> None:
    phase = ("forward", "backward")[slot % 2]
    check_back(run, reference, replace(BACK_IN_TP2_PP2_DP2, kills=(f"{slot}@3:{phase}",)), slot)


@proves(Kind.RETURN, Promise.EQUAL, victim="6 0 4", moment="3:backward")
@pytest.mark.parametrize("order", [(6, 0, 4), (3, 7, 1)])
def test_three_of_tp_pp_dp_come_back_one_after_the_other(
    run: Launch, reference: Launch, order: tuple[int, ...]
) -> None:
    """A worker that enters while others miss has its stage's schedule once they are back."""
    spec = replace(
        BACK_IN_TP2_PP2_DP2,
        steps=10,
        kills=tuple(f"{slot}@3:backward" for slot in order),
        awaits=((5, 1), (6, 2), (7, 3)),
        sabotage=IN_TURN.format(order=list(order)),
    )
    whole = run(spec)
    check_equal(whole, reference(spec))
    assert not failed_by_themselves(whole)
    assert [(one["slot"], one["incarnation"]) for one in whole.events("entered")] == [
        (slot, 1) for slot in order
    ]
