"""Workers of an unmodified pretrain_gpt.py come back while others miss, are lost, or evaluate."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.adapters.megatron_lm.conftest import Launch
from tests.adapters.megatron_lm.harness import (
    EVALUATION,
    TP2_PP2,
    ScriptSpec,
    needs_repository,
    printed,
)
from tests.adapters.megatron_lm.test_join import BACK_IN_TP2_PP2_DP2
from tests.faults.harness import check_equal, failed_by_themselves
from tests.faults.test_join import IN_TURN, entered, last_ranks
from tests.faults.test_returns_in_turn import IN_EVALUATION
from tests.proofs import Kind, Promise, proves

pytestmark = [needs_repository, pytest.mark.slow, pytest.mark.timeout(300)]


def check_all_are_back(
    run: Launch, reference: Launch, spec: ScriptSpec, order: Sequence[int]
) -> None:
    whole, undisturbed = run(spec), reference(replace(spec, sabotage=""))
    check_equal(whole, undisturbed)
    assert printed(whole) == printed(undisturbed)
    assert not failed_by_themselves(whole) and "Traceback" not in whole.output
    assert entered(whole) == [(slot, 1) for slot in order]
    assert last_ranks(whole) == list(range(spec.nproc))


@proves(Kind.RETURN, Promise.EQUAL, moment="3:backward")
@pytest.mark.parametrize("order", [(3, 0), (0, 1), (4, 7, 6)], ids=str)
def test_workers_of_one_stage_come_back(
    run: Launch, reference: Launch, order: tuple[int, ...]
) -> None:
    """Killed by the number of their slots, and back in this order."""
    spec = replace(
        BACK_IN_TP2_PP2_DP2,
        steps=6 + len(order),
        kills=tuple(f"{slot}@3:backward" for slot in sorted(order)),
        awaits=tuple((4 + number, number) for number in range(1, 1 + len(order))),
        sabotage=IN_TURN.format(order=list(order)),
    )
    check_all_are_back(run, reference, spec, order)


@proves(Kind.RETURN_LOSS, Promise.EQUAL, victim="6 0 4", moment="2:backward 3:forward 6:forward")
@pytest.mark.parametrize("phase", ["data", "forward", "backward", "optimizer"])
def test_another_is_lost_in_the_step_in_which_one_comes_back(
    run: Launch, reference: Launch, phase: str
) -> None:
    spec = replace(
        BACK_IN_TP2_PP2_DP2,
        steps=11,
        kills=("6@2:backward", "0@3:forward", f"4@6:{phase}"),
        awaits=((5, 1), (7, 2), (8, 3)),
        sabotage=IN_TURN.format(order=[6, 0, 4]),
    )
    check_all_are_back(run, reference, spec, (6, 0, 4))


@proves(Kind.RETURN_LOSS, Promise.EQUAL, victim="6 0 3", moment="3:backward 6:evaluation")
@pytest.mark.parametrize("lost", [(), (3,)], ids=["alone", "another is lost in it"])
def test_one_comes_back_during_an_evaluation(
    run: Launch, reference: Launch, lost: tuple[int, ...]
) -> None:
    order = (6, 0, *lost)
    spec = replace(
        BACK_IN_TP2_PP2_DP2,
        options=(*EVALUATION, *TP2_PP2),
        kills=("6@3:backward", "0@3:backward", *(f"{slot}@6:evaluation" for slot in lost)),
        steps=12,
        awaits=((8, 2), (9, len(order))),
        sabotage=IN_TURN.format(order=list(order)) + IN_EVALUATION.format(step=6),
    )
    check_all_are_back(run, reference, spec, order)
