"""Measures the processor time of a job's healthy steps, in turn with another commit.

python -m benchmarks.healthy_step [--against CHECKOUT] [--pairs 10] [--first 20] [--last 120]
    [--json FILE] -- run --nproc-per-node=2 SCRIPT ... --elaswave --elaswave-dir={directory}

What comes behind ``--`` are the arguments of `elaswave`, which runs in the folder of each checkout,
by its own .venv; {directory} is that of the run. Counted is the processor time that all workers
together take from the end of step ``--first`` to that of ``--last``; a ratio is here over there.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.circumstances import circumstances
from benchmarks.measurement import RUN_LIMIT_S, run_benchmark
from elaswave_plugin.demo import jobs
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.tracking.events import read_lines

HERE = Path(__file__).resolve().parents[1]
LOOK_INTERVAL_S = 0.01


class Cost(NamedTuple):
    """Milliseconds of one step: of the processors that all workers take, and by the clock."""

    processor_ms: float
    wall_ms: float


def processor_s(pid: int) -> float:
    """Return the processor time that a process has taken. Source: proc(5), /proc/PID/stat."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def taken(steps: Path, step: int, job: Any) -> tuple[float, float]:
    """Wait for a step's end on all workers; returns the processor time so far, and the time."""
    deadline_s = time.monotonic() + RUN_LIMIT_S
    while time.monotonic() < deadline_s and job.poll() is None:
        lines = read_lines(steps) if steps.exists() else []
        workers = {line["slot"]: line["pid"] for line in lines}
        done = {line["slot"] for line in lines if line["step"] == step}
        if done and done == set(workers):
            return sum(map(processor_s, workers.values())), time.monotonic()
        time.sleep(LOOK_INTERVAL_S)
    said = steps.parent.with_name("log").read_text().strip().splitlines()[-1:]
    raise jobs.JobFailed(f"step {step} was not completed: {' '.join(said)}", 1)


def run_once(tree: Path, options: argparse.Namespace) -> Cost:
    """Run the job of a checkout as far as it is measured; raises JobFailed."""
    with tempfile.TemporaryDirectory(prefix="elaswave-bench-") as name:
        directory = Path(name) / "run"
        arguments = [word.replace("{directory}", str(directory)) for word in options.arguments]
        command = ["env", "-C", str(tree), str(tree / ".venv" / "bin" / "elaswave"), *arguments]
        with jobs.running(command, Path(name) / "log", env={"PYTHONPATH": str(tree)}) as job:
            steps = directory / "steps.jsonl"
            before, began_s = taken(steps, options.first, job)
            after, ended_s = taken(steps, options.last, job)
    count = (options.last - options.first) / 1e3
    return Cost((after - before) / count, (ended_s - began_s) / count)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run the pairs; raises ConfigurationError, JobFailed."""
    trees = {"here": HERE, **({"there": options.against} if options.against else {})}
    for name, tree in trees.items():
        if not (tree / ".venv" / "bin" / "elaswave").is_file():
            raise ConfigurationError(f"{name} is {str(tree)!r}, which has no .venv/bin/elaswave")
    found: dict[str, list[Cost]] = {name: [] for name in trees}
    for number in range(options.pairs):
        for name in sorted(trees, reverse=bool(number % 2)):
            found[name].append(run_once(trees[name], options))
            told = " ".join(f"{one:.1f}" for one in found[name][-1])
            print(f"{number} {name:6} ms a step, processors and clock: {told}", flush=True)
    result = {**circumstances("benchmarks.healthy_step"), "arguments": options.arguments}
    for number, what in enumerate(Cost._fields):
        of_each = {name: [one[number] for one in costs] for name, costs in found.items()}
        result[what] = of_each
        if options.against:
            ratios = [one / other for one, other in zip(*of_each.values(), strict=True)]
            result[f"{what}_ratios"] = ratios
            spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
            print(f"{what}: median ratio {median(ratios):.3f}, {spread}", flush=True)
    return result


def main(argv: Sequence[str]) -> int:
    """Read the options and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    parser.add_argument("--against", type=Path, help="a checkout of another commit")
    parser.add_argument("--pairs", type=int, default=10, help="jobs of each checkout")
    parser.add_argument("--first", type=int, default=20, help="the step behind which it begins")
    parser.add_argument("--last", type=int, default=120, help="the step behind which it ends")
    parser.add_argument("arguments", nargs="+", help="of elaswave, behind --")
    options = parser.parse_args(argv)
    result_file: Path | None = options.json
    return run_benchmark(lambda: measure(options), result_file)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
