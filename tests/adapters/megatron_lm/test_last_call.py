"""With every worker told to leave, the script writes a last checkpoint, from which it goes on."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from tests.adapters.megatron_lm.conftest import Launch
from tests.adapters.megatron_lm.harness import NO_EVALUATION, ScriptSpec, needs_repository
from tests.faults.harness import Outcome, Zygote, started
from tests.faults.test_last_checkpoint import SAVE_S, completed_once, told_to_end
from tests.faults.test_signals import wait_for_step
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


# One worker's clock says, in the backward pass of step 5, that an hour has gone by.
AN_HOUR_LATER = """
import sys
from elaswave_plugin.recovery.phases import Phases
enter = Phases.enter
def later(self, phase):
    if (self._slot, self.step, phase) == (2, 5, "backward"):
        sys.modules["megatron.training.training"]._TRAIN_START_TIME -= 3600
    enter(self, phase)
Phases.enter = later
"""


@proves(Kind.ALL_LEAVE, Promise.WHOLE)
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kills", [(), ("1@3:backward",)], ids=["nobody lost", "one lost"])
def test_all_end_where_one_says_that_the_time_is_over(
    run: Launch, data: Path, kills: tuple[str, ...]
) -> None:
    saved = data / f"over-{len(kills)}"
    options = (*SPEC.options, "--exit-duration-in-mins", "30", "--save", str(saved))
    over = run(replace(SPEC, dump="never", options=options, kills=kills, sabotage=AN_HOUR_LATER))
    assert over.returncode == 0, over.output[-4000:]
    assert len(over.events("fault_fired")) == len(kills)
    assert (saved / "latest_checkpointed_iteration.txt").read_text() == "6"
    assert max(record["step"] for record in over.files.steps) == 5
    loaded = run(replace(SPEC, options=(*SPEC.options, "--load", str(saved))))
    assert loaded.returncode == 0, loaded.output[-4000:]
    check_goes_on(loaded, run(SPEC), 6)


@proves(Kind.ALL_LEAVE, Promise.WHOLE)
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("saves", [True, False])
def test_the_scripts_own_end_at_sigterm(
    run: Launch, script: Path, zygote: Zygote, data: Path, tmp_path: Path, saves: bool
) -> None:
    saved = tmp_path / "saved"
    options = (*SPEC.options, "--exit-signal-handler")
    options += ("--save", str(saved)) if saves else ()
    spec = replace(SPEC, dump="never", script=str(script), options=options)
    directory = tmp_path / "run"
    with started(spec, zygote=zygote, data=data, directory=directory) as (launcher,):
        wait_for_step(directory, 3)
        run_so_far = Outcome(spec=spec, directory=directory, returncode=0, output="", seconds=0)
        trainers = [one["pid"] for one in run_so_far.events("worker_started")]
        # One worker's signal is no request to the job, as in every other loop.
        os.kill(trainers[1], signal.SIGTERM)
        wait_for_step(directory, 6)
        for pid in trainers:
            os.kill(pid, signal.SIGTERM)
        launcher.send_signal(signal.SIGTERM)
        code = launcher.wait(SAVE_S)
    output = (directory / "output").read_text()
    assert "Traceback" not in output
    # Whoever hears it first: all were told to leave, and the script has more to do.
    assert code == 128 + signal.SIGTERM, output[-3000:]
    told = Outcome(spec=spec, directory=directory, returncode=0, output=output, seconds=0)
    done = completed_once(told)
    assert done > 6
    assert "the job stops: every worker has left, as it was told to" in output
    if saves:
        assert (saved / "latest_checkpointed_iteration.txt").read_text() == str(done)
        loaded = run(replace(SPEC, options=(*SPEC.options, "--load", str(saved))))
        assert loaded.returncode == 0, loaded.output[-4000:]
        check_goes_on(loaded, run(SPEC), done)
