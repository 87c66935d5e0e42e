"""Times the loss of a worker, of a node and of the leader's node, of four nodes here.

python -m benchmarks.node_loss [--runs 5] [--json FILE]

From SIGKILL, from outside, until all that are left have completed the next step; beyond the median
step after it. A worker is killed alone; a node by its launcher, with which all of it ends.
"""

import argparse
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.circumstances import circumstances
from benchmarks.measurement import Bench, bench, options_parser, run_benchmark
from benchmarks.recovery import median_and_max
from elaswave_plugin.demo import jobs
from elaswave_plugin.demo.jobs import JobFailed, running
from elaswave_plugin.errors import EXIT_FAILED
from elaswave_plugin.observer.run import RunFiles, first_step_done_s, read_run
from elaswave_plugin.tracking.events import EVENTS_FILE, STEPS_FILE, read_lines

NODES, WIDTH = 4, 2
STEPS, KILL_STEP = 60, 12
LIMIT_S = 120.0
# The node that the victim is on; the leader's is node 0.
VICTIMS = {"worker": 1, "node": 1, "leader's node": 0}


def node_commands(running_bench: Bench, directory: Path) -> Iterator[list[str]]:
    """The command of each node."""
    options = running_bench.options
    one = jobs.job_command(
        options,
        socket_path=running_bench.socket_path,
        data=running_bench.folder / "data" / "text",
        directory=directory,
    )
    one[one.index("--nproc-per-node") + 1] = str(WIDTH)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    place = one.index("--nproc-per-node")
    for node in range(NODES):
        where = [f"--nnodes={NODES}", f"--node-rank={node}", f"--master-port={port}"]
        yield [*one[:place], *where, *one[place:]]


def one_run(running_bench: Bench, name: str, victim: str) -> dict[str, Any]:
    """Kill the victim in a run; raises JobFailed where the job does not survive that."""
    directory = running_bench.folder / name
    with ExitStack() as stack:
        launchers = [
            stack.enter_context(running(command, running_bench.folder / f"{name}-{node}.log"))
            for node, command in enumerate(node_commands(running_bench, directory))
        ]
        deadline_s = time.monotonic() + LIMIT_S
        while not _has_reached(directory, KILL_STEP):
            _check_time(name, deadline_s)
        launcher = launchers[VICTIMS[victim]]
        pid = launcher.pid
        if victim == "worker":
            pid = _trainer_pid(directory, WIDTH * VICTIMS[victim])
        killed_s = time.time()
        os.kill(pid, signal.SIGKILL)
        for other in launchers:
            while other.poll() is None:
                _check_time(name, deadline_s)
            if other.returncode and other is not launcher:
                raise JobFailed(f"{name}: a node that is left ended with {other.returncode}", 1)
    return {"victim": victim, **_figures(read_run(directory), killed_s)}


def _figures(run: RunFiles, killed_s: float) -> dict[str, float]:
    """The seconds until all had completed the next step, and beyond a step after it."""
    last = max(record["epoch"] for record in run.steps)
    done_s = first_step_done_s(run, last)
    if done_s is None or done_s < killed_s:
        raise JobFailed(f"{run}: no step was completed after the loss", EXIT_FAILED)
    ends = {record["step"]: 0.0 for record in run.steps if record["epoch"] == last}
    for record in run.steps:
        if record["epoch"] == last:
            ends[record["step"]] = max(ends[record["step"]], record["time_s"])
    times = [ends[step] for step in sorted(ends)]
    step_s = median(after - before for before, after in pairwise(times))
    return {"mttr_s": done_s - killed_s, "beyond_step_s": done_s - killed_s - step_s}


def _has_reached(directory: Path, step: int) -> bool:
    path = directory / STEPS_FILE
    return path.exists() and any(record["step"] >= step for record in read_lines(path))


def _trainer_pid(directory: Path, slot: int) -> int:
    started = [e for e in read_lines(directory / EVENTS_FILE) if e["kind"] == "worker_started"]
    return next(int(event["pid"]) for event in started if event["slot"] == slot)


def _check_time(name: str, deadline_s: float) -> None:
    if time.monotonic() > deadline_s:
        raise JobFailed(f"{name} was not done after {LIMIT_S:g} s", 1)
    time.sleep(0.02)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run them all, the victims in turn; raises JobFailed where a job does not survive."""
    result = {**circumstances("benchmarks.node_loss"), "nodes": NODES, "width": WIDTH}
    rows = []
    with bench(nproc=NODES * WIDTH, steps=STEPS) as running_bench:
        for number in range(options.runs):
            for place, victim in enumerate(VICTIMS):
                row = one_run(running_bench, f"run-{number}-{place}", victim)
                rows.append(row)
                print(f"{number:3} {victim:14} {1e3 * row['beyond_step_s']:7.1f} ms", flush=True)
    for victim in VICTIMS:
        beyond_s = [row["beyond_step_s"] for row in rows if row["victim"] == victim]
        result[victim] = median_and_max(beyond_s)
        print(f"{victim}: {result[victim]}")
    return {**result, "rows": rows}


def main() -> int:
    """Read the options and measure."""
    parser = options_parser(__doc__)
    parser.add_argument("--runs", type=int, default=5, help="runs with each victim")
    options = parser.parse_args()
    return run_benchmark(lambda: measure(options), options.json)


if __name__ == "__main__":
    raise SystemExit(main())
