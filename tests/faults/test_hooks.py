"""A source that was given hooks: a fault changes nothing, and no function is replaced."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from elaswave_plugin.adapters.megatron.compat.patches import elastic_patches
from elaswave_plugin.cli.patch import apply, diffs_for, find_tree, read_series, revert
from tests.faults.conftest import Launch, Reference
from tests.faults.harness import ROOT, JobSpec, Outcome, check_equal
from tests.faults.hybrid_matrix import PP2_DP2
from tests.faults.test_outside_a_step import saved_tensors
from tests.faults.test_split_backward import check_split, split
from tests.proofs import Kind, Promise, proves
from tests.session import Run, Zygotes

# Says, when the weight gradients of a first piece are computed, what is called for linear layers.
UNREPLACED = """
import os
from elaswave_plugin.adapters.megatron.step.weight_gradients import WeightGradients
from megatron.core.tensor_parallel import layers
name = "linear_with_grad_accumulation_and_async_allreduce"
compute, said = WeightGradients.compute, []
whole = getattr(layers, name)
def saying(self, piece):
    if not said and layers.linear_hook and getattr(layers, name) is whole:
        os.write(1, b"linear layers: hooked.")
    said.append(piece)
    compute(self, piece)
WeightGradients.compute = saying
"""


def sources(folder: Path) -> dict[str, bytes]:
    """Every source file of a tree."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.py")}


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A copy of the installed megatron-core with all diffs; afterwards they are taken back."""
    spec = find_spec("megatron.core")
    assert spec is not None and spec.origin is not None
    installed, root = Path(spec.origin).parents[2], tmp_path_factory.mktemp("patched")
    shutil.copytree(installed / "megatron" / "core", root / "megatron" / "core")
    tree = find_tree(root)
    if tree.families[0] not in {diff.family for diff in read_series()}:
        pytest.skip(f"there are no diffs for {tree.families[0]}")
    assert apply(tree) == diffs_for(tree)
    yield root
    assert revert(tree) == diffs_for(tree)
    assert sources(root / "megatron" / "core") == sources(installed / "megatron" / "core")


@pytest.fixture(scope="module")
def hooked(patched: Path, zygotes: Zygotes, run: Run) -> Launch:
    """Launch a specification with that copy."""
    zygote = zygotes(path=(ROOT, patched))
    return lambda spec: run(spec, zygote)


def places(run: Outcome) -> set[str]:
    """Return what the patch records set, alike in every worker, by the job's own record."""
    said = run.events("patched")
    assert {event["slot"] for event in said} == set(range(run.spec.nproc))
    (found,) = {frozenset(event["places"]) for event in said}
    return set(found)


def check_hooked(run: Outcome, reference: Outcome) -> None:
    """Bit-equal to the run with run-time patches; and no function was replaced that has a hook."""
    check_equal(run, reference)
    records = elastic_patches(exact=True).records
    hooks = {record.hook.place for record in records if record.hook is not None}
    targets = {record.target for record in records if record.hook is not None}
    assert len(hooks) == len(targets) and len(targets) >= len(records) - 2
    assert hooks <= places(run) and targets.isdisjoint(places(run))
    assert targets <= places(reference) and hooks.isdisjoint(places(reference))


@proves(Kind.KILL, Promise.EQUAL, victim="2", moment="3:backward")
def test_kill_with_hooks_in_place_of_replaced_functions_changes_nothing(
    hooked: Launch, reference: Reference
) -> None:
    spec = JobSpec(kills=("2@3:backward",))
    check_hooked(hooked(spec), reference(spec))


@proves(Kind.KILL, Promise.EQUAL, victim="2 3")
@pytest.mark.slow
def test_an_empty_stage_with_hooks_takes_a_replica_of_another(
    hooked: Launch, reference: Reference
) -> None:
    spec = replace(PP2_DP2, lost_trainers=(2, 3))
    check_hooked(hooked(spec), reference(spec))


@proves(Kind.KILL, Promise.EQUAL, victim="1", moment="3:backward")
@pytest.mark.slow
def test_split_backwards_with_hooks_are_the_same(hooked: Launch, reference: Reference) -> None:
    survived = hooked(split(PP2_DP2, kills=("1@3:backward",), sabotage=UNREPLACED))
    check_hooked(survived, reference(PP2_DP2))
    check_split(survived)
    assert survived.output.count("linear layers: hooked") == len(survived.spec.kills) * 3


@proves(Kind.KILL, Promise.WHOLE, victim="1", moment="2:reduce")
@pytest.mark.slow
def test_a_checkpoint_with_hooks_is_the_same(hooked: Launch, run: Launch, tmp_path: Path) -> None:
    def spec(name: str, *kills: str) -> JobSpec:
        return JobSpec(options=(f"--save={tmp_path / name}", "--save-interval=6"), kills=kills)

    check_hooked(hooked(spec("hooked", "1@2:reduce")), run(spec("native")))
    left, right = (saved_tensors(tmp_path / name / "iter_0000006") for name in ("hooked", "native"))
    assert len(left) > 20 and left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)
