"""The trackers of a transformers.Trainer go on on whichever worker is the main process."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
pytest.importorskip("wandb")

from transformers import TrainerCallback
from transformers.integrations import WandbCallback

from elaswave_plugin.adapters.deepspeed.accelerate.lost_trackers import LostTrackers
from elaswave_plugin.adapters.deepspeed.hf_trainer import trackers
from elaswave_plugin.adapters.deepspeed.hf_trainer.trackers import Trackers
from elaswave_plugin.config import STEP_PHASES
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.tracking.sinks import points_of
from tests.deepspeed.conftest import Launch
from tests.deepspeed.hf_runs import SAVING, spec_of, tapes
from tests.deepspeed.trainer_matrix import OUTSIDE
from tests.faults.harness import Outcome, check_survived
from tests.proofs import Kind, Promise, proves
from tests.tracking.wandb_files import history, run_ids

BOTH = "--report-to=wandb,tensorboard"
# Of the last line of a Trainer, which W&B has in the summary of a run.
OF_THE_RUN = ("train_loss", "total_flos")
# How long something took, and what W&B has of each row.
TIMES = ("runtime", "per_second", "_timestamp", "text_summary")


def logged(run: Outcome) -> list[tuple[int, dict[str, float]]]:
    """Return step and numbers of each line that the Trainer has logged, as trackers name them."""
    return [
        (step, {shown(name): one for name, one in numbers.items()})
        for event, step, numbers in tapes(run)[0]
        if event == "on_log"
    ]


def shown(name: str) -> str:
    """As in "eval/loss"."""
    is_of_evaluation = name.startswith("eval_")
    return f"eval/{name.removeprefix('eval_')}" if is_of_evaluation else f"train/{name}"


def check_wandb(run: Outcome, *, folders: int) -> None:
    """The folders of one W&B run have each line once, in order, and the console names them."""
    summed = {shown(name) for name in OF_THE_RUN}
    wanted: list[dict[str, Any]] = [
        {name: one for name, one in numbers.items() if name not in summed}
        | {"train/global_step": step, "_step": place}
        for place, (step, numbers) in enumerate(logged(run))
    ]
    parts = history(run.directory)
    rows = [row for part in parts.values() for row in part]
    assert [{one: row[one] for one in row if not one.endswith(TIMES)} for row in rows] == wanted
    assert (len(parts), len(run_ids(run.directory))) == (folders, 1)
    places = " ".join(str(run.directory / "wandb" / one) for one in sorted(parts))
    assert run.output.count(f" is offline; upload it with\nwandb sync {places}\n") == 1


def check_tensorboard(run: Outcome) -> None:
    """The event files have each point once."""
    (folder,) = (run.directory / "trainer" / "runs").iterdir()
    points = Counter(one for one in points_of(folder) if not one[0].endswith(TIMES))
    assert points == Counter((name, step) for step, line in logged(run) for name in line)


@proves(Kind.KILL, Promise.LOGGED, victim="0", moment="backward")
def test_trackers_have_each_line_once_when_the_main_process_is_lost(run: Launch) -> None:
    # W&B has written nothing of its own by then.
    killed = run(spec_of("0@2:backward", options=(BOTH, "--evaluate=3", "--unflushed")))
    check_survived(killed)
    check_wandb(killed, folders=2)
    check_tensorboard(killed)


@pytest.mark.slow
@proves(Kind.KILL, Promise.LOGGED, victim="0")
@pytest.mark.parametrize("phase", [*STEP_PHASES, "evaluation", "save"])
def test_a_main_process_that_is_lost_in_any_phase_leaves_no_line_out(
    run: Launch, phase: str
) -> None:
    step = 4 if phase in OUTSIDE else 3
    killed = run(spec_of(f"0@{step}:{phase}", options=(BOTH, *SAVING)))
    check_survived(killed)
    check_wandb(killed, folders=2)
    check_tensorboard(killed)


@pytest.mark.slow
@proves(Kind.KILL, Promise.LOGGED, victim="0", moment="between steps")
@pytest.mark.parametrize("event", ["on_step_end", "on_log", "on_evaluate", "on_step_begin"])
def test_a_main_process_that_is_lost_between_steps_leaves_no_line_out(
    run: Launch, event: str
) -> None:
    killed = run(spec_of(options=(BOTH, *SAVING, f"--die={event}@4")))
    assert (killed.directory / "died").exists()
    assert killed.returncode == 0, killed.output[-4000:]
    check_wandb(killed, folders=2)
    check_tensorboard(killed)


@pytest.mark.slow
@proves(Kind.RETURN, Promise.LOGGED, victim="0", moment="1:backward")
def test_trackers_go_back_to_a_main_process_that_returns(run: Launch) -> None:
    spec = spec_of("0@1:backward", options=(BOTH, *SAVING), respawn=5, changes=("+0@4",))
    returned = run(spec)
    check_survived(returned)
    check_wandb(returned, folders=3)
    check_tensorboard(returned)


@pytest.mark.slow
@proves(Kind.KILL, Promise.LOGGED, victim="0, then 1")
@pytest.mark.parametrize(
    "kills", [("0@1:backward", "1@3:forward"), ("0@2:optimizer", "1@2:replay")], ids=" ".join
)
def test_trackers_go_on_after_a_second_loss(run: Launch, kills: tuple[str, str]) -> None:
    killed = run(spec_of(*kills, options=(BOTH, *SAVING)))
    check_survived(killed)
    check_wandb(killed, folders=3)
    check_tensorboard(killed)


@pytest.mark.slow
@proves(Kind.RETURN, Promise.LOGGED, victim="0", moment="twice")
def test_trackers_go_on_when_the_one_that_returned_is_lost_again(run: Launch) -> None:
    kills = ("0@1:backward", "0.1@5:forward")
    spec = spec_of(*kills, options=(BOTH, *SAVING), respawn=5, changes=("+0@3",), steps=8)
    killed = run(spec)
    check_survived(killed)
    check_wandb(killed, folders=4)
    check_tensorboard(killed)


@pytest.mark.slow
@proves(Kind.KILL, Promise.GOES_ON, victim="0", moment="2:backward")
def test_a_tracker_that_fails_on_the_next_main_process_is_silent(run: Launch) -> None:
    killed = run(spec_of("0@2:backward", options=("--flawed", "--report-to=tensorboard")))
    check_survived(killed)
    check_tensorboard(killed)
    said = "Flawed of the Trainer is silent from here on (RuntimeError: no place left)"
    assert killed.output.count(said) == 1


@pytest.mark.slow
@proves(Kind.KILL, Promise.GOES_ON, victim="0", moment="2:backward")
def test_a_run_of_a_callback_of_its_own_is_silent_on_the_next_main_process(run: Launch) -> None:
    killed = run(spec_of("0@2:backward", options=("--own-run",)))
    check_survived(killed)
    for event, error in (("on_log", "AttributeError: "), ("on_step_end", "Error: You must call")):
        said = f"{event} of OwnRun is silent from here on: it is the script's own ({error}"
        assert killed.output.count(said) == 1, killed.output[-4000:]


@pytest.mark.parametrize("error", [ValueError("the loss is nan"), AttributeError("run")])
def test_what_a_callback_raises_on_purpose_ends_the_job(error: Exception) -> None:
    def stop(*args: object) -> None:
        raise error

    callback: Any = TrainerCallback()
    callback.on_log = stop
    trackers._forgive(callback)
    if isinstance(error, ValueError):
        with pytest.raises(ValueError, match="the loss is nan"):
            callback.on_log()
    else:
        assert callback.on_log() is callback.on_log() is None


def test_wandb_of_the_trainer_beside_that_of_the_section_is_refused() -> None:
    job: Any = SimpleNamespace(own_wandb="offline")
    called = SimpleNamespace(callbacks=[WandbCallback()])
    with pytest.raises(ConfigurationError, match="a process has one W&B run"):
        Trackers(job).begin(pytest.fail, called, None, SimpleNamespace(log_history=[]), None)


@pytest.mark.parametrize("was_main", [False, True])
def test_what_accelerate_logs_on_a_later_main_process_is_said_to_be_lost(
    capsys: pytest.CaptureFixture[str], was_main: bool
) -> None:
    accelerator = SimpleNamespace(log_with=["wandb"], trackers=[], is_main_process=True)
    lost = LostTrackers(was_main=was_main)
    for step in range(2):
        lost.log(lambda *args, **given: None, accelerator, {"loss": 1.0}, step=step)
    said = "accelerator.log goes nowhere from here on: the trackers (wandb) were opened by"
    assert capsys.readouterr().err.count(said) == (not was_main)
