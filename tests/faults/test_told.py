"""Each request of `told.py` to end a job: all leave together, with a checkpoint if asked for."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from elaswave_plugin.launch.torchrun import UNHEARD
from elaswave_plugin.observer.run import read_run
from tests.deepspeed import hf_runs
from tests.deepspeed.checkpoints import parts, same
from tests.deepspeed.harness import EngineSpec
from tests.deepspeed.test_save import SAVING
from tests.faults import own_scripts
from tests.faults.foreign_launchers import TORCHRUN
from tests.faults.harness import JobSpec, Outcome, left_alive, pids_of, started
from tests.faults.test_last_checkpoint import SAVE_S
from tests.faults.test_outside_a_step import saved_tensors
from tests.faults.test_signals import wait_for_step
from tests.faults.told import (
    BEFORE,
    BETWEEN,
    CASES,
    COMPILING,
    CORE,
    DEEPSPEED,
    EVALUATION,
    FIRST,
    JIT,
    OURS,
    SAVE,
    TO_ALL,
    TRAINER,
    Becomes,
    Case,
)
from tests.ports import free_port
from tests.proofs import Kind, Promise, proves
from tests.session import Zygotes

START_S = 120.0
STEPS = 60
# Worker 0 makes a file in a phase, and waits there until it is told to leave, or ended.
HOLD = """
import os, time
from elaswave_plugin.loops.guarded_steps import GuardedSteps
from elaswave_plugin.recovery.phases import Phases
from elaswave_plugin.trainer.member import Member
members = []
join, enter, announced = Member.join, Phases.enter, GuardedSteps.announced
def hold(phase, step):
    member = members[0]
    if member.slot or (phase, step) != {place} or os.path.exists({mark!r}):
        return
    open({mark!r}, "w").close()
    deadline_s = time.monotonic() + 60
    while not member.told_to_leave and not os.path.exists({mark!r} + ".unheard"):
        assert time.monotonic() < deadline_s, "nobody told worker 0 to leave"
        time.sleep(0.005)
def held_join(self, *args, **given):
    members.append(self)
    hold("join", 0)
    return join(self, *args, **given)
def held_enter(self, phase):
    hold(phase, self.step)
    enter(self, phase)
def held_announced(self, work, phase):
    def held():
        hold(phase, self.worker.completed)
        return work()
    return announced(self, held, phase)
