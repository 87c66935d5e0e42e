"""Loops of one's own on HF Accelerate: a lost worker comes back with the script's variables."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

pytest.importorskip("accelerate")

from elaswave_plugin.adapters.deepspeed.accelerate.script_record import ScriptRecord
from tests.deepspeed.conftest import Launch, Twin
from tests.deepspeed.harness import FP32_BOUND, SCRIPTS, EngineSpec, check_recovered
from tests.deepspeed.test_hf import printed
from tests.deepspeed.test_hf import spec_of as accelerated
from tests.deepspeed.test_hf_streams import RAGGED, gathered, streaming
from tests.deepspeed.test_join import entered
from tests.deepspeed.test_returns import check_back
from tests.faults.harness import Outcome, check_survived, max_relative_difference
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled

COUNTING = str(SCRIPTS / "hf_counting.py")
STEPS = 9


def test_a_script_without_a_record_is_not_behind() -> None:
    """A Trainer makes the steps by itself: who comes back as rank 0 is its main process."""
    job = MagicMock()
    job.loop.worker.detached = True
    record = ScriptRecord(job, on_caught_up=lambda: None)
    assert not record.is_late
    record.keep(SimpleNamespace(forward=lambda: None))
    assert record.is_late


def spec_of(kills: tuple[str, ...], changes: tuple[str, ...], **more: Any) -> EngineSpec:
    """A script that counts its steps; six of them are an epoch."""
    more = {"steps": STEPS, "respawn": 5, "changes": changes, **more}
    script = more.pop("script", COUNTING)
    return replace(accelerated(*kills, **more), script=script)


def counted(run: Outcome) -> list[dict[str, Any]]:
    """Return the variables of each worker's script at the end."""
    return [json.loads(path.read_text()) for path in run.directory.glob("counted-*.json")]


def check_counted(
    run: Outcome, whole: Outcome, *, workers: int = 4, lost_samples: int = 0, first: int = 0
) -> None:
    """All scripts have the same variables, and have made as much as those of the undisturbed run.

    ``lost_samples``: at most, those of an evaluation that the lost worker had; ``first``: the step
    with which a resumed script begins.
    """
    everyone, undisturbed = counted(run), counted(whole)
    assert everyone == [everyone[0]] * workers
    ours, wanted = everyone[0], undisturbed[0]
    for name in ("step", "epoch"):
        assert ours[name] == wanted[name], name
    assert [one[0] for one in ours["evaluations"]] == [one[0] for one in wanted["evaluations"]]
    sizes, all_sizes = ([one[1] for one in run["evaluations"]] for run in (ours, wanted))
    assert 0 <= sum(all_sizes) - sum(sizes) <= lost_samples
    assert len(ours["means"]) == len(wanted["means"])
    # Its start is not made again, nor what the main process says of steps before it is there.
    assert (run.directory / "begins").read_text() == "begins\n"
    said = [step for step, _, _ in printed(run.output)]
    assert len(said) - len(set(said)) <= sum(kill.startswith("0@") for kill in run.spec.kills)
    assert set(said) >= {*range(first, ours["step"])} - {
        first + int(kill.split("@")[1].split(":")[0]) for kill in run.spec.kills
    }


RETURNS = [
    (1, ("2@1:backward",), ("+2@4",)),
    (2, ("0@1:backward",), ("+0@4",)),
    # The script has seen that the step is complete, and it is rolled back.
    (2, ("1@3:snapshot",), ("+1@6",)),
    # In the second epoch of the data.
    (3, ("0@6:forward",), ("+0@8",)),
    (0, ("3@2:data",), ("+3@7",)),
    (3, ("1@1:reduce", "0@5:backward"), ("+1@4", "+0@8")),
    # Whoever knows the others' calls has passed over them itself.
    (2, ("0@1:backward", "1@5:backward"), ("+0@3", "+1@7")),
]


