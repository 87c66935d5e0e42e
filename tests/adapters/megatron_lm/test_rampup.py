"""The batch of an unmodified pretrain_gpt.py grows while workers are lost and come back."""

import re
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
from tests.adapters.megatron_lm.test_join import check_back
from tests.adapters.megatron_lm.test_kill import check_same, consumed
from tests.adapters.megatron_lm.test_pieces import check_checkpoints
from tests.adapters.megatron_lm.test_without_plugin import (
    NO_DROPOUT,
    check_close,
    without_plugin,
)
from tests.proofs import Kind, Promise, proves

pytestmark = [needs_repository, pytest.mark.timeout(300)]

RAMP = ("--rampup-batch-size", "4", "4", "16")
SPEC = ScriptSpec(global_batch=12, ramp=(4, 4, 8, 12, 12, 12), options=(*EVALUATION, *RAMP))
TP2_PP2_DP2 = replace(SPEC, nproc=8, options=(*NO_EVALUATION, *RAMP, *TP2_PP2))


@proves(Kind.KILL, Promise.EQUAL)
@pytest.mark.parametrize(
    "kill", ["0@1:backward", "3@2:data", "2@2:optimizer", "1@3:reduce", "0@3:evaluation"]
)
def test_a_loss_around_the_growth_of_the_batch(run: Launch, reference: Launch, kill: str) -> None:
    check_same(run, reference, replace(SPEC, kills=(kill,)), alive=3)


@proves(Kind.KILLS, Promise.EQUAL, victim="1 2", moment="1:forward 3:backward")
def test_every_sample_is_read_once(run: Launch, reference: Launch) -> None:
    spec = replace(SPEC, kills=("1@1:forward", "2@3:backward"))
    killed = run(spec)
    assert len(killed.events("fault_fired")) == 2
    assert consumed(killed) == consumed(reference(spec))
    read = [one for _, samples in sorted(consumed(killed).items()) for one in samples]
    assert read == list(range(sum(SPEC.ramp)))
    sizes = re.findall(r"global batch size: +(\d+)", " ".join(printed(killed)))
    assert tuple(map(int, sizes)) == SPEC.ramp


@proves(Kind.KILL, Promise.EQUAL)
@pytest.mark.parametrize("kill", ["0@1:backward", "3@2:forward", "5@2:backward", "6@3:forward"])
def test_a_loss_of_tp_pp_dp(run: Launch, reference: Launch, kill: str) -> None:
    check_same(run, reference, replace(TP2_PP2_DP2, kills=(kill,)), alive=7)


@proves(Kind.RETURN, Promise.EQUAL, victim="1", moment="1:backward")
def test_a_worker_comes_back_into_a_larger_batch(
    run: Launch, reference: Launch, data: Path
) -> None:
    """It is lost in a batch of 4, and enters before one of 12, which is saved before."""

    def saving(name: str) -> ScriptSpec:
        save = ("--save", "{data}/" + name, "--save-interval", "5")
        return replace(SPEC, options=(*SPEC.options, *save), dump="last")

    spec = replace(saving("ramp-back"), kills=("1@1:backward",), respawn=10, awaits=((3, 1),))
    check_back(run, lambda _: reference(saving("ramp")), spec, 1)
    check_checkpoints(data, "ramp-back", "ramp", 2, 3, 5, 6)


@proves(Kind.NOTHING, Promise.SAME)
@pytest.mark.slow
def test_without_a_fault_the_losses_are_those_without_the_plugin(
    reference: Launch, script: Path, data: Path, tmp_path: Path
) -> None:
    spec = replace(SPEC, options=(*NO_EVALUATION, *RAMP, *NO_DROPOUT))
    theirs = without_plugin(spec, script=script, data=data, folder=tmp_path / "run")
    check_close(printed(reference(spec)), theirs)
