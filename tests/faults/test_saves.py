"""Workers are killed from outside while they write checkpoints, each of which can be read after."""

import contextlib
import itertools
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from elaswave_plugin.checkpoints.torch_dist import flaw_of
from tests.checkpoints.reader import differences, read_checkpoint
from tests.checkpoints.striker import FULLY_PARALLEL, MEGATRON, TRACKER, Strike, Striker, plan
from tests.checkpoints.struck import (
    check_all,
    check_saves,
    check_struck,
    losses,
    saves_of,
    saving,
)
from tests.convoys import Convoy, convoys, verdicts
from tests.faults.conftest import Launch
from tests.faults.harness import (
    JobSpec,
    Outcome,
    Zygote,
    check_survived,
    left_alive,
    pids_of,
    started,
    started_under,
)
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled
from tests.session import each_once

Undisturbed = Callable[[str], Outcome]

STEPS = 8
MOMENTS = ("open", "exists", "named")
LAYOUTS = {
    "dp4": (),
    "tp2-dp2": ("--tensor-model-parallel-size=2",),
    "pp2-dp2": ("--pipeline-model-parallel-size=2",),
}


def spec_of(layout: str, saves: Path | str = "SAVED") -> JobSpec:
    options = (*LAYOUTS[layout], f"--save={saves}", "--save-interval=1")
    return JobSpec(steps=STEPS, options=options, sabotage=FULLY_PARALLEL, dump="never")


def case(layout: str, iteration: int, moment: str) -> JobSpec:
    """The job with one strike."""
    return replace(spec_of(layout), strikes=(Strike(iteration, moment, iteration % 4),))


@pytest.fixture(scope="module")
def run(
    run: Launch, zygote: Zygote, data: Path, tmp_path_factory: pytest.TempPathFactory
) -> Launch:
    """Launch a job, which is struck from outside while it saves."""
    return saving(run, zygote, data, tmp_path_factory)


@pytest.fixture(scope="module")
def undisturbed(run: Launch) -> Undisturbed:
    """The run of each layout without kills, made once."""
    once = each_once(run)
    return lambda layout: once(spec_of(layout))


@proves(Kind.KILL_IN_SAVE, Promise.WHOLE)
@pytest.mark.parametrize(("layout", "seed"), sampled(list(itertools.product(LAYOUTS, (1, 2)))))
@pytest.mark.timeout(300)
def test_a_kill_in_each_of_eight_saves_with_a_return(
    run: Launch, undisturbed: Undisturbed, layout: str, seed: int
) -> None:
    strikes = plan(seed, range(1, STEPS + 1), MOMENTS, slots=4)
    # Each is back before the next save.
    awaits = tuple((step, step) for step in range(1, STEPS))
    spec = replace(spec_of(layout), respawn=10, awaits=awaits, strikes=strikes)
    check_all(run(spec), undisturbed(layout))


# Of the two groups, so that no stage and no TP position is left without a worker.
@proves(Kind.KILL_IN_SAVE, Promise.WHOLE)
@pytest.mark.parametrize(
    ("layout", "iteration", "moment"),
    convoys(
        itertools.product(LAYOUTS, range(1, STEPS + 1), MOMENTS),
        case,
        most=2,
        victim=lambda strike: strike.slot // 2,
    ),
)
def test_a_kill_in_a_save_without_a_return(
    convoy: Convoy, undisturbed: Undisturbed, layout: str, iteration: int, moment: str
) -> None:
    check_struck(convoy, undisturbed(layout))


@proves(Kind.SABOTAGE, Promise.SEEN)
def test_the_strike_behind_which_a_checkpoint_is_another_is_named(
    run: Launch, undisturbed: Undisturbed
) -> None:
    strikes = Strike(2, "exists", 1), Strike(4, "named", 2)
    whole = run(replace(spec_of("dp4"), strikes=strikes))

    def found() -> list[str]:
        return verdicts(whole, lambda convoy: check_struck(convoy, undisturbed("dp4")))

    assert found() == ["passes", "passes"]
    # Another one than was saved behind the first strike, and before the second.
    common = saves_of(whole) / "iter_0000003" / "common.pt"
    common.write_bytes((saves_of(whole) / "iter_0000005" / "common.pt").read_bytes())
    assert found() == ["fails", "not run"]


