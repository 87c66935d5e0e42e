"""With every worker told to leave, the script writes a last checkpoint, from which it goes on."""

import signal
from dataclasses import replace
from pathlib import Path

import pytest

from elaswave_plugin.observer import read_run
from tests.adapters.megatron_lm.conftest import Launch
from tests.adapters.megatron_lm.harness import NO_EVALUATION, ScriptSpec, needs_repository
from tests.faults.harness import Outcome, Zygote, left_alive, pids_of, started
from tests.faults.test_signals import wait_for_step

pytestmark = needs_repository
# Megatron-LM's first save imports torch in a process of its own, on two cores that others share.
SAVE_S = 90.0
SPEC = ScriptSpec(
    steps=40,
    dump="last",
    options=(*NO_EVALUATION, "--save-interval", "1000"),
    launcher=(f"--notice-timeout-s={SAVE_S:g}",),
)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_job_that_is_told_to_end_saves_first(
    run: Launch, script: Path, zygote: Zygote, data: Path, tmp_path: Path
) -> None:
    told = replace(SPEC, script=str(script), options=(*SPEC.options, "--save", "{data}/told"))
    with started(told, zygote=zygote, data=data, directory=tmp_path) as (launcher,):
        wait_for_step(tmp_path, 3)
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(SAVE_S) == 128 + signal.SIGTERM
    output = (tmp_path / "output").read_text()
    assert left_alive(pids_of(tmp_path), limit_s=0.0) == ()
    assert "Traceback" not in output
    assert "every worker was told to leave, and they write a last checkpoint first" in output
    done = int((data / "told" / "latest_checkpointed_iteration.txt").read_text())
    files = read_run(tmp_path)
    assert done == 1 + max(record["step"] for record in files.steps) < SPEC.steps
    # Nothing was done twice, whoever left first.
    attempts = {(line["step"], line["epoch"]) for line in files.ledger}
    assert len(attempts) == done
    loaded = run(replace(SPEC, options=(*SPEC.options, "--load", "{data}/told")))
    assert loaded.returncode == 0, loaded.output[-4000:]
    check_goes_on(loaded, run(SPEC), done)


def check_goes_on(loaded: Outcome, undisturbed: Outcome, first: int) -> None:
    """From its first step on, a run is the one that was never told to end."""
    whole = undisturbed.trace()
    assert loaded.trace() == {step: whole[step] for step in range(first, SPEC.steps)}
