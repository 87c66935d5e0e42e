"""With every worker told to leave, the script writes a last checkpoint, from which it goes on."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.adapters.megatron_lm.conftest import Launch
from tests.adapters.megatron_lm.harness import NO_EVALUATION, ScriptSpec, needs_repository
from tests.faults.harness import Outcome, Zygote
from tests.faults.test_last_checkpoint import SAVE_S, completed_once, told_to_end
from tests.proofs import Kind, Promise, proves

pytestmark = needs_repository
SPEC = ScriptSpec(
    steps=40,
    dump="last",
    options=(*NO_EVALUATION, "--save-interval", "1000"),
    launcher=(f"--notice-timeout-s={SAVE_S:g}",),
)


@proves(Kind.ALL_LEAVE, Promise.WHOLE)
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_job_that_is_told_to_end_saves_first(
    run: Launch, script: Path, zygote: Zygote, data: Path, tmp_path: Path
) -> None:
    told = replace(SPEC, script=str(script), options=(*SPEC.options, "--save", "{data}/told"))
    done = completed_once(told_to_end(told, zygote=zygote, data=data, directory=tmp_path))
    assert (data / "told" / "latest_checkpointed_iteration.txt").read_text() == str(done)
    loaded = run(replace(SPEC, options=(*SPEC.options, "--load", "{data}/told")))
    assert loaded.returncode == 0, loaded.output[-4000:]
    check_goes_on(loaded, run(SPEC), done)


def check_goes_on(loaded: Outcome, undisturbed: Outcome, first: int) -> None:
    """From its first step on, a run is the one that was never told to end."""
    whole = undisturbed.trace()
    assert loaded.trace() == {step: whole[step] for step in range(first, SPEC.steps)}
