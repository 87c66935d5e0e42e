"""Measures how often load makes a job deal its work again, and how soon a slow worker is named.

python -m benchmarks.slow_workers [--series views busy idle] [--runs 5] [--steps 1000] [--json FILE]

Three series of runs of examples/train_gpt.py (2 layers of 64, 4 micro-batches of 32 tokens a
worker): *views*, three workers a core, of which none is slow; *busy*, the same, and a sleep makes
one worker's forward passes three times as long; *idle*, the same on one worker a core. What else
the machine does shows in the load averages that are printed.
"""

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.circumstances import circumstances
from benchmarks.measurement import Bench, bench, run_benchmark
from elaswave_plugin.demo import jobs
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.observer.run import RunFiles, read_run

SLOWED = Path(__file__).with_name("slowed_forward.py")
RUN_LIMIT_S = 1800.0
FACTOR, SLOW_FROM, SLOW_STEPS = 3.0, 60, 60
BUSY_A_CORE = 3
# Views for slowness in 1,000 steps, and steps until a worker is named.
MOST_VIEWS, NAMED_WITHIN = 5, {"busy": 50, "idle": 8}
NOBODY = -1
SIZES = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32"
ABOUT_SLOWNESS = ("less work for what is slow", "no worker is slow any more")


def run_once(running: Bench, name: str, *, workers: int, steps: int, slot: int) -> RunFiles:
    """Run the job with ``slot`` slowed down, and read what it left."""
    options = replace(running.options, steps=steps)
    directory = running.folder / name
    command = jobs.job_command(
        options,
        socket_path=running.socket_path,
        data=running.folder / "data" / "text",
        directory=directory,
    )
    command[command.index("--nproc-per-node") + 1] = str(workers)
    place = command.index(str(options.script))
    command[place:place] = [str(SLOWED), str(slot), str(FACTOR), str(SLOW_FROM)]
    command += [*SIZES.split(), "--micro-batch-size", "1", "--global-batch-size", str(4 * workers)]
    jobs.run_job(command, f"run {name}", running.folder / f"{name}.log", limit_s=RUN_LIMIT_S)
    return read_run(directory)


def row_of(run: RunFiles, *, series: str, slot: int) -> dict[str, Any]:
    """Return what one run shows of views for slowness, and of the workers that were named."""
    views = [
        {"epoch": one["epoch"], "reason": one["reason"]}
        for one in run.of_kind("view_committed")
        if one["reason"].startswith(ABOUT_SLOWNESS)
    ]
    named = [(one["step"], one["slot"]) for one in run.of_kind("slow_worker")]
    mine = [step - SLOW_FROM for step, one in named if one == slot and step > SLOW_FROM]
    row = {"slot": slot, "views": views, "named": named, "named_after": min(mine, default=None)}
    if series == "views":
        passed = len(views) <= MOST_VIEWS
    else:
        passed = bool(mine) and min(mine) <= NAMED_WITHIN[series]
    return {**row, "load_average": round(os.getloadavg()[0], 2), "passed": passed}


def show(series: str, number: int, row: dict[str, Any]) -> None:
    """Print the figures of one run."""
    found = f"{len(row['views'])} views for slowness, {len(row['named'])} times one was named"
    if series != "views":
        found = f"worker {row['slot']} named after {row['named_after']} steps; {found}"
    verdict = "ok" if row["passed"] else "FAILED"
    print(f"{series} {number}: {found}; load average {row['load_average']}: {verdict}", flush=True)


def measured(running: Bench, series: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """All runs of a series."""
    cores = os.cpu_count() or 1
    workers = max(2, cores if series == "idle" else BUSY_A_CORE * cores)
    steps = options.steps if series == "views" else SLOW_FROM + SLOW_STEPS
    rows = []
    for number in range(options.runs):
        slot = NOBODY if series == "views" else number % workers
        run = run_once(running, f"{series}-{number}", workers=workers, steps=steps, slot=slot)
        rows.append(row_of(run, series=series, slot=slot))
        show(series, number, rows[-1])
    return rows


def judged(series: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures of a series, which are printed as well."""
    result: dict[str, Any] = {"passed": sum(row["passed"] for row in rows), "runs": len(rows)}
    if series == "views":
        result["views"] = [len(row["views"]) for row in rows]
        said = f"views for slowness {result['views']}, at most {MOST_VIEWS} wanted"
    else:
        took = [row["named_after"] for row in rows if row["named_after"] is not None]
        result |= {"median": median(took) if took else None, "max": max(took, default=None)}
        said = (
            f"named after median {result['median']}, max {result['max']} steps, at most"
            f" {NAMED_WITHIN[series]} wanted"
        )
    print(f"{series}: {said}; {result['passed']} of {result['runs']} runs passed")
    return {**result, "rows": list(rows)}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run all series; raises ConfigurationError, JobFailed."""
    if options.runs < 1 or options.steps < 1:
        raise ConfigurationError(
            f"--runs is {options.runs} and --steps is {options.steps}, wanted at least 1 of each"
        )
    result = {**circumstances("benchmarks.slow_workers"), "steps": options.steps}
    print(f"load average before: {result['load_average_before']}", flush=True)
    with bench(nproc=2, steps=SLOW_FROM) as running:
        for series in options.series:
            result[series] = judged(series, measured(running, series, options))
    return result


def main() -> int:
    """Read the options and measure; exit code 1 where a run does not keep what is promised."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    series = ("views", "busy", "idle")
    parser.add_argument("--series", nargs="+", choices=series, default=series, help="which ones")
    parser.add_argument("--runs", type=int, default=5, help="runs of each series")
    parser.add_argument("--steps", type=int, default=1000, help="steps of a run that counts views")
    options = parser.parse_args()
    result_file: Path | None = options.json
    return run_benchmark(
        lambda: measure(options),
        result_file,
        good=lambda result: all(
            result[one]["passed"] == result[one]["runs"] for one in options.series
        ),
    )


if __name__ == "__main__":
    raise SystemExit(main())
