"""Losses in TP x PP x DP jobs whose collectives are native, as NCCL's: gloo's in its place."""

from dataclasses import replace
from typing import Any

import pytest

from elaswave_plugin.tracking.events import read_lines
from tests.faults.conftest import Launch, Reference
from tests.faults.harness import ROOT, SCRIPT, JobSpec, Outcome, check_equal
from tests.faults.hybrid_matrix import TP2_PP2_DP2
from tests.faults.test_join import entered
from tests.faults.test_stage_moves import stages_after
from tests.proofs import Kind, Promise, proves

STAND_IN = str(ROOT / "tests" / "stand_ins" / "native_gloo.py")
NATIVE = replace(TP2_PP2_DP2, script=STAND_IN)
DP4 = JobSpec(script=STAND_IN)
TP4_DP2 = JobSpec(
    nproc=8, script=STAND_IN, options=("--tensor-model-parallel-size=4", "--sequence-parallel")
)
WORLD = "0"
TP = "own stage, own replica, all tp"


def native(run: Outcome, what: str) -> list[dict[str, Any]]:
    """The native groups to which this happened, in order."""
    return [one for one in read_lines(run.directory / "native.jsonl") if one["what"] == what]


def epoch_of(one: dict[str, Any]) -> int:
    """The epoch in which a native group was made."""
    return int(one["group"].rpartition("@")[2])


def made_last(run: Outcome) -> dict[str, set[int]]:
    """The native groups of the last epoch, and who made them."""
    epoch = run.events("view_committed")[-1]["epoch"]
    made: dict[str, set[int]] = {}
    for one in native(run, "make"):
        if epoch_of(one) == epoch:
            made.setdefault(one["group"].rpartition("@")[0], set()).add(one["slot"])
    return made


def check_native(run: Outcome, *, sizes: frozenset[int] = frozenset({2})) -> None:
    """Tensors went through native groups, made by all their members, before and after a loss.

    Native messages are those of the framework's own schedule, while every stage is whole;
    ``sizes``: of the groups that have them.
    """
    made = native(run, "make")
    for one in made:
        makers = {other["slot"] for other in made if other["group"] == one["group"]}
        assert len(makers) == one["size"], one
    ragged = {event["epoch"] for event in run.events("recovered") if not event["newcomers"]}
    assert ragged <= {epoch_of(one) for one in made} and native(run, "abort")
    messages = native(run, "send") + native(run, "recv")
    assert messages and {one["size"] for one in messages} == sizes
    assert ragged.isdisjoint(map(epoch_of, messages))


def check_order(run: Outcome, reference: Reference) -> None:
    """Sums of more than two went through native groups, as copies, and have the links' bits."""
    undisturbed = reference(run.spec)
    check_equal(run, undisturbed)
    over_links = reference(replace(run.spec, script=str(SCRIPT)))
    assert undisturbed.trace() == over_links.trace() and not native(over_links, "make")
    for one in (run, undisturbed):
        # Whole replicas of two travel by it as well, to be added in their order.
        assert any(call["size"] > 2 for call in native(one, "alltoall"))
        for summed in ("reduce_scatter_single_coalesced", "reduce_scatter_single"):
            assert all(call["size"] <= 2 for call in native(one, summed))


@proves(Kind.KILL, Promise.EQUAL, victim="1", moment="3:reduce")
def test_one_of_four_replicas(run: Launch, reference: Reference) -> None:
    """Its terms are added in their place; gloo itself would add in another order."""
    survived = run(replace(DP4, kills=("1@3:reduce",)))
    check_order(survived, reference)
    assert made_last(survived)[WORLD] == {0, 2, 3}


@proves(Kind.RETURN, Promise.EQUAL, victim="2", moment="3:backward")
@pytest.mark.slow
def test_one_of_four_replicas_comes_back(run: Launch, reference: Reference) -> None:
    spec = replace(
        DP4, steps=10, dump="last", kills=("2@3:backward",), respawn=10, awaits=((5, 1),)
    )
    survived = run(spec)
    check_order(survived, reference)
    assert entered(survived) == [(2, 1)]
    assert made_last(survived)[WORLD] == {0, 1, 2, 3}


