"""Rehearsals of Megatron-LM's pretrain_gpt.py."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.adapters.megatron_lm.conftest import script as script
from tests.adapters.megatron_lm.conftest import zygote as zygote
from tests.adapters.megatron_lm.harness import EVALUATION, ScriptSpec, needs_repository
from tests.faults.harness import Zygote
from tests.proofs import Kind, Promise, proves
from tests.rehearsal.conftest import Rehearse, rehearsing

pytestmark = [needs_repository, pytest.mark.timeout(540), pytest.mark.slow]


@pytest.fixture
def rehearse_script(zygote: Zygote, script: Path, tmp_path: Path) -> Rehearse:
    """Rehearse a specification of the script."""
    run = rehearsing(zygote, tmp_path, tmp_path)
    return lambda spec, *options, **more: run(replace(spec, script=str(script)), *options, **more)


@proves(Kind.KILLS, Promise.EQUAL)
def test_the_script_is_equal_and_saves_elsewhere(rehearse_script: Rehearse, tmp_path: Path) -> None:
    save = tmp_path / "checkpoints"
    options = (*EVALUATION, "--save", str(save), "--save-interval", "2")
    spec = ScriptSpec(nproc=2, steps=20, global_batch=4, options=options)
    found = rehearse_script(spec, "--steps=5", runs=("dealt-otherwise", "losses", "returns"))
    assert found.exit_code == 0, found.output
    assert all(kill["fired"] for run in found.verdict["runs"] for kill in run["kills"])
    assert not save.exists()
