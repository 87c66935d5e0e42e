"""An unmodified pretrain_gpt.py whose workers share a GPU loses one: all numbers stay."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.adapters.megatron_lm.conftest import Launch
from tests.adapters.megatron_lm.harness import (
    NO_EVALUATION,
    ScriptSpec,
    needs_repository,
)
from tests.adapters.megatron_lm.test_kill import check_same
from tests.checkpoints.struck import losses
from tests.faults.harness import check_equal
from tests.gpu import first_gpu
from tests.proofs import Kind, Promise, proves

pytestmark = [
    needs_repository,
    pytest.mark.gpu,
    # device_count() asks NVML and leaves CUDA uninitialised: other tests fork from this process.
    pytest.mark.skipif(not torch.cuda.device_count(), reason="no CUDA device on this machine"),
]

PRECISIONS = {"fp32": (), "bf16": ("--bf16",)}
VENDOR = ("--bf16", "--transformer-impl", "transformer_engine")
STEPS, SAVED_STEP = 6, 4


def spec_of(script: Path, *options: str) -> ScriptSpec:
    """Four workers on the first GPU, with kernels that repeat their bits."""
    return ScriptSpec(
        steps=STEPS,
        script=str(Path(first_gpu.__file__)),
        without=("--use-cpu-initialization", "--distributed-backend", "gloo"),
        options=(f"--script={script}", *NO_EVALUATION, "--deterministic-mode", *options),
    )


@proves(Kind.KILL, Promise.EQUAL)
@pytest.mark.parametrize("kill", ["1@3:backward", "2@3:optimizer"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_kill_changes_nothing(
    run: Launch, reference: Launch, script: Path, kill: str, precision: str
) -> None:
    spec = spec_of(script, *PRECISIONS[precision])
    check_same(run, reference, replace(spec, kills=(kill,)), alive=3)


@proves(Kind.KILL, Promise.EQUAL)
@pytest.mark.parametrize("kill", ["1@3:backward", "2@3:optimizer"])
def test_a_kill_between_vendor_layers_changes_nothing(
    run: Launch, reference: Launch, script: Path, kill: str
) -> None:
    """Layers and optimizer of Transformer Engine, as scripts have them by default."""
    pytest.importorskip("transformer_engine")
    check_same(run, reference, replace(spec_of(script, *VENDOR), kills=(kill,)), alive=3)


@proves(Kind.KILL, Promise.EQUAL, victim="1", moment="3:forward")
def test_what_is_saved_after_a_loss_is_loaded(
    run: Launch, reference: Launch, script: Path, tmp_path: Path
) -> None:
    spec = spec_of(script, *PRECISIONS["bf16"])
    saves, loads = (
        ("--save", str(tmp_path), "--save-interval", str(SAVED_STEP)),
        (
            *("--load", str(tmp_path)),
            *("--ckpt-step", str(SAVED_STEP)),
        ),
    )
    killed = run(replace(spec, kills=("1@3:forward",), options=(*spec.options, *saves)))
    check_equal(killed, reference(spec))
    resumed = run(replace(spec, options=(*spec.options, *loads), nproc=2))
    assert resumed.returncode == 0, resumed.output[-4000:]
    undisturbed = losses(reference(spec))
    assert losses(resumed) == {step: undisturbed[step] for step in range(SAVED_STEP, STEPS)}
