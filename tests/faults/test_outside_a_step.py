"""Workers lost during an evaluation, a save and the start of the job."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from elaswave_plugin.tracking.events import EVENTS_FILE, read_lines
from tests.faults.conftest import Launch, Reference
from tests.faults.harness import JobSpec, check_equal, check_survived
from tests.proofs import Kind, Promise, proves

EVALUATION = ("--eval-interval=2", "--eval-iters=2")


def validation_lines(output: str) -> list[str]:
    return sorted({line for line in output.splitlines() if "validation" in line})


@proves(Kind.KILL, Promise.EQUAL, victim="1", moment="4:evaluation")
def test_kill_during_an_evaluation_restarts_it(run: Launch, reference: Reference) -> None:
    spec = JobSpec(options=EVALUATION, kills=("1@4:evaluation",))
    killed, undisturbed = run(spec), reference(spec)
    check_equal(killed, undisturbed)
    assert validation_lines(killed.output) == validation_lines(undisturbed.output)
    assert len(validation_lines(killed.output)) == 3


# A loop without `finally`: an interrupted evaluation leaves the model in evaluation mode. The
# victim dies in its snapshot when the others are inside the evaluation, and they have to redo the
# training step.
CARELESS = """
import glob, sys, time, torch
from elaswave_plugin.recovery.phases import Phases
train, fire = torch.nn.Module.train, Phases.fire
torch.nn.Module.train = lambda self, mode=True: (
    self if mode and sys.exc_info()[0] is not None else train(self, mode)
)
def slowly(self, phase):
    if (self.step, phase) == (4, "evaluation"):
        open(f"inside-{self._slot}", "w").close()
    if self._slot == 1 and (self.step, phase) == (3, "snapshot"):
        deadline_s = time.monotonic() + 60
        while len(glob.glob("inside-*")) < 3:
            assert time.monotonic() < deadline_s, "the others do not evaluate"
            time.sleep(0.005)
    fire(self, phase)
Phases.fire = slowly
"""


@proves(Kind.KILL, Promise.EQUAL, victim="1", moment="3:snapshot")
def test_a_step_redone_from_inside_an_evaluation_trains_again(
    run: Launch, reference: Reference
) -> None:
    spec = JobSpec(options=EVALUATION, kills=("1@3:snapshot",), sabotage=CARELESS)
    killed = run(spec)
    check_equal(killed, reference(JobSpec(options=EVALUATION)))
    assert {event["interrupted_step"] for event in killed.events("recovered")} == {4}
    assert {event["restored_step"] for event in killed.events("recovered")} == {3}


# As a model comes that was loaded for evaluation, with model.train() after bind().
BOUND_FOR_EVALUATION = """
from elaswave_plugin.adapters.megatron.job import ElasticJob
bind = ElasticJob.bind
def bound(self, model, *args, **kwargs):
    for chunk in model if isinstance(model, list) else [model]:
        chunk.eval()
    bind(self, model, *args, **kwargs)
    for chunk in model if isinstance(model, list) else [model]:
        chunk.train()
ElasticJob.bind = bound
"""


@proves(Kind.KILL, Promise.EQUAL, victim="1", moment="4:backward")
def test_after_a_loss_modules_are_in_the_modes_that_they_were_in(
    run: Launch, reference: Reference
) -> None:
    killed = run(JobSpec(kills=("1@4:backward",), sabotage=BOUND_FOR_EVALUATION))
    check_equal(killed, reference(JobSpec()))


@proves(Kind.NOTHING, Promise.EQUAL)
def test_more_evaluations_than_validation_batches(run: Launch) -> None:
    options = ("--eval-interval=1", "--eval-iters=1")
    run_of_many = run(JobSpec(steps=12, options=options, dump="never"))
    check_survived(run_of_many)
    assert len(validation_lines(run_of_many.output)) == 12


def saved_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a torch_dist checkpoint by name, read by torch alone."""
    reader = FileSystemReader(str(folder))
    described = reader.read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(one.size, dtype=one.properties.dtype)
        for name, one in described.items()
        if isinstance(one, TensorStorageMetadata)
    }
    load(tensors, storage_reader=reader, no_dist=True)
    return tensors


@proves(Kind.KILL_IN_SAVE, Promise.WHOLE)
@pytest.mark.parametrize("phase", ["save", "finalize"])
def test_kill_during_a_save_keeps_the_last_checkpoint_and_saves_again(
    run: Launch, tmp_path: Path, phase: str
) -> None:
    def spec(name: str) -> JobSpec:
        return JobSpec(options=(f"--save={tmp_path / name}", "--save-interval=2"))

    killed = run(replace(spec("killed"), kills=(f"2@4:{phase}",)))
    undisturbed = run(spec("undisturbed"))
    check_equal(killed, undisturbed)
    for iteration in (2, 4, 6):
        left, right = (
            saved_tensors(tmp_path / name / f"iter_{iteration:07d}")
            for name in ("killed", "undisturbed")
        )
        assert len(left) > 20
        assert left.keys() == right.keys()
        assert all(torch.equal(left[name], right[name]) for name in left)
    tracker = tmp_path / "killed" / "latest_checkpointed_iteration.txt"
    assert tracker.read_text() == "6"


# A save that writes files of the script's own, nothing of Megatron-Core's.
OWN_FILES = """
from elaswave_plugin.adapters.megatron.job import ElasticJob
run = ElasticJob.run
def own(self, work, *, phase):
    def save():
        with open(f"own-{self._worker.slot}-{self._worker.completed}", "a") as file:
            file.write("saved ")
    return run(self, save if phase == "save" else work, phase=phase)
ElasticJob.run = own
"""


