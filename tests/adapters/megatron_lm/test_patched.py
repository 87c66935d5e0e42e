"""Megatron-LM with the diffs of patches/: hooks are set, and no function is replaced."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from elaswave_plugin.adapters.megatron.compat.cpu_patches import cpu_patches
from elaswave_plugin.adapters.megatron.compat.patches import elastic_patches
from elaswave_plugin.adapters.megatron_lm.hooks import Hooks
from elaswave_plugin.adapters.megatron_lm.patches import lm_patches
from elaswave_plugin.cli.patch import apply, diffs_for, find_tree
from tests.adapters.megatron_lm.conftest import Launch
from tests.adapters.megatron_lm.harness import (
    EVALUATION,
    PRELOAD,
    ScriptSpec,
    lay_out,
    needs_repository,
    printed,
)
from tests.adapters.megatron_lm.test_pieces import check_checkpoints
from tests.adapters.megatron_lm.test_without_plugin import SPEC, without_plugin
from tests.adapters.test_diffs import WITHOUT_HOOK, installed_core
from tests.faults.harness import ROOT, Outcome, check_equal
from tests.faults.test_hooks import places
from tests.proofs import Kind, Promise, proves
from tests.session import Run, Zygotes

pytestmark = [needs_repository, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The script in a patched copy of the repository's packages and of the installed core."""
    script = lay_out(tmp_path_factory.mktemp("patched"))
    core = Path("megatron", "core")
    shutil.copytree(installed_core() / core, script.parent / core)
    tree = find_tree(script.parent)
    assert apply(tree) == diffs_for(tree)
    return script


@pytest.fixture(scope="module")
def hooked(patched: Path, zygotes: Zygotes, run: Run) -> Launch:
    """Launch a specification with that copy."""
    zygote = zygotes(PRELOAD, path=(ROOT, patched.parent))
    return lambda spec: run(replace(spec, script=str(patched)), zygote)


def check_hooked(run: Outcome, reference: Outcome) -> None:
    """The numbers of the run with run-time patches; of its targets none was replaced here."""
    check_equal(run, reference)
    assert printed(run) == printed(reference)
    records = (*elastic_patches(exact=True).records, *lm_patches(Hooks(lambda _: None)).records)
    hooks = {record.hook.place for record in records if record.hook is not None}
    # What a machine without a GPU needs is replaced at run time, with or without the diffs, and so
    # is what the diffs have no hook for.
    at_run_time = {record.target for record in cpu_patches(scripts=True).records} | WITHOUT_HOOK
    targets = {record.target for record in records} - at_run_time
    assert len(targets) > 30
    assert hooks <= places(run) and targets.isdisjoint(places(run))
    assert targets <= places(reference) and hooks.isdisjoint(places(reference))


def saving(name: str) -> ScriptSpec:
    """A run that evaluates after 3 and 6 steps, and saves after 4 and 6."""
    save = ("--save", "{data}/" + name, "--save-interval", "4")
    return ScriptSpec(options=(*EVALUATION, *save))


@proves(Kind.KILL, Promise.EQUAL, victim="2 1", moment="3:backward 4:save")
def test_a_kill_with_hooks_in_place_of_replaced_functions_changes_nothing(
    hooked: Launch, reference: Launch, data: Path
) -> None:
    survived = hooked(replace(saving("hooked"), kills=("2@3:backward", "1@4:save")))
    check_hooked(survived, reference(saving("replaced")))
    check_checkpoints(data, "hooked", "replaced", 4, 6)


@proves(Kind.NOTHING, Promise.SAME)
@pytest.mark.slow
def test_the_patched_source_without_the_plugin_is_what_it_was(
    patched: Path, script: Path, data: Path, tmp_path: Path
) -> None:
    lines = [
        without_plugin(SPEC, script=one, data=data, folder=tmp_path / name)
        for name, one in (("patched", patched), ("as it is", script))
    ]
    assert lines[0] == lines[1]