@proves(Kind.RETURN, Promise.PLANNED)
@pytest.mark.parametrize(("stage", "kills", "changes"), sampled(RETURNS), ids=str)
def test_a_script_that_counts_comes_back_with_its_counts(
    run: Launch,
    twin: Twin,
    reference: Launch,
    stage: int,
    kills: tuple[str, ...],
    changes: tuple[str, ...],
) -> None:
    spec = spec_of(kills, changes, stage=stage)
    killed, whole = run(spec), reference(spec)
    check_recovered(killed, twin=twin(killed), reference=whole)
    assert len(killed.events("fault_fired")) == len(kills)
    check_back(killed)
    check_counted(killed, whole)


@proves(Kind.RETURN, Promise.PLANNED, victim="0", moment="1:backward")
@pytest.mark.slow
def test_who_came_back_is_lost_and_comes_again(run: Launch, reference: Launch) -> None:
    spec = spec_of(("0@1:backward", "0.1@4:reduce"), ("+0@3", "+0@7"))
    killed, whole = run(spec), reference(spec)
    check_survived(killed)
    assert len(killed.events("fault_fired")) == 2
    assert entered(killed) == [(0, 1, 3), (0, 2, 7)]
    assert max_relative_difference(killed, whole) <= FP32_BOUND
    check_counted(killed, whole)


IN_GATHER = """
import os, signal
from accelerate import accelerator
native, count = accelerator.gather, [0]
def gather(tensor):
    count[0] += 1
    me = os.environ["ELASWAVE_SLOT"], os.environ["ELASWAVE_INCARNATION"]
    if me == ("2", "0") and count[0] == 5:
        # Each evaluation has three of these, and it stands in the second one of the second.
        os.kill(os.getpid(), signal.SIGKILL)
    return native(tensor)
accelerator.gather = gather
"""


@proves(Kind.KILL, Promise.CLOSE, victim="2", moment="3:evaluation")
@pytest.mark.parametrize("stage", sampled([1, 3]))
def test_an_evaluation_in_which_a_worker_is_lost_gives_all_the_same(
    run: Launch, reference: Launch, stage: int
) -> None:
    """By it, each script decides whether to save, which it can with all others alone."""
    spec = spec_of((), (), stage=stage, respawn=0, sabotage=IN_GATHER)
    killed, whole = run(spec), reference(replace(spec, sabotage=""))
    check_survived(killed)
    assert killed.output.count("worker 2 (node 0) exited: killed by SIGKILL") == 1
    check_counted(killed, whole, workers=3, lost_samples=4)


@proves(Kind.KILLS, Promise.CLOSE, victim="2 0", moment="3:evaluation 6:backward")
def test_an_evaluation_that_starts_again_is_whole_and_passed_over(
    run: Launch, reference: Launch
) -> None:
    """In `run`, a loss has it made again by those who are left; who comes later has its result."""
    spec = spec_of(
        ("0@6:backward",),
        ("+2@5", "+0@8"),
        options=("--in-run",),
        sabotage=IN_GATHER,
    )
    killed, whole = run(spec), reference(replace(spec, sabotage=""))
    check_survived(killed)
    assert killed.output.count("worker 2 (node 0) exited: killed by SIGKILL") == 1
    assert entered(killed) == [(2, 1, 5), (0, 1, 8)]
    check_counted(killed, whole)


@proves(Kind.KILL, Promise.CLOSE, victim="2", moment="4:save")
@pytest.mark.parametrize("stage", sampled([1, 3]))
def test_a_save_that_names_its_folder_starts_again(
    run: Launch, reference: Launch, stage: int
) -> None:
    """Accelerate refuses a folder that is there, as the one of the attempt that was lost."""
    spec = spec_of(("2@4:save",), (), stage=stage, respawn=0)
    killed, whole = run(spec), reference(spec)
    check_survived(killed)
    assert len(killed.events("fault_fired")) == 1
    check_counted(killed, whole, workers=3)
    names, wanted = (
        sorted(one.name for one in (run.directory / "checkpoints").iterdir())
        for run in (killed, whole)
    )
    assert names == wanted == ["checkpoint_2", "checkpoint_3"]


