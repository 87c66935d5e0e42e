"""Checkpoints of the format torch: whole after any loss, read by the script without the plugin."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from elaswave_plugin.checkpoints.legacy import flaw_of
from tests.adapters.megatron_lm.conftest import Launch
from tests.adapters.megatron_lm.harness import (
    NO_EVALUATION,
    TP2_PP2,
    ScriptSpec,
    needs_repository,
    printed,
)
from tests.adapters.megatron_lm.test_switched_on import UNNAMED, back_to_four, loading, saving
from tests.adapters.megatron_lm.test_without_plugin import NO_DROPOUT, check_close, without_plugin
from tests.faults.harness import check_equal
from tests.proofs import Kind, Promise, proves

pytestmark = [needs_repository, pytest.mark.timeout(400)]

TORCH = ("--ckpt-format", "torch")
SPEC = ScriptSpec(options=(*NO_EVALUATION, *TORCH))
TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")


@proves(Kind.KILL_IN_SAVE, Promise.WHOLE)
@pytest.mark.parametrize(
    ("name", "more", "without", "kill"),
    [
        ("named", (), (), "2@4:save"),
        ("unnamed", (), UNNAMED, "0@4:save"),
        ("bf16", ("--bf16",), UNNAMED, "1@2:backward"),
        # Worker 0 has no place then, and is rank 0, which names the checkpoint.
        ("free", TP2, (), "1@2:backward"),
        ("stages", TP2_PP2, UNNAMED, "5@2:backward"),
    ],
    ids=lambda value: value if isinstance(value, str) and "@" not in value else "",
)
def test_a_checkpoint_is_that_of_the_undisturbed_run_and_goes_on(
    run: Launch,
    data: Path,
    name: str,
    more: tuple[str, ...],
    without: tuple[str, ...],
    kill: str,
) -> None:
    base = replace(
        SPEC,
        nproc=8 if more == TP2_PP2 else 4,
        options=(*SPEC.options, *more),
        without=without,
    )
    undisturbed = run(saving(base, f"{name}-whole"))
    killed = run(saving(base, f"{name}-killed", kills=(kill,)))
    check_equal(killed, undisturbed)
    assert printed(killed) == printed(undisturbed)
    for iteration in (4, 6):
        check_alike(*(data / f"{name}-{which}/iter_{iteration:07d}" for which in WHICH))
    assert not list((data / f"{name}-killed").glob("*part*"))
    back_to_four(data / f"{name}-killed")
    went_on = run(loading(base, f"{name}-killed"))
    assert went_on.returncode == 0, went_on.output[-4000:]
    assert went_on.trace() == {step: undisturbed.trace()[step] for step in (4, 5)}


WHICH = ("whole", "killed")


def check_alike(one: Path, other: Path) -> None:
    """Both are whole, and have the same tensors in the same files."""
    files = sorted(path.relative_to(one) for path in one.rglob("*.pt"))
    assert files and files == sorted(path.relative_to(other) for path in other.rglob("*.pt"))
    assert flaw_of(one) is None and flaw_of(other) is None
    for file in files:
        left, right = (
            dict(tensors(torch.load(f / file, weights_only=False))) for f in (one, other)
        )
        left, right = ({k: v for k, v in one.items() if "rng" not in k} for one in (left, right))
        assert len(left) > 2 and left.keys() == right.keys()
        assert [k for k, v in left.items() if not torch.equal(v, right[k])] == []


def tensors(state: Any, name: str = "") -> Any:
    """All tensors of a state, by their path."""
    if isinstance(state, torch.Tensor):
        yield name, state
    elif isinstance(state, dict | list | tuple):
        items = state.items() if isinstance(state, dict) else enumerate(state)
        for key, value in items:
            yield from tensors(value, f"{name}/{key}")


@proves(Kind.KILL_IN_SAVE, Promise.WHOLE, victim="1", moment="2:backward")
@pytest.mark.slow
@pytest.mark.parametrize("without", [(), UNNAMED], ids=["named", "unnamed"])
def test_the_script_without_the_plugin_reads_them_and_its_own_are_read(
    run: Launch, script: Path, data: Path, tmp_path: Path, without: tuple[str, ...]
) -> None:
    base = replace(SPEC, options=(*SPEC.options, *NO_DROPOUT), without=without)
    ours, theirs = ("l-ours", "l-theirs") if without else ("n-ours", "n-theirs")
    killed = run(saving(base, ours, kills=("1@2:backward",)))
    assert killed.returncode == 0, killed.output[-4000:]
    plain = without_plugin(saving(base, theirs), script=script, data=data, folder=tmp_path / "a")
    check_close(printed(killed), plain)
    for folder in (ours, theirs):
        back_to_four(data / folder)
    went_on = without_plugin(loading(base, ours), script=script, data=data, folder=tmp_path / "b")
    from_theirs = run(loading(base, theirs))
    assert from_theirs.returncode == 0, from_theirs.output[-4000:]
    # Megatron-LM's line of iteration 6 is the mean of 5 and 6 after a load.
    check_close(printed(from_theirs), went_on)
    shutil.rmtree(data / ours)
