"""An hour of the shipped array job on a real Slurm that loses workers, agents and nodes by a seed.

python -m tests.schedulers.soak [--minutes 60] [--seed 0] [--out FOLDER]

The undisturbed run of as many steps is made beside it. What fails is printed; exit code 1. A whole
hour writes benchmarks/soak.json.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.circumstances import circumstances
from tests.faults.harness import (
    ROOT,
    SABOTAGED,
    JobSpec,
    Outcome,
    Zygote,
    left_alive,
    started,
    started_under,
)
from tests.faults.matrix import write_text
from tests.schedulers.batch import left_in_shared_memory
from tests.schedulers.slurm import OVER, Slurm
from tests.schedulers.soak_losses import Losses, SoakedJob
from tests.schedulers.soak_verdict import by_kind, failures, failures_of_losses, rows_of
from tests.schedulers.soak_watch import Watch

RESULT = ROOT / "benchmarks" / "soak.json"
ARRAY = ROOT / "examples" / "slurm" / "array.sbatch"
HOUR_MINUTES = 60.0
NODES = 4
# So long before the last step nothing is lost any more: a lost node has to come back.
TAIL_S = 120.0
END_S, TASK_END_S = 300.0, 30.0
# Of the undisturbed run: other work may share the machine.
STEP_LIMIT_S = 1.0
# No step begins before its time: the job ends when it should, however fast the machine is.
PACE = """
import time
from elaswave_plugin.loops.guarded_steps import GuardedSteps
begin_now = GuardedSteps.begin
def begin_in_time(self):
    begin_now(self)
    worker = self.worker
    due_s = {began_s} + {pace_s} * worker.completed
    worker.member.announce("a slow batch")
    try:
        while time.time() < due_s:
            worker.member.check()
            time.sleep(0.01)
    finally:
        worker.member.announce(None)
GuardedSteps.begin = begin_in_time
"""


def main() -> int:
    """Soak; exit code 1 where something does not hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=HOUR_MINUTES)
    parser.add_argument("--seed", type=int, default=0, help="which losses, in which order")
    parser.add_argument("--pace-s", type=float, default=0.25, help="seconds from step to step")
    parser.add_argument("--out", type=Path, help="new folder for the files of the run")
    options = parser.parse_args()
    head = circumstances("tests.schedulers.soak")
    folder = options.out or Path(tempfile.mkdtemp(prefix="elaswave-soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    result = {**head, **soak(options, folder)}
    is_whole = options.minutes >= HOUR_MINUTES
    (RESULT if is_whole else folder / "soak.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({name: one for name, one in result.items() if name != "rows"}, indent=1))
    if result["failures"]:
        print("\n".join(["failed:", *result["failures"], f"its files: {folder}"]))
    return int(bool(result["failures"]))


def soak(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run the job and the undisturbed one in a folder, and judge."""
    write_text(folder / "data")
    steps = int(60 * options.minutes / options.pace_s)
    spec = JobSpec(nproc=NODES, nodes=NODES, steps=steps, dump="last", respawn=1000)
    watch = Watch(folder / "jobs")
    with (
        Slurm(NODES) as slurm,
        log_kept(slurm, folder),
        ThreadPoolExecutor(1) as beside,
    ):
        calm = beside.submit(undisturbed, spec, folder)
        job = SoakedJob(folder / "run")
        losses = Losses(options.seed, slurm, job, watch, width=NODES)
        try:
            orphans = play(slurm, spec, losses, options, folder)
        except AssertionError as error:
            return {"losses": len(losses.losses), "failures": [str(error)]}
    run = Outcome(
        spec=spec,
        directory=folder / "run",
        returncode=0,
        output=(folder / "output").read_text(),
        seconds=0.0,
        orphans=orphans,
    )
    # For people, where something grows.
    (folder / "samples.json").write_text(json.dumps([watch.samples, watch.files]))
    rows = rows_of(run.files, losses.losses)
    reference = calm.result()
    found = [
        *failures(run, reference, losses.losses, watch),
        *failures_of_losses(rows, is_whole=options.minutes >= HOUR_MINUTES),
    ]
    return {
        "seed": options.seed,
        "minutes": options.minutes,
        "pace_s": options.pace_s,
        "steps": steps,
        "losses": len(rows),
        "returns": sum(row["back_s"] is not None for row in rows),
        "kinds": by_kind(rows),
        "views": len(run.events("view_committed")),
        "second_and_last_quarter": watch.growth(),
        "files": watch.file_growth(),
        "failures": found,
        "rows": rows,
    }


def play(
    slurm: Slurm, spec: JobSpec, losses: Losses, options: argparse.Namespace, folder: Path
) -> tuple[int, ...]:
    """Run the job to its end, with its losses; returns the processes that are left.

    Raises AssertionError where it does not live, or leaves files.
    """
    in_memory, began_s, seconds = set(os.listdir("/dev/shm")), time.time(), 60 * options.minutes
    directory = folder / "run"
    pace = PACE.format(began_s=began_s, pace_s=options.pace_s)
    array = slurm.submit_file(
        ARRAY,
        *(str(SABOTAGED), pace, spec.script),
        *spec.arguments(folder / "data", directory),
        options=(f"--array=0-{NODES - 1}", f"--output={folder}/output"),
        folder=folder,
        env={
            "NNODES": str(NODES),
            "RUN_DIR": str(directory),
            "OMP_NUM_THREADS": "1",
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        },
    )
    losses.draw_until(began_s + seconds - TAIL_S, spare_after_s=began_s + seconds / 2)
    losses.await_end(END_S + TAIL_S)
    tasks = [f"{array}_{number}" for number in range(NODES)]
    ends = {task: slurm.wait_for(task, *OVER, limit_s=TASK_END_S) for task in tasks}
    assert {*ends.values()} == {"COMPLETED"}, ends
    codes = [slurm.exit_code(task) for task in tasks]
    assert not any(codes), f"exit codes of the tasks: {codes}"
    ours = (slurm.processes(int(slurm.shown(task)["JobId"])) for task in tasks)
    left = [one.pid for found in ours for one in found] + [*started_under(directory)]
    assert not (files := left_in_shared_memory(in_memory)), f"left in /dev/shm: {files}"
    return left_alive(tuple(left), limit_s=TASK_END_S)


def undisturbed(spec: JobSpec, folder: Path) -> Outcome:
    """Run the same job on one node that nothing happens to; raises AssertionError."""
    calm, directory = replace(spec, nodes=1, respawn=0), folder / "undisturbed"
    zygote = Zygote(folder)
    try:
        where = {"data": folder / "data", "directory": directory}
        with started(calm, zygote=zygote, **where) as (launcher,):
            code = launcher.wait(timeout=END_S + STEP_LIMIT_S * spec.steps)
    finally:
        zygote.close()
    output = (directory / "output").read_text()
    assert code == 0, output[-4000:]
    return Outcome(spec=calm, directory=directory, returncode=0, output=output, seconds=0.0)


@contextmanager
def log_kept(slurm: Slurm, folder: Path) -> Iterator[None]:
    """Keep what Slurm has written: its own folder goes."""
    try:
        yield
    finally:
        for path in slurm.folder.glob("*.log"):
            shutil.copy(path, folder)


if __name__ == "__main__":
    raise SystemExit(main())
