"""Batch scripts that train under srun, ours and the shipped ones, and what they leave behind."""

import contextlib
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from elaswave_plugin.tracking.events import EVENTS_FILE, STEPS_FILE, read_lines
from tests.faults.harness import ROOT, SABOTAGED, JobSpec, Outcome, left_alive, pids_of
from tests.ports import free_port
from tests.schedulers.slurm import OVER, Slurm

PYTHON = f"{sys.executable} -W ignore"
# One task a worker, as under torchrun; or one a node, each a launcher of ours.
TASKS = f"{PYTHON} -m elaswave_plugin.run"
LAUNCHERS = f"{PYTHON} -m elaswave_plugin.cli.main run"
# A whole job, whose four workers import the frameworks on two cores that others share.
JOB_S = 100.0
SHIPPED = ROOT / "examples" / "slurm"
# All wait in the batches of these steps, once they were announced, until a step's file is there.
HOLD = """
import os, time
from elaswave_plugin.loops.guarded_steps import GuardedSteps
begin_now = GuardedSteps.begin
def begin_when_told(self):
    begin_now(self)
    member, path = self.worker.member, {holds}.get(self.worker.completed)
    if path is None:
        return
    member.announce("a slow batch")
    try:
        deadline_s = time.monotonic() + 150
        while not os.path.exists(path):
            member.check()
            assert time.monotonic() < deadline_s, "nobody said that it may go on"
            time.sleep(0.005)
    finally:
        member.announce(None)
GuardedSteps.begin = begin_when_told
"""
# Who is told to leave makes a file.
TELL = """
from elaswave_plugin.trainer.member import Member
take = Member._on_frame
def tell(self, frame):
    if frame["t"] == "notice":
        open({path!r}, "w").close()
    take(self, frame)
Member._on_frame = tell
"""


def hold(holds: Mapping[int, Path], *, told: Path | None = None) -> str:
    """Statements by which all wait in these steps for files; ``told``: made by who is to leave."""
    held = HOLD.format(holds={step: str(path) for step, path in holds.items()})
    return held + (TELL.format(path=str(told)) if told else "")


@dataclass(frozen=True, slots=True)
class Submitted:
    """A job in the queue, whose output goes to a file of its run directory."""

    spec: JobSpec
    number: int
    directory: Path

    @property
    def output(self) -> str:
        """The words of all its processes so far."""
        path = self.directory / "output"
        return path.read_text() if path.exists() else ""

    def outcome(self, slurm: Slurm, limit_s: float = JOB_S) -> Outcome:
        """Wait for its end."""
        slurm.wait_for(self.number, *OVER, limit_s=limit_s)
        return Outcome(
            spec=self.spec,
            directory=self.directory,
            returncode=slurm.exit_code(self.number),
            output=self.output,
            seconds=0.0,
            orphans=left_alive(pids_of(self.directory), limit_s=10.0),
        )


def submit(
    slurm: Slurm,
    spec: JobSpec,
    *,
    data: Path,
    directory: Path,
    by: str = TASKS,
    options: Sequence[str] = (),
    start: str = "srun",
    before: str = "",
) -> Submitted:
    """Queue a specification; ``options`` are sbatch's; ``before``: statements."""
    directory.mkdir(exist_ok=True)
    width = spec.nproc // spec.nodes
    port = f"--master-port={free_port()}"
    program = [*([str(SABOTAGED), before] if before else []), spec.script]
    words = shlex.join([*program, *spec.arguments(data, directory)])
    if by == LAUNCHERS:
        place = f'--node-rank "$SLURM_NODEID" --nnodes={spec.nodes} --nproc-per-node={width} {port}'
        ours = shlex.join([f"--dir={directory}", *spec.launcher])
        line = f"exec {by} {place} --master-addr=127.0.0.1 {ours} {words}"
        command, tasks = f"bash -c {shlex.quote(line)}", 1
    else:
        command, tasks = f"{by} {words}", width
    header = (f"--nodes={spec.nodes}", f"--ntasks-per-node={tasks}", *options)
    meeting = f"MASTER_ADDR=127.0.0.1 MASTER_PORT={port.partition('=')[2]}"
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {option}" for option in header),
        f"export {meeting} OMP_NUM_THREADS=1",
        f"exec {start} {command}",
    ]
    script = "\n".join(lines) + "\n"
    (directory / "batch.sh").write_text(script)  # for people, where a test fails
    number = slurm.submit(script, output=directory / "output")
    return Submitted(spec, number, directory)