@proves(Kind.RETURN, Promise.CLOSE, victim="0", moment="1:backward")
def test_calls_of_the_main_process_alone_are_no_difference(run: Launch, reference: Launch) -> None:
    spec = spec_of(("0@1:backward",), ("+0@4",), options=("--by-rank",))
    killed, whole = run(spec), reference(spec)
    check_survived(killed)
    assert entered(killed) == [(0, 1, 4)]
    assert max_relative_difference(killed, whole) <= FP32_BOUND
    check_counted(killed, whole)


@proves(Kind.RETURN, Promise.PLANNED, victim="0", moment="1:backward")
def test_a_resumed_script_comes_back_where_it_was_resumed(run: Launch, reference: Launch) -> None:
    first = reference(spec_of((), (), steps=4, respawn=0))
    options = (f"--resume={first.directory / 'checkpoints'}",)
    spec = spec_of(("0@1:backward",), ("+0@3",), options=options)
    killed, whole = run(spec), reference(spec)
    assert killed.returncode == 0, killed.output[-3000:]
    assert len(killed.events("fault_fired")) == 1 and entered(killed) == [(0, 1, 3)]
    assert max_relative_difference(killed, whole) <= FP32_BOUND
    check_counted(killed, whole, first=4)


@proves(Kind.RETURN, Promise.CLOSE, victim="1", moment="2:backward")
@pytest.mark.parametrize("option", sampled(["--no-dispatch", "--stream=plain"]))
def test_a_script_on_a_stream_comes_back(run: Launch, reference: Launch, option: str) -> None:
    options = (*RAGGED, option)
    spec = streaming("1@2:backward", options=options, respawn=1, changes=("+1@6",))
    killed, whole = run(spec), reference(spec)
    assert killed.returncode == 0, killed.output[-3000:]
    assert len(killed.events("fault_fired")) == 1 and entered(killed) == [(1, 1, 6)]
    assert max_relative_difference(killed, whole) <= FP32_BOUND
    # Whoever came back has gathered what the others have, in the steps that it passed over too.
    assert gathered(killed.directory) == [gathered(whole.directory)[0]] * 4


@proves(Kind.JOIN, Promise.CLOSE)
@pytest.mark.slow
def test_a_fifth_worker_joins_with_the_script_s_counts(run: Launch, reference: Launch) -> None:
    spec = spec_of(
        (),
        ("+4@4",),
        respawn=0,
        accumulation=1,
        options=("--batch-size=2",),
        launcher=("--reserve=1",),
        joiners=1,
    )
    grown, whole = run(spec), reference(spec)
    check_survived(grown)
    assert entered(grown) == [(4, 1, 4)]
    assert max_relative_difference(grown, whole) <= FP32_BOUND
    check_counted(grown, whole, workers=5)


HELD = """
import json, os, time
from elaswave_plugin.loops.guarded_steps import GuardedSteps
begin = GuardedSteps.begin
def waits(path):
    lines = [json.loads(line) for line in open(path) if line.endswith("\\n")]
    return any(e["kind"] == "worker_exited" and e["incarnation"] == 1 for e in lines)
def begin_later(self):
    worker, deadline_s = self.worker, time.monotonic() + 60
    # A checkpoint that is being written is none that a script can load.
    is_redo = worker.view.epoch == 2 and worker.completed == 3
    while is_redo and not waits(worker.config.dir / "events.jsonl"):
        assert time.monotonic() < deadline_s, "nobody comes"
        worker.member.check()
        time.sleep(0.02)
    begin(self)
if os.environ["ELASWAVE_INCARNATION"] == "0":
    GuardedSteps.begin = begin_later
"""


@proves(Kind.RETURN, Promise.NAMED, victim="2", moment="3:backward")
def test_one_that_would_go_on_from_a_checkpoint_of_this_run_stays_away(run: Launch) -> None:
    spec = spec_of(
        ("2@3:backward",), (), respawn=1, options=("--resume=checkpoints",), sabotage=HELD
    )
    killed = run(spec)
    assert killed.returncode == 0, killed.output[-3000:]
    assert "this worker came later, and its script has loaded" in killed.output
    assert len(counted(killed)) == 3
