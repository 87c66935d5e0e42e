"""Runs in which a killed worker comes back: how long others stood still, and until all was full.

python -m benchmarks.joins [--runs 20] [--seed N] [--nproc 4] [--json FILE]

Every run has to equal the undisturbed one. Beside it, a cold start of the same job: what a restart
costs before its first step, without loading a checkpoint.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.circumstances import circumstances
from benchmarks.measurement import Bench, bench, options_parser
from benchmarks.recovery import KEPT, LOST, drawn_kills, median_and_max, run_series
from elaswave_plugin.config import Kill
from elaswave_plugin.demo import jobs
from elaswave_plugin.demo.jobs import JobFailed
from elaswave_plugin.demo.options import GLOBAL_BATCH
from elaswave_plugin.observer.observer import summarize
from elaswave_plugin.observer.run import RunFiles, read_run

STEPS = 40
# What a join may cost beyond one step, and how long the job may be smaller (issue's bounds).
STALL_BOUND_S, FULL_BOUND_S = 0.2, 5.0


def one_run(running: Bench, name: str, kill: Kill, reference: RunFiles) -> dict[str, Any]:
    """Kill a worker, have it come back, and judge the run by its files."""
    row: dict[str, Any] = {"kill": str(kill), "returncode": 0, "failure": None}
    try:
        running.run(name, replace(running.options, kills=(kill,), respawn=True), kill=True)
    except JobFailed as error:
        row |= {"returncode": error.exit_code, "failure": str(error)}
    run = read_run(running.folder / name)
    summary = summarize(run, reference, steps=STEPS, global_batch=GLOBAL_BATCH, kills=[kill])
    row |= {key: summary[key] for key in (*KEPT, *LOST)}
    row |= {"fired": summary["kills"][0]["fired"], "joins": summary["joins"]}
    row["step_s"] = summary["median_step_s"]["after"]
    row["passed"] = passed(row)
    return row


def passed(row: dict[str, Any]) -> bool:
    """Return whether the worker came back in time, and nothing was lost or changed by it."""
    joins = row["joins"]
    return (
        row["returncode"] == 0
        and row["fired"]
        and len(joins) == 1
        and row["step_s"] is not None
        and joins[0]["stall_s"] is not None
        and joins[0]["stall_s"] <= row["step_s"] + STALL_BOUND_S
        and joins[0]["time_to_full_s"] is not None
        and joins[0]["time_to_full_s"] < FULL_BOUND_S
        and row["parameters_equal"] is True
        and row["max_abs_loss_diff"] == 0
        and row["survivor_pids_unchanged"]
        and not any(row[key] for key in LOST)
    )


def cold_start_s(running: Bench) -> float:
    """Seconds from the start of the same job, without a zygote, until all had done a step."""
    directory = running.folder / "cold"
    command = jobs.job_command(
        replace(running.options, steps=3),
        socket_path=running.socket_path,
        data=running.folder / "data" / "text",
        directory=directory,
    )
    place = command.index("--zygote")
    del command[place : place + 2]
    jobs.run_job(command, "cold start", running.folder / "cold.log")
    run = read_run(directory)
    (started,) = run.of_kind("job_started")
    return float(max(r["time_s"] for r in run.steps if r["step"] == 0) - started["time_s"])


def show(number: int, row: dict[str, Any]) -> None:
    """Print the figures of one run."""
    verdict = "ok" if row["passed"] else f"FAILED {row['failure'] or ''}"
    times = "nobody came back"
    if row["joins"]:
        join = row["joins"][0]
        times = (
            f"built in {join['beside_s']:.2f} s, others stood still"
            f" {1e3 * (join['stall_s'] or 0):6.1f} ms, full after {join['time_to_full_s']} s"
        )
    print(f"{number:3} {row['kill']:14} {times}: {verdict}", flush=True)


def judged(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures over all runs, which are printed as well."""
    joins = [join for row in rows for join in row["joins"] if join["time_to_full_s"] is not None]
    result = {
        "runs": len(rows),
        "passed": sum(row["passed"] for row in rows),
        "stall_s": median_and_max([join["stall_s"] for join in joins]),
        "time_to_full_s": median_and_max([join["time_to_full_s"] for join in joins]),
        "beside_s": median_and_max([join["beside_s"] for join in joins]),
    }
    print(f"{result['passed']} of {len(rows)} runs passed")
    for key in ("stall_s", "time_to_full_s", "beside_s"):
        print(f"{key}: {result[key]}")
    return result


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run them all; raises ConfigurationError, JobFailed if a reference fails."""
    seed, kills = drawn_kills(options, workers=options.nproc)
    result = {**circumstances("benchmarks.joins"), "seed": seed}
    print(f"seed {seed}, load average before: {result['load_average_before']}", flush=True)
    rows = []
    with bench(nproc=options.nproc, steps=STEPS) as running:
        reference = read_run(running.run("reference", running.options))
        cold_s = cold_start_s(running)
        print(f"cold start: {cold_s:.1f} s", flush=True)
        for number, kill in enumerate(kills):
            rows.append(one_run(running, f"run-{number}", kill, reference))
            show(number, rows[-1])
    result |= {"workers": options.nproc, "steps": STEPS, "cold_start_s": cold_s}
    return {**result, **judged(rows), "rows": rows}


def main() -> int:
    """Read the options and measure."""
    return run_series(options_parser(__doc__), measure)


if __name__ == "__main__":
    raise SystemExit(main())
