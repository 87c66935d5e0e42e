"""Frozen weights in a script of Megatron-LM: losses and returns change no number."""

from dataclasses import replace

import pytest

from tests.adapters.megatron_lm.conftest import Launch
from tests.adapters.megatron_lm.harness import (
    NO_EVALUATION,
    TP2_PP2,
    ScriptSpec,
    needs_repository,
    printed,
)
from tests.faults.harness import Outcome, check_equal
from tests.faults.test_layer_moves import cuts_after
from tests.proofs import Kind, Promise, proves

pytestmark = [needs_repository, pytest.mark.timeout(300)]

PP2 = ("--pipeline-model-parallel-size", "2")
WAYS = pytest.mark.parametrize("what", ["parts", "layers"])


def spec_of(what: str, *more: str, workers: int = 4) -> ScriptSpec:
    """A launch with these weights frozen."""
    return ScriptSpec(options=(*NO_EVALUATION, "--freeze", what, *more), nproc=workers)


def check_same(killed: Outcome, undisturbed: Outcome) -> None:
    """Equal in all that is told, and frozen weights were left out of the optimizer."""
    check_equal(killed, undisturbed)
    assert printed(killed) == printed(undisturbed)
    assert "Traceback" not in killed.output


@proves(Kind.RETURN, Promise.EQUAL, victim="1", moment="2:backward")
@WAYS
def test_a_lost_worker_comes_back(run_changed: Launch, what: str) -> None:
    spec = replace(spec_of(what), steps=8)
    back = run_changed(replace(spec, kills=("1@2:backward",), respawn=10, awaits=((5, 1),)))
    check_same(back, run_changed(spec))
    assert [(one["slot"], one["incarnation"]) for one in back.events("entered")] == [(1, 1)]


@proves(Kind.RETURN, Promise.EQUAL, victim="6", moment="2:backward")
@WAYS
def test_a_worker_of_tp_pp_dp_comes_back(run_changed: Launch, what: str) -> None:
    spec = replace(spec_of(what, *TP2_PP2, workers=8), steps=8)
    back = run_changed(replace(spec, kills=("6@2:backward",), respawn=10, awaits=((5, 1),)))
    check_same(back, run_changed(spec))
    assert [(one["slot"], one["incarnation"]) for one in back.events("entered")] == [(6, 1)]


@proves(Kind.KILL, Promise.EQUAL, victim="3", moment="1:forward")
def test_layers_with_frozen_parts_move_to_another_stage(run_changed: Launch) -> None:
    always = ("--untie-embeddings-and-output-weights", "--elaswave-move-layers", "always")
    spec = spec_of("parts", *PP2, *always)
    killed = run_changed(replace(spec, kills=("3@1:forward",)))
    check_same(killed, run_changed(spec))
    assert cuts_after(killed) == [[0, 3, 4]]
