"""Batch scripts that train the tiny GPT under srun, and what such a job has left behind."""

import contextlib
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.faults.harness import SABOTAGED, JobSpec, Outcome, left_alive, pids_of
from tests.ports import free_port
from tests.schedulers.slurm import OVER, Slurm

PYTHON = f"{sys.executable} -W ignore"
# One task a worker, as under torchrun; or one a node, each a launcher of ours.
TASKS = f"{PYTHON} -m elaswave_plugin.run"
LAUNCHERS = f"{PYTHON} -m elaswave_plugin.cli.main run"
# A whole job, whose four workers import the frameworks on two cores that others share.
JOB_S = 100.0


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