@proves(Kind.KILL_IN_SAVE, Promise.WHOLE, victim="2", moment="4:save")
def test_a_kill_in_a_save_of_own_files_comes_once_they_are_written(
    run: Launch, reference: Reference, tmp_path: Path
) -> None:
    options = (f"--save={tmp_path}", "--save-interval=2")
    killed = run(JobSpec(options=options, kills=("2@4:save",), sabotage=OWN_FILES))
    assert killed.returncode == 0, killed.output[-4000:]
    assert [event["phase"] for event in killed.events("fault_fired")] == ["save"]
    written = {path.name: path.read_text() for path in killed.directory.glob("own-*")}
    # The victim's first try, and both of the others.
    assert written["own-2-4"] == "saved " and written["own-1-4"] == "saved saved "
    assert "own-2-6" not in written and written["own-1-6"] == "saved "
    assert killed.trace() == reference(JobSpec()).trace()


@proves(Kind.KILL, Promise.CLEAN, victim="0 1", moment="3:backward 5:reduce")
@pytest.mark.slow
def test_what_a_killed_worker_had_started_is_ended(run: Launch, tmp_path: Path) -> None:
    """Megatron-Core's checkpoint writer starts a process that outlives a killed trainer."""
    options = (f"--save={tmp_path / 'saved'}", "--save-interval=2")
    killed = run(JobSpec(options=options, kills=("0@3:backward", "1@5:reduce")))
    check_survived(killed)
    assert not killed.orphans


# Three seconds of file work without a collective, while a proposal may wait for one second.
SLOW_SAVE = """
import time
from elaswave_plugin.adapters.megatron.job import ElasticJob
run = ElasticJob.run
ElasticJob.run = lambda self, work, *, phase: run(
    self, lambda: (time.sleep(3), work())[1], phase=phase
)
"""


@proves(Kind.KILL_IN_SAVE, Promise.WHOLE, victim="2", moment="3:save")
@pytest.mark.slow
def test_a_long_save_is_waited_for_when_somebody_dies(run: Launch, tmp_path: Path) -> None:
    options = (
        f"--save={tmp_path / 'saved'}",
        "--save-interval=3",
        "--elaswave-quiesce-timeout-s=1",
    )
    killed = run(JobSpec(steps=4, options=options, kills=("2@3:save",), sabotage=SLOW_SAVE))
    check_survived(killed)
    assert [event["slot"] for event in killed.events("fault_fired")] == [2]
    assert len(killed.events("view_committed")) == 2


@proves(Kind.KILL_AT_START, Promise.REQUEUE, victim="1", moment="0:startup")
def test_kill_during_the_start_stops_the_job_and_asks_for_a_requeue(run: Launch) -> None:
    stopped = run(JobSpec(kills=("1@0:startup",)))
    assert stopped.returncode == 75
    assert "queue it again" in stopped.output
    assert any(event["phase"] == "startup" for event in stopped.events("fault_fired"))
    assert not stopped.orphans


@proves(Kind.KILLS, Promise.EQUAL, victim="0 1 3", moment="2:backward 2:reduce 4:gather")
def test_kill_of_all_but_one_worker_finishes_the_run(run: Launch, reference: Reference) -> None:
    spec = JobSpec(kills=("0@2:backward", "1@2:reduce", "3@4:gather"))
    check_equal(run(spec), reference(spec))


@proves(Kind.NOTHING, Promise.EQUAL)
def test_survivors_of_an_undisturbed_run_are_all_of_it(reference: Reference) -> None:
    check_survived(reference(JobSpec()))


# Files of the run directory become folders: nobody can open them any more.
SPOIL = """
import os
from elaswave_plugin.recovery.phases import Phases
enter = Phases.enter
def spoil(self, phase):
    if (self._slot, self.step, phase) == (1, 2, "data"):
        for name in ("steps.jsonl", "ledger.jsonl"):
            path = os.path.join(os.environ["ELASWAVE_DIR"], name)
            if not os.path.isdir(path):
                os.rename(path, path + ".old")
                os.mkdir(path)
    enter(self, phase)
Phases.enter = spoil
"""


@proves(Kind.DISK, Promise.GOES_ON, victim="2", moment="3:backward")
def test_a_run_directory_that_goes_bad_keeps_nobody_away(run: Launch) -> None:
    spec = JobSpec(steps=9, kills=("2@3:backward",), respawn=10, awaits=((5, 1),), dump="never")
    spoiled = run(replace(spec, sabotage=SPOIL))
    assert spoiled.returncode == 0, spoiled.output[-4000:]
    came = [e for e in read_lines(spoiled.directory / EVENTS_FILE) if e["kind"] == "entered"]
    assert [event["slot"] for event in came] == [2]
    said = [line for line in spoiled.output.splitlines() if "are lost (" in line]
    assert len(said) == 2 and all("Is a directory" in line for line in said)
    # And at the end, of which kind and how many.
    (missing,) = [line for line in spoiled.output.splitlines() if "has not written" in line]
    wanted = (
        r"elaswave: worker 2 has not written \d+ lines of \S+ledger.jsonl, \d+ lines of \S+steps"
    )
    assert re.match(wanted, missing), missing
    assert "Traceback" not in spoiled.output and not spoiled.orphans
