"""Losses outside a training step, and checkpoints after them, with Megatron-LM's own functions."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.adapters.megatron_lm.conftest import Launch
from tests.adapters.megatron_lm.harness import (
    EVALUATION,
    NO_EVALUATION,
    TP2_PP2,
    ScriptSpec,
    needs_repository,
    printed,
)
from tests.faults.harness import Outcome, check_equal, check_survived
from tests.faults.test_layer_moves import cuts_after
from tests.faults.test_outside_a_step import saved_tensors
from tests.proofs import Kind, Promise, proves

# Two launches a test, whose checkpoint writers start processes of their own.
pytestmark = [needs_repository, pytest.mark.timeout(300)]

EVALUATING = ScriptSpec(options=EVALUATION)


def saving(name: str) -> tuple[str, ...]:
    """Options that save after 4 of 6 iterations, and at the end."""
    return (*EVALUATION, "--save", "{data}/" + name, "--save-interval", "4")


def check_checkpoints(data: Path, left: str, right: str, *iterations: int) -> None:
    """Two runs have saved the same tensors, bit for bit."""
    for iteration in iterations:
        one, other = (
            saved_tensors(data / name / f"iter_{iteration:07d}") for name in (left, right)
        )
        assert len(one) > 20 and one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


@proves(Kind.KILL, Promise.EQUAL, victim="1", moment="3:evaluation")
def test_a_kill_during_an_evaluation_restarts_it(run: Launch, reference: Launch) -> None:
    killed = run(replace(EVALUATING, kills=("1@3:evaluation",)))
    undisturbed = reference(EVALUATING)
    check_equal(killed, undisturbed)
    assert printed(killed) == printed(undisturbed)
    # After 3 and 6 iterations, and of the validation and the test set at the end.
    assert sum("loss at" in line for line in printed(killed)) == 4


@proves(Kind.KILL, Promise.EQUAL)
@pytest.mark.parametrize("kill", ["3@3:backward", "0@3:forward"])
def test_a_loss_in_the_step_after_an_evaluation_may_move_layers(
    run: Launch, reference: Launch, kill: str
) -> None:
    """Weights that the evaluation gathers, since a forward pass had not yet, have not changed."""
    spec = replace(EVALUATING, options=(*EVALUATION, "--pipeline-model-parallel-size", "2"))
    killed, undisturbed = run(replace(spec, kills=(kill,))), reference(spec)
    check_equal(killed, undisturbed)
    assert printed(killed) == printed(undisturbed)
    assert cuts_after(killed) != [[0, 2, 4]]


@proves(Kind.KILL, Promise.EQUAL, victim="1", moment="2:backward")
@pytest.mark.parametrize(
    "without", [(), ("--use-distributed-optimizer", "--overlap-param-gather")], ids=["named", ""]
)
def test_a_free_worker_evaluates_and_saves_with_the_others(
    run: Launch, data: Path, without: tuple[str, ...]
) -> None:
    """Worker 0 has no place after the loss of 1, and is rank 0, which says what is saved."""
    place = "plain-" if without else ""

    def tp2_dp2(name: str, *kills: str) -> Outcome:
        options = (*EVALUATION, "--save", "{data}/" + place + name, "--save-interval", "4")
        parallel = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
        spec = ScriptSpec(steps=4, options=(*options, *parallel), kills=kills, without=without)
        done = run(spec)
        assert done.returncode == 0, done.output[-4000:]
        return done

    killed, undisturbed = tp2_dp2("free", "1@2:backward"), tp2_dp2("whole")
    check_equal(killed, undisturbed)
    assert printed(killed) == printed(undisturbed)
    assert sorted(killed.events("view_committed")[-1]["ranks"]) == [0, 2, 3]
    check_checkpoints(data, f"{place}free", f"{place}whole", 4)


@pytest.fixture(scope="module")
def saved(run: Launch, data: Path) -> tuple[Outcome, Outcome]:
    """A run that loses a worker in a save, and the undisturbed one; data/four is after 4 steps."""
    killed = run(ScriptSpec(options=saving("killed"), kills=("2@4:save",)))
    undisturbed = run(ScriptSpec(options=saving("undisturbed")))
    shutil.copytree(data / "killed", data / "four")
    (data / "four" / "latest_checkpointed_iteration.txt").write_text("4")
    assert undisturbed.returncode == 0, undisturbed.output[-4000:]
    return killed, undisturbed


@proves(Kind.KILL_IN_SAVE, Promise.WHOLE)
def test_a_kill_during_a_save_saves_again(saved: tuple[Outcome, Outcome], data: Path) -> None:
    killed, undisturbed = saved
    check_equal(killed, undisturbed)
    assert printed(killed) == printed(undisturbed)
    check_checkpoints(data, "killed", "undisturbed", 4, 6)


@proves(Kind.KILL, Promise.WHOLE)
@pytest.mark.parametrize(
    ("nproc", "kills"), [(4, ()), (4, ("0@4:reduce",)), (2, ("1@5:backward",))]
)
def test_any_job_can_load_what_was_saved_after_a_loss(
    run: Launch, saved: tuple[Outcome, Outcome], nproc: int, kills: tuple[str, ...]
) -> None:
    undisturbed = saved[1]
    options = (*EVALUATION, "--load", "{data}/four")
    loaded = run(ScriptSpec(nproc=nproc, options=options, kills=kills))
    assert loaded.returncode == 0, loaded.output[-4000:]
    assert len(loaded.events("fault_fired")) == len(kills)
    assert sorted(loaded.trace()) == [4, 5]
    if nproc == 4:
        assert loaded.trace() == {step: undisturbed.trace()[step] for step in (4, 5)}
    # Two replicas add the same losses in another order.
    assert losses(loaded) == pytest.approx(losses(undisturbed)[4:], rel=1e-5)


def losses(run: Outcome) -> list[float]:
    """The loss of each step."""
    return [float.fromhex(loss) for _, (loss, _, _) in sorted(run.trace().items())]


# The last rank, who logs, dies as it calls this in the log of iteration 4.
DIES_LOGGING = """
import builtins, os, signal
from megatron.core import timers
def dying(call):
    def called(*args, **kwargs):
        from megatron.training import get_args
        logs = call is not print or " iteration        4/" in str(args[:1])
        if os.environ["RANK"] == "{last}" and logs:
            if getattr(get_args(), "curr_iteration", -1) == 3:
                os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **kwargs)
    return called
{owner}.{name} = dying({owner}.{name})
"""
TIMES = ("--log-timers-to-tensorboard", "--tensorboard-dir", "{data}/times")


@proves(Kind.KILL, Promise.LOGGED)
@pytest.mark.parametrize(
    ("nproc", "options", "owner", "name"),
    [
        # TP x PP: whoever was in a group with it has no place any more, and runs no timers.
        (8, (*NO_EVALUATION, *TP2_PP2, "--timing-log-level", "1"), "builtins", "print"),
        (4, (*NO_EVALUATION, *TIMES), "timers.Timers", "write"),
    ],
)
def test_a_kill_of_who_logs_logs_again(
    run: Launch, reference: Launch, nproc: int, options: tuple[str, ...], owner: str, name: str
) -> None:
    spec = ScriptSpec(nproc=nproc, options=options)
    dies = DIES_LOGGING.format(last=nproc - 1, owner=owner, name=name)
    killed, undisturbed = run(replace(spec, sabotage=dies)), reference(spec)
    assert killed.returncode == 0, killed.output[-4000:]
    assert f"worker {nproc - 1} (node 0) exited: killed by SIGKILL" in killed.output
    assert killed.trace() == undisturbed.trace()
    # What it had printed before it died, its successor prints again.
    assert list(dict.fromkeys(printed(killed))) == printed(undisturbed)
    assert "Traceback" not in killed.output


@proves(Kind.KILL_AT_START, Promise.REQUEUE, victim="1", moment="0:startup")
def test_a_kill_during_the_start_stops_the_job_and_asks_for_a_requeue(run: Launch) -> None:
    stopped = run(ScriptSpec(kills=("1@0:startup",)))
    assert stopped.returncode == 75
    assert "queue it again" in stopped.output
    assert any(event["phase"] == "startup" for event in stopped.events("fault_fired"))
    assert not stopped.orphans


@proves(Kind.WRONG_INPUT, Promise.REFUSED)
def test_an_argument_that_is_not_carried_is_one_sentence(run: Launch) -> None:
    more = ("--skip-train", "--data-parallel-random-init")
    refused = run(ScriptSpec(options=(*EVALUATION, *more)))
    assert refused.returncode == 2
    assert all(option in refused.output for option in more) and "Traceback" not in refused.output
    assert refused.output.count("elaswave: ") == 1


@proves(Kind.NOTHING, Promise.EQUAL)
def test_survivors_of_an_undisturbed_run_are_all_of_it(reference: Launch) -> None:
    check_survived(reference(EVALUATING))
