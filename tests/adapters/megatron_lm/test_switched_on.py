"""A script that names no distributed optimizer gets one: same numbers, checkpoints of its own."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.adapters.megatron_lm.conftest import Launch
from tests.adapters.megatron_lm.harness import (
    NO_EVALUATION,
    TP2_PP2,
    ScriptSpec,
    needs_repository,
    printed,
)
from tests.adapters.megatron_lm.test_kill import check_same
from tests.adapters.megatron_lm.test_without_plugin import NO_DROPOUT, check_close, without_plugin
from tests.proofs import Kind, Promise, proves

pytestmark = [needs_repository, pytest.mark.timeout(400)]

UNNAMED = ("--use-distributed-optimizer", "--overlap-param-gather")
SPEC = ScriptSpec(options=(*NO_EVALUATION, *NO_DROPOUT), without=UNNAMED)


@proves(Kind.NOTHING, Promise.SAME, victim="1", moment="2:backward")
def test_the_optimizer_is_switched_on_and_that_is_said(run: Launch, reference: Launch) -> None:
    spec = replace(SPEC, options=NO_EVALUATION, kills=("1@2:backward",))
    check_same(run, reference, spec, alive=3)
    said = [line for line in reference(spec).output.splitlines() if "adjusted: " in line]
    assert len(said) == 1
    assert "--use-distributed-optimizer is False: switched on" in said[0]


@proves(Kind.NOTHING, Promise.SAME)
def test_control_what_is_named_is_not_said(reference: Launch) -> None:
    assert "--use-distributed-optimizer" not in reference(ScriptSpec()).output


BF16 = ("--accumulate-allreduce-grads-in-fp32", "--bf16")


@proves(Kind.KILL, Promise.WHOLE, victim="1", moment="2:backward")
@pytest.mark.parametrize("more", [(), BF16, TP2_PP2], ids=["fp32", "bf16", "tp_pp"])
@pytest.mark.slow
def test_a_run_without_the_plugin_reads_what_a_job_saved_after_a_loss_and_back(
    run: Launch, script: Path, data: Path, tmp_path: Path, more: tuple[str, ...]
) -> None:
    """The job goes on from the script's own checkpoint too, bit-equal to its own."""
    name = more[-1].strip("-") if more else "fp32"
    base = replace(SPEC, options=(*SPEC.options, *more), nproc=8 if more == TP2_PP2 else 4)
    ours, theirs = f"{name}-ours", f"{name}-theirs"
    killed = run(saving(base, ours, kills=("1@2:backward",)))
    assert killed.returncode == 0, killed.output[-4000:]
    assert len(killed.events("fault_fired")) == 1
    plain = without_plugin(
        saving(base, theirs), script=script, data=data, folder=tmp_path / "saved"
    )
    within = 1e-4 if more == BF16 else 1e-6
    check_close(printed(killed), plain, within=within)
    for folder in (ours, theirs):
        back_to_four(data / folder)
    went_on = without_plugin(loading(base, ours), script=script, data=data, folder=tmp_path / "on")
    from_ours, from_theirs = run(loading(base, ours)), run(loading(base, theirs))
    assert from_ours.returncode == from_theirs.returncode == 0, from_ours.output[-4000:]
    assert from_ours.trace() == {step: killed.trace()[step] for step in (4, 5)}
    # Megatron-LM's line of iteration 6 is the mean of 5 and 6 after a load.
    check_close(printed(from_ours), went_on, within=within)
    check_close(printed(from_theirs), went_on, within=within)


def saving(base: ScriptSpec, name: str, **more: object) -> ScriptSpec:
    """The run that saves after 4 of 6 iterations."""
    options = (*base.options, "--save", "{data}/" + name, "--save-interval", "4")
    return replace(base, options=options, **more)  # type: ignore[arg-type]


def loading(base: ScriptSpec, name: str) -> ScriptSpec:
    """The run that goes on from there."""
    return replace(base, options=(*base.options, "--load", "{data}/" + name))


def back_to_four(folder: Path) -> None:
    """Make the checkpoint of iteration 4 the newest."""
    shutil.rmtree(folder / "iter_0000006")
    (folder / "latest_checkpointed_iteration.txt").write_text("4")