@proves(Kind.ALL, Promise.WHOLE)
@pytest.mark.timeout(400)  # ten jobs
def test_all_killed_at_once_in_a_save_leave_a_whole_newest_checkpoint(
    zygote: Zygote, data: Path, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """Ten times, at a random moment of a save: every process of the job, the agents too."""
    dice = random.Random(42)
    reference_saves = saves_of(undisturbed("dp4"))
    for number in range(10):
        saves, directory = tmp_path / f"saves-{number}", tmp_path / f"run-{number}"
        saves.mkdir()
        iteration, delay_s = dice.randrange(2, 5), dice.uniform(0, 0.5)
        # As on slow storage: at either point it is for 0.3 s.
        slow = MEGATRON.held({iteration: "part all"}, directory, limit_s=0.3)
        spec = replace(spec_of("dp4", saves), sabotage=FULLY_PARALLEL + slow)
        with started(spec, zygote=zygote, data=data, directory=directory) as launchers:
            striker = Striker(directory, saves)
            striker.await_save(iteration, lambda: launchers[0].poll() is None)
            time.sleep(delay_s)  # the moment is to be random
            kill_all(launchers[0].pid, directory)
            began = pids_of(directory)
            launchers[0].wait(20)
        assert left_alive(began, limit_s=10.0) == ()
        assert started_under(directory) == ()
        named = int((saves / TRACKER).read_text())
        assert iteration - 1 <= named <= STEPS
        name = f"iter_{named:07d}"
        ours, theirs = (read_checkpoint(folder / name) for folder in (saves, reference_saves))
        assert set(differences(ours, theirs)) == set()
        assert flaw_of(saves / name) is None


def kill_all(launcher: int, directory: Path) -> None:
    """SIGKILL every process of a job; all are stopped first, so that none acts, or starts another.

    Trainers are forked by the zygote, and lead the processes that write for them. What has lost its
    agent is killed by others, so that all are known before the first one is killed.
    """
    known: set[psutil.Process] = set()
    while new := {one for p in (launcher, *pids_of(directory)) for one in family(p)} - known:
        for process in new:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
        for process in new:
            await_stopped(process)
        known |= new
    for process in known:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def await_stopped(process: psutil.Process) -> None:
    """Wait until it runs no more: until then it may fork, whatever was sent to it."""
    deadline_s = time.monotonic() + 20
    with contextlib.suppress(psutil.NoSuchProcess):
        while process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE):
            assert time.monotonic() < deadline_s, f"{process} does not stop"
            time.sleep(0.001)  # nothing tells that a process which is no child has stopped


def family(pid: int) -> list[psutil.Process]:
    """A process and all that it has started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        leader = psutil.Process(pid)
        return [leader, *leader.children(recursive=True)]
    return []


# The file system of the job's checkpoints is full from a step on.
FULL = """
import builtins, errno, os
from megatron.core.dist_checkpointing.strategies import common, filesystem_async
def full(path, *args, **kwargs):
    if "iter_0000004" in str(path) and {condition}:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    return real(path, *args, **kwargs)
"""
# In a writer's process of one worker; in the common file, on rank 0 alone; in torch's own writer.
FULL_DATA = (
    FULL.format(condition="'wb' in args and '__2_' in str(path)")
    + """
real = builtins.open
filesystem_async.open = full
"""
)
FULL_COMMON = (
    FULL.format(condition="True")
    + """