Member.join, Phases.enter, GuardedSteps.announced = held_join, held_enter, held_announced
"""
HOLD_COMPILING = """
from torch._dynamo.callback import callback_handler
callback_handler.register_start_callback(lambda *args: members and hold("compile", 0))
"""
HELD = """
{hold}
import runpy, sys
sys.argv[0] = {script!r}
sys.path[0] = os.path.dirname({script!r})
runpy.run_path({script!r}, run_name="__main__")
"""
PLACES = {
    BEFORE: ("join", 0),
    COMPILING: ("compile", 0),
    FIRST: ("backward", 0),
    BETWEEN: ("backward", 6),
    EVALUATION: ("evaluation", 6),
    SAVE: ("save", 6),
}


def wait_for(path: Path, output: Path) -> None:
    """Wait until the file is there."""
    deadline_s = time.monotonic() + START_S
    while not path.exists():
        assert time.monotonic() < deadline_s, output.read_text()[-4000:]
        time.sleep(0.02)  # the file is all that the worker shows


@contextmanager
def under(
    launcher: str, spec: JobSpec, *, data: Path, directory: Path
) -> Iterator["subprocess.Popen[bytes]"]:
    """Start a job under a launcher that is not ours."""
    directory.mkdir()
    port = free_port()
    command = [*TORCHRUN, f"--nproc-per-node={spec.nproc}", f"--master-port={port}", "-m"]
    if launcher == DEEPSPEED:
        program = str(Path(sys.executable).with_name("deepspeed"))
        command = [program, f"--num_gpus={spec.nproc}", f"--master_port={port}", "--module"]
    # DeepSpeed's launcher puts a word of its own before a script's arguments.
    script = directory / "held.py"
    script.write_text(HELD.format(hold=spec.sabotage, script=spec.script))
    words = [str(script), *spec.arguments(data, directory)]
    more = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "ELASWAVE_NOTICE_TIMEOUT_S": "60"}
    with (directory / "output").open("wb") as output:
        process = subprocess.Popen(
            [*command, "elaswave_plugin.run", *words],
            stdout=output,
            stderr=output,
            cwd=directory,
            env={**os.environ, **more},
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait(20)


def spec_of(case: Case, folder: Path) -> JobSpec:
    """The job of a case, which saves its last checkpoint below FOLDER."""
    mark = folder / "mark"
    sabotage = HOLD.format(place=PLACES[case.phase], mark=str(mark))
    sabotage += HOLD_COMPILING if case.phase == COMPILING else ""
    own = (f"--notice-timeout-s={SAVE_S:g}",)
    if case.told == "a notice file":
        own = (*own, f"--notice-file={folder / 'notice'}")
    nproc = 4 if case.launcher == OURS else 2
    given: dict[str, Any] = {"nproc": nproc, "steps": STEPS, "dump": "never"}
    given |= {"launcher": own, "sabotage": sabotage}
    if case.loop == CORE:
        options = (f"--save={folder / 'saved'}",) if case.saves else ()
        options += ("--eval-interval=6",) if case.phase == EVALUATION else ()
        options += ("--save-interval=6",) if case.phase == SAVE else ()
        changes = own_scripts.COMPILES if case.phase == COMPILING else ()
        return JobSpec(script=own_scripts.write(folder, *changes), options=options, **given)
    if case.loop in (TRAINER, JIT):
        options = ("--jit",) if case.loop == JIT else ()
        options += ("--evaluate=6",) if case.phase == EVALUATION else ()
        options += ("--save=6",) if case.phase == SAVE else ()
        options += ("--compile=eager",) if case.phase == COMPILING else ()
        return hf_runs.spec_of(options=options, **given)
    spec = EngineSpec(script=SAVING, options=(f"--save={folder}", "--every=1000"), **given)
    settings = {"last_checkpoint_dir": str(folder / "saved")}
    settings |= spec.config(folder / "run")["elaswave"]
    return replace(spec, settings=json.dumps({"elaswave": settings}))


def undisturbed(case: Case, nproc: int, folder: Path) -> JobSpec:
    """The same job that nobody tells anything, which saves to FOLDER after each step."""
    if case.loop == CORE:
        return JobSpec(
            nproc=nproc,
            steps=STEPS,
            dump="never",
            options=(f"--save={folder}", "--save-interval=1"),
        )
    if case.loop == JIT:
        # Its rates follow the number of its steps.
        options = ("--save=1", "--keep-all")
        return hf_runs.spec_of(nproc=nproc, steps=STEPS, dump="never", options=options)
    options = (f"--save={folder}", "--every=1")
    return EngineSpec(nproc=nproc, steps=12, dump="never", script=SAVING, options=options)


def content(case: Case, folder: Path, step: int) -> dict[str, Any]:
    """Load all that a checkpoint after so many steps has, by every worker that has written."""
    if case.loop == CORE:
        return {**saved_tensors(folder / f"iter_{step:07d}")}
    if case.loop == JIT:
        folder = folder / f"checkpoint-{step}"
    return parts(folder / f"global_step{step}")


Wanted = Callable[[Case, int, int], dict[str, Any]]


@pytest.fixture(scope="session")
def wanted(once: Callable[[JobSpec], Outcome], tmp_path_factory: pytest.TempPathFactory) -> Wanted:
    """The content of a checkpoint of the undisturbed job of so many workers."""
    folders: dict[tuple[str, int], Path] = {}

    def of(case: Case, nproc: int, step: int) -> dict[str, Any]:
        key = case.loop, nproc
        if key not in folders:
            folder = tmp_path_factory.mktemp("undisturbed")
            run = once(undisturbed(case, nproc, folder))
            folders[key] = run.directory / "trainer" if case.loop == JIT else folder
        return content(case, folders[key], step)

    return of


def saved_steps(case: Case, folder: Path) -> set[int]:
    """The steps after which there is a checkpoint that a resume would find."""
    if case.loop in (TRAINER, JIT):
        found = (folder / "run" / "trainer").glob("checkpoint-*")
        return {int(one.name.rpartition("-")[2]) for one in found}
    names = ("latest", "latest_checkpointed_iteration.txt")
    trackers = [folder / "saved" / name for name in names if (folder / "saved" / name).exists()]
    return {int(one.read_text().rpartition("step")[2]) for one in trackers}


def tell(case: Case, folder: Path, launcher_pid: int) -> None:
    """Say it to the job."""
    if case.told == "a notice file":
        (folder / "notice").write_text("a maintenance window\n")
    elif case.told == "elaswave drain":
        command = [sys.executable, "-m", "elaswave_plugin.cli.main", "drain"]
        told = [*command, "--node", "0", str(folder / "run")]
        done = subprocess.run(told, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
    elif case.told == TO_ALL:
        launcher = psutil.Process(launcher_pid)
        pids = {one.pid for one in launcher.children(recursive=True)}
        for pid in (*(pids | {*pids_of(folder / "run")}) - {launcher_pid}, launcher_pid):
            os.kill(pid, signal.SIGTERM)
    else:
        os.kill(launcher_pid, signal.Signals[case.told])


def check(case: Case, run: Outcome, folder: Path, code: int, wanted: Wanted) -> None:
    """Check what has become of the job."""
    done = 1 + max((line["step"] for line in run.files.steps), default=-1)
    assert done < STEPS, run.output[-3000:]
    if case.launcher == OURS:
        assert code == 128 + signal.SIGTERM or (case.told, code) == ("SIGUSR1", 138), run.output
    # Those that the loop's own interval asks for.
    own = {6} if case.phase == SAVE and case.loop in (TRAINER, JIT) else set()
    said = "every worker was told to leave, and they write a last checkpoint first"
    if case.becomes is Becomes.SAVED:
        assert said in run.output
        assert saved_steps(case, folder) == {done} | own
        attempts = {(line["step"], line["epoch"]) for line in run.files.ledger}
        assert len({step for step, _ in attempts}) == done
        saved = folder / ("run/trainer" if case.loop == JIT else "saved")
        found, nproc = content(case, saved, done), run.spec.nproc
        # DeepSpeed: a file of each worker, and one of all.
        assert len(found) > (20 if case.loop == CORE else nproc)
        assert same(found, wanted(case, nproc, done))
    else:
        assert said not in run.output and saved_steps(case, folder) <= own
    # torchrun raises what it was told.
    assert run.output.count("Traceback (most") == run.output.count(".SignalException: Process ")


def check_stays(directory: Path) -> None:
    """Check that one worker goes on, as the last view of so many that came one by one says."""
    views = read_run(directory).of_kind("view_committed")
    assert len(views[-1]["ranks"]) == 1


@proves(Kind.ALL_LEAVE, Promise.WHOLE)
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_told_to_end(
    case: Case, zygotes: Zygotes, data: Path, tmp_path: Path, wanted: Wanted
) -> None:
    spec, directory = spec_of(case, tmp_path), tmp_path / "run"
    mark = tmp_path / "mark"
    if case.launcher == OURS:
        zygote = zygotes(spec.preload)
        with started(spec, zygote=zygote, data=data, directory=directory) as (launcher,):
            wait_for(mark, directory / "output")
            tell(case, tmp_path, launcher.pid)
            if case.becomes is Becomes.STAYS:
                wait_for_step(directory, 20)
                check_stays(directory)
                return
            code = launcher.wait(SAVE_S)
    else:
        with under(case.launcher, spec, data=data, directory=directory) as process:
            wait_for(mark, directory / "output")
            # Those of a launcher that dies are nobody's children.
            below = psutil.Process(process.pid).children(recursive=True)
            try:
                tell(case, tmp_path, process.pid)
                code = process.wait(SAVE_S)
                if case.becomes is Becomes.UNHEARD:
                    mark.with_name("mark.unheard").touch()
                    wait_for_step(directory, 20)
                    assert UNHEARD in (directory / "output").read_text()
                    return
                assert left_alive(pids_of(directory), limit_s=20.0) == ()
            finally:
                for one in below:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        one.kill()
    assert left_alive(pids_of(directory), limit_s=20.0) == ()
    output = (directory / "output").read_text()
    run = Outcome(spec=spec, directory=directory, returncode=0, output=output, seconds=0)
    check(case, run, tmp_path, code, wanted)
