"""Workers of DeepSpeed's loops come back while others are missing, are lost, or evaluate."""

from dataclasses import replace
from typing import Any

import pytest

from tests.deepspeed import hf_runs
from tests.deepspeed.conftest import Launch, Twin
from tests.deepspeed.harness import FP32_BOUND, EngineSpec, check_recovered
from tests.deepspeed.test_join import entered, sizes
from tests.deepspeed.test_pipeline import PP2_DP2, check_pipeline
from tests.deepspeed.test_pipeline_join import A_STEP_LATER
from tests.faults.harness import Outcome, check_survived, failed_by_themselves
from tests.faults.harness import max_relative_difference as difference
from tests.faults.test_returns_in_turn import IN_EVALUATION
from tests.proofs import Kind, Promise, proves

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

# Who is killed, and who comes back before which step: in the order of the losses reversed, and in
# the step in which another is lost.
REVERSED = (("1@2:backward", "3@3:reduce"), ("+3@5", "+1@7"))
AMID_A_LOSS = (("1@2:backward", "3@5:backward"), ("+1@5", "+3@8"))
ORDERS = pytest.mark.parametrize(
    ("kills", "changes"), [REVERSED, AMID_A_LOSS], ids=["reversed", "amid a loss"]
)


def returning(kills: tuple[str, ...], changes: tuple[str, ...]) -> dict[str, Any]:
    """The fields of such a job; who comes later asks to be let in a step after the other."""
    last = A_STEP_LATER.format(slot=changes[-1][1])
    return {
        "steps": 10,
        "respawn": 5,
        "kills": kills,
        "changes": changes,
        "sabotage": last if kills == REVERSED[0] else "",
    }


def check_back(run: Outcome) -> None:
    """Nobody failed by itself, and all are there, in the order and before the steps as planned."""
    planned = [(int(one[1]), 1, int(one[3:])) for one in run.spec.changes]
    assert entered(run) == planned
    assert not failed_by_themselves(run)
    assert run.events("view_committed")[-1]["ranks"] == [*range(run.spec.nproc)]


@proves(Kind.RETURN, Promise.PLANNED)
@ORDERS
@pytest.mark.parametrize("stage", [0, 3])
def test_an_own_loop(
    run: Launch,
    twin: Twin,
    reference: Launch,
    stage: int,
    kills: tuple[str, ...],
    changes: tuple[str, ...],
) -> None:
    spec = EngineSpec(stage=stage, **returning(kills, changes))
    killed = run(spec)
    whole = replace(spec, sabotage="")
    check_recovered(killed, twin=twin(killed), reference=reference(whole))
    check_back(killed)


@proves(Kind.RETURN, Promise.PLANNED, moment="2:forward 2:backward")
@pytest.mark.parametrize("back", [("+2@6", "+1@8"), ("+1@6", "+2@8")], ids=str)
@pytest.mark.parametrize("stage", [0, 1])
def test_a_pipeline_that_lost_one_worker_of_each_stage(
    run: Launch, twin: Twin, reference: Launch, stage: int, back: tuple[str, str]
) -> None:
    """Of two pipelines: those that are left are one, and part again."""
    spec = replace(
        PP2_DP2,
        stage=stage,
        **{**returning(("1@2:forward", "2@3:backward"), back), "steps": 11},
    )
    spec = replace(spec, sabotage=A_STEP_LATER.format(slot=back[-1][1]))
    killed = run(spec)
    check_pipeline(killed, twin, reference)
    check_back(killed)
    assert sizes(killed) == [4, 3, 2, 3, 4]
    assert len({line["slot"] for line in killed.files.ledger if line["step"] == 10}) == 2


@proves(Kind.RETURN, Promise.PLANNED)
@ORDERS
def test_a_trainer(
    run: Launch,
    twin: Twin,
    reference: Launch,
    kills: tuple[str, ...],
    changes: tuple[str, ...],
) -> None:
    """It evaluates and saves every two steps, also just before they come back."""
    more = returning(kills, changes)
    spec = hf_runs.spec_of(*more.pop("kills"), stage=2, options=hf_runs.SAVING, **more)
    killed, whole = run(spec), reference(replace(spec, sabotage=""))
    check_recovered(killed, twin=twin(killed), reference=whole)
    check_back(killed)
    hf_runs.check_tapes(killed, whole, survivors=2)
    assert len(hf_runs.tapes(killed, incarnation=1)) == 2
    assert list(hf_runs.checkpoints(killed)) == list(hf_runs.checkpoints(whole))


@proves(Kind.RETURN, Promise.CLOSE, victim="1", moment="1:backward")
def test_a_trainer_that_evaluates_meanwhile(run: Launch, reference: Launch) -> None:
    spec = hf_runs.spec_of(
        "1@1:backward",
        "3@4:evaluation",
        options=hf_runs.SAVING,
        steps=10,
        respawn=5,
        awaits=((6, 1), (7, 2)),
        sabotage=IN_EVALUATION.format(step=4),
    )
    killed, whole = run(spec), reference(replace(spec, awaits=(), sabotage=""))
    check_survived(killed)
    assert not failed_by_themselves(killed)
    assert difference(killed, whole) <= FP32_BOUND
    hf_runs.check_tapes(killed, whole, survivors=2)
    assert sorted(slot for slot, _, _ in entered(killed)) == [1, 3]