import torch
real_save = torch.save
real = lambda path, obj: real_save(obj, path)
torch.save = lambda obj, path, *args: full(path, obj) if str(path).endswith("common.pt") else (
    real_save(obj, path, *args)
)
"""
)


@proves(Kind.DISK, Promise.WHOLE)
@pytest.mark.parametrize("sabotage", [FULL_DATA, FULL_COMMON], ids=["data", "common"])
def test_a_save_that_the_storage_fails_is_told_and_the_job_goes_on(
    run: Launch, undisturbed: Undisturbed, sabotage: str
) -> None:
    spec = spec_of("dp4")
    full = run(replace(spec, sabotage=spec.sabotage + sabotage))
    assert full.returncode == 0, full.output[-4000:]
    (failed,) = full.events("save_failed")
    assert failed["step"] == 4 and "No space left on device" in failed["reason"]
    said = [line for line in full.output.splitlines() if "was not saved" in line]
    assert len(said) == 1 and "No space left on device" in said[0]
    assert full.events("view_committed")[-1]["ranks"] == [0, 1, 2, 3]
    assert "Traceback" not in full.output
    reference = undisturbed("dp4")
    check_saves(saves_of(full), saves_of(reference), STEPS, without=(4,))
    assert losses(full) == losses(reference)


# Of worker 2, a process of its own that takes no SIGTERM and writes on, until it is killed.
WRITER = """
import os, signal, time
from elaswave_plugin.recovery.phases import Phases
enter = Phases.enter
def with_a_writer(self, phase):
    if (self._slot, self.step, phase) == (2, 3, "data") and not begun:
        begun.append(True)
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            with open("written", "w") as file:
                while True:
                    print(time.time(), file=file, flush=True)
                    time.sleep(0.002)
    enter(self, phase)
begun = []
Phases.enter = with_a_writer
"""


@proves(Kind.KILL, Promise.CLEAN, victim="2", moment="3:backward")
def test_what_a_lost_worker_had_started_writes_no_more_when_the_others_go_on(run: Launch) -> None:
    killed = run(JobSpec(kills=("2@3:backward",), sabotage=WRITER))
    check_survived(killed)
    written = [float(line) for line in (killed.directory / "written").read_text().split()]
    (fired,) = killed.events("fault_fired")
    (recovered,) = [event for event in killed.events("view_committed") if event["epoch"] == 2]
    assert fired["at_s"] - 1 < written[-1] < recovered["time_s"]
    assert not killed.orphans


# As Megatron-LM ends where the tracker names no checkpoint.
LEAVES = """
from elaswave_plugin.adapters.megatron.job import ElasticJob
def leave(self, *args, **kwargs):
    raise SystemExit(0)
ElasticJob.bind = leave
"""


@proves(Kind.SCRIPT_END, Promise.ENDS_WELL)
def test_a_script_that_ends_before_its_first_step_is_not_queued_again(run: Launch) -> None:
    ended = run(JobSpec(sabotage=LEAVES))
    assert ended.returncode == 1
    assert "exit code 0: before it trained a step" in ended.output
    assert "queue it again" not in ended.output and not ended.orphans


# dist_checkpointing.save by other ways than its name in the package, and one that nobody waits for.
PAST = """
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import serialization
dist_checkpointing.save = lambda *args: serialization.save(*args)
from elaswave_plugin.adapters.megatron.compat import whole_saves
records = whole_saves.WholeSaves.records
whole_saves.WholeSaves.records = lambda self: records(self)[1:]
"""
UNAWAITED = """
from megatron.core.dist_checkpointing import serialization
import megatron.core.dist_checkpointing as package
import functools
save = package.save
@functools.wraps(save)
def unawaited(state, folder, **kwargs):
    return save(state, folder, **kwargs)
import elaswave_plugin.adapters.megatron as adapter
attach = adapter.attach
def attached(args):
    job = attach(args)
    ours = package.save
    package.save = lambda state, folder: ours(state, folder, async_sharded_save=True)
    return job
adapter.attach = attached
"""


@proves(Kind.WRONG_SCRIPT, Promise.REFUSED)
@pytest.mark.parametrize(
    ("sabotage", "said"),
    [(PAST, "call dist_checkpointing.save(...)"), (UNAWAITED, "leave async_sharded_save out")],
    ids=["past our save", "unawaited"],
)
def test_a_save_that_would_be_torn_is_refused(
    run: Launch, tmp_path: Path, sabotage: str, said: str
) -> None:
    options = (f"--save={tmp_path / 'saves'}", "--save-interval=2")
    refused = run(JobSpec(options=options, sabotage=sabotage))
    assert refused.returncode == 2, refused.output[-3000:]
    assert sum(said in line for line in refused.output.splitlines()) == 1
    assert "Traceback" not in refused.output