@proves(Kind.KILLS, Promise.EQUAL, victim="1 6", moment="2:backward 4:forward")
@pytest.mark.slow
def test_a_tp_group_of_four_of_two_that_each_lost_a_member(
    run: Launch, reference: Reference
) -> None:
    """Sums over TP positions are made in their order, whoever has them."""
    survived = run(replace(TP4_DP2, kills=("1@2:backward", "6@4:forward")))
    check_order(survived, reference)
    anew = made_last(survived)
    assert any(len(slots) == 4 for name, slots in anew.items() if name != WORLD)


@proves(Kind.KILL, Promise.EQUAL, victim="5", moment="3:backward")
def test_a_loss(run: Launch, reference: Reference) -> None:
    """It leaves worker 4 without a place, which takes part in groups of all workers only."""
    spec = replace(NATIVE, kills=("5@3:backward",))
    survived = run(spec)
    check_equal(survived, reference(spec))
    check_native(survived)
    anew = made_last(survived)
    assert anew[WORLD] == {0, 1, 2, 3, 4, 6, 7}
    assert {name for name, slots in anew.items() if 4 in slots} == {WORLD}


# Python comes to what an interrupted pass has left where a later one computes gradients.
_LATE_COLLECTOR = """
import gc
from elaswave_plugin.adapters.megatron.step.ragged_pipeline import RaggedPipeline
gc.disable()
accumulate = RaggedPipeline._accumulate
def collecting(self, *args):
    gc.collect()
    return accumulate(self, *args)
RaggedPipeline._accumulate = collecting
"""


@proves(Kind.KILL, Promise.EQUAL, victim="5", moment="3:backward")
def test_a_pass_that_was_interrupted_counts_no_gradients_of_a_later_one(
    run: Launch, reference: Reference
) -> None:
    spec = replace(NATIVE, kills=("5@3:backward",), sabotage=_LATE_COLLECTOR)
    check_equal(run(spec), reference(NATIVE))


@proves(Kind.KILLS, Promise.EQUAL, victim="0 3", moment="2:backward 4:forward")
@pytest.mark.slow
def test_a_tp_group_of_two_that_each_lost_a_member(run: Launch, reference: Reference) -> None:
    """Workers 1 and 2 have different names for the group that they make from then on."""
    spec = replace(NATIVE, kills=("0@2:backward", "3@4:forward"))
    survived = run(spec)
    check_equal(survived, reference(spec))
    check_native(survived)
    anew = made_last(survived)
    assert {1, 2} in [slots for name, slots in anew.items() if name.startswith(TP)]


@proves(Kind.KILL, Promise.EQUAL, victim="0 1 2")
def test_workers_change_stage(run: Launch, reference: Reference) -> None:
    spec = replace(NATIVE, lost_trainers=(0, 1, 2))
    survived = run(spec)
    check_equal(survived, reference(spec))
    check_native(survived)
    assert stages_after(survived) == [[[6, 7]], [[4, 5]]]


@proves(Kind.RETURN, Promise.EQUAL, victim="5", moment="3:backward")
@pytest.mark.slow
def test_a_lost_worker_comes_back(run: Launch, reference: Reference) -> None:
    """It builds alone; once it is in, the pipeline runs natively again, with its groups in it."""
    spec = replace(
        NATIVE, steps=10, dump="last", kills=("5@3:backward",), respawn=10, awaits=((5, 1),)
    )
    survived = run(spec)
    check_equal(survived, reference(spec))
    assert entered(survived) == [(5, 1)]
    # The script's state is handed over in the group of all.
    check_native(survived, sizes=frozenset({2, 8}))
    (started,) = (
        event["pid"]
        for event in survived.events("worker_started")
        if (event["slot"], event["incarnation"]) == (5, 1)
    )
    entering = survived.events("view_committed")[-1]["epoch"]
    of_5 = [one for one in native(survived, "make") if one["pid"] == started]
    assert {epoch_of(one) for one in of_5} == {entering}
    assert any(one["pid"] == started for one in native(survived, "send"))