@dataclass(frozen=True, slots=True)
class Shipped:
    """A job of a script of examples/slurm, which runs as it is, in a folder of its own."""

    slurm: Slurm
    spec: JobSpec
    number: int
    folder: Path

    @property
    def directory(self) -> Path:
        """The run directory."""
        return self.folder / "run"

    @property
    def output(self) -> str:
        """The words of all its processes so far."""
        files = (self.folder / "output", *sorted(self.directory.glob("node-*.out")))
        return "".join(path.read_text() for path in files if path.exists())

    def events(self, kind: str) -> list[dict[str, Any]]:
        """The events of a kind so far."""
        return [one for one in read_lines(self.directory / EVENTS_FILE) if one["kind"] == kind]

    @property
    def step(self) -> int:
        """The last step that some worker has completed; -1: none."""
        lines = read_lines(self.directory / STEPS_FILE)
        return max((line["step"] for line in lines), default=-1)

    def wait(self, reached: Callable[[], bool], what: str, limit_s: float = JOB_S) -> None:
        """Wait for something that only files show."""
        deadline_s = time.monotonic() + limit_s
        while not reached():
            said = f"{self.output[-4000:]}; slurmctld: {self.slurm.log()}"
            assert time.monotonic() < deadline_s, f"no {what}: {said}"
            time.sleep(0.05)

    def wait_for_workers_back(self, count: int) -> None:
        """Wait until so many workers are built that take the places of others."""
        self.wait(
            lambda: sum(bool(one["incarnation"]) for one in self.events("worker_ready")) == count,
            f"{count} workers that are back",
        )

    def launcher_of(self, node: int) -> psutil.Process:
        """The launcher that has begun a node of the job."""
        begun = [one for one in self.events("job_started") if one["node"] == node]
        return psutil.Process(begun[-1]["launcher_pid"])

    def outcome(self) -> Outcome:
        """All that it has left, once it has ended."""
        return Outcome(
            spec=self.spec,
            directory=self.directory,
            returncode=0,
            output=self.output,
            seconds=0.0,
            orphans=left_alive(pids_of(self.directory), limit_s=10.0),
        )


def submit_shipped(
    slurm: Slurm,
    script: str,
    spec: JobSpec,
    *options: str,
    data: Path,
    folder: Path,
    before: str = "",
    programs: Path | None = None,
) -> Shipped:
    """Queue a shipped script; ``options``: sbatch's; ``programs``: a folder of some, for PATH."""
    folder.mkdir(exist_ok=True)
    directory = folder / "run"
    directory.mkdir()
    program = [*([str(SABOTAGED), before] if before else []), spec.script]
    path = [*([str(programs)] if programs else []), str(Path(sys.executable).parent)]
    number = slurm.submit_file(
        SHIPPED / script,
        *program,
        *spec.arguments(data, directory),
        options=(f"--output={folder}/output", *options),
        folder=folder,
        env={
            "NNODES": str(spec.nodes),
            "NPROC_PER_NODE": str(spec.nproc // spec.nodes),
            "RUN_DIR": str(directory),
            "OMP_NUM_THREADS": "1",
            "PATH": os.pathsep.join([*path, os.environ["PATH"]]),
        },
    )
    return Shipped(slurm, spec, number, folder)


def left_in_shared_memory(before: set[str]) -> set[str]:
    """Files of /dev/shm that are new and that no living process has mapped or open.

    Other work on the machine has its own there, which is in use.
    """
    new = set(os.listdir("/dev/shm")) - before
    return {name for name in new if not _in_use(f"/dev/shm/{name}")}


def _in_use(path: str) -> bool:
    for process in Path("/proc").glob("[0-9]*"):
        # Processes end meanwhile, and files are closed.
        with contextlib.suppress(OSError):
            if path in (process / "maps").read_text():
                return True
            for opened in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if os.readlink(opened) == path:
                        return True
    return not os.path.exists(path)
