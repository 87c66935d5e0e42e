"""Runs with a random victim in a random phase, one after the other: what each recovery took.

python -m benchmarks.recovery [--framework deepspeed --zero N] [--runs 20] [--seed N] [--nproc 4]
                              [--json FILE]

Megatron's runs have to equal the undisturbed one. In a DeepSpeed script, which owns its loop, sums
change their order after a loss: these have to equal the run whose same worker leaves as planned.
"""

import argparse
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.circumstances import circumstances
from benchmarks.measurement import Bench, bench, options_parser, run_benchmark
from elaswave_plugin.config import STEP_PHASES, Kill
from elaswave_plugin.demo.jobs import JobFailed
from elaswave_plugin.demo.options import GLOBAL_BATCH, SCRIPTS
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.observer.observer import summarize
from elaswave_plugin.observer.run import RunFiles, read_run

STEPS, KILL_STEP = 20, 10
KEPT = ("parameters_equal", "max_abs_loss_diff", "survivor_pids_unchanged")
LOST = ("samples_lost", "samples_repeated")


class References:
    """The references that the runs of a bench have to equal, each made once."""

    def __init__(self, running: Bench) -> None:
        self._running = running
        self._made: dict[int | None, RunFiles] = {}

    def of(self, kill: Kill) -> RunFiles:
        """The reference of a run with this kill; raises JobFailed."""
        planned = self._running.options.framework == "deepspeed"
        victim = kill.slot if planned else None
        if victim not in self._made:
            name = f"reference-{len(self._made)}"
            options = replace(self._running.options, kills=(kill,))
            self._made[victim] = read_run(self._running.run(name, options, change=planned))
        return self._made[victim]


def one_run(running: Bench, name: str, kill: Kill, reference: RunFiles) -> dict[str, Any]:
    """Kill a worker in a run and judge it by its files, against the reference's."""
    row: dict[str, Any] = {"kill": str(kill), "returncode": 0, "failure": None}
    try:
        running.run(name, replace(running.options, kills=(kill,)), kill=True)
    except JobFailed as error:
        row |= {"returncode": error.exit_code, "failure": str(error)}
    run = read_run(running.folder / name)
    summary = summarize(run, reference, steps=STEPS, global_batch=GLOBAL_BATCH, kills=[kill])
    row |= {key: summary[key] for key in (*KEPT, *LOST)}
    row |= {"fired": summary["kills"][0]["fired"], "recoveries": len(summary["recoveries"])}
    row |= {"median_step_s": summary["median_step_s"]}
    row |= {"mttr_s": None, "beyond_step_s": None, "cost_s": None}
    if len(summary["recoveries"]) == 1:
        recovery = summary["recoveries"][0]
        row |= {key: recovery[key] for key in ("mttr_s", "cost_s", "phases_s", "bytes_moved")}
        if summary["median_step_s"]["after"] is not None:
            row["beyond_step_s"] = recovery["mttr_s"] - summary["median_step_s"]["after"]
    row["passed"] = passed(row)
    return row


def passed(row: dict[str, Any]) -> bool:
    """Return whether the fault fired, one recovery answered it, and nothing was lost by it."""
    return (
        row["returncode"] == 0
        and row["fired"]
        and row["beyond_step_s"] is not None
        and row["parameters_equal"] is True
        and row["max_abs_loss_diff"] == 0
        and row["survivor_pids_unchanged"]
        and not any(row[key] for key in LOST)
    )


def median_and_max(values: Sequence[float]) -> dict[str, float | None]:
    """Both of them; None without values."""
    return (
        {"median": median(values), "max": max(values)}
        if values
        else dict.fromkeys(("median", "max"))
    )


def show(number: int, row: dict[str, Any]) -> None:
    """Print the figures of one run."""
    verdict = "ok" if row["passed"] else f"FAILED {row['failure'] or ''}"
    times = "no single recovery"
    if row["beyond_step_s"] is not None:
        phases = "  ".join(f"{name} {1e3 * one:.1f}" for name, one in row["phases_s"].items())
        times = (
            f"costs {1e3 * (row['cost_s'] or 0.0):6.1f} ms; mttr {1e3 * row['mttr_s']:6.1f} ms,"
            f" beyond a step {1e3 * row['beyond_step_s']:6.1f} ms ({phases})"
        )
    print(f"{number:3} {row['kill']:14} {times}: {verdict}", flush=True)


def drawn_kills(options: argparse.Namespace, *, workers: int) -> tuple[int, list[Kill]]:
    """The seed and a random victim and phase for each run; raises ConfigurationError."""
    if options.runs < 1:
        raise ConfigurationError(f"--runs is {options.runs}, wanted at least 1")
    seed = random.SystemRandom().randrange(2**32) if options.seed is None else options.seed
    draw = random.Random(seed)
    kills = []
    for _ in range(options.runs):
        victim, phase = draw.randrange(workers), draw.choice(STEP_PHASES)
        kills.append(Kill(slot=victim, step=KILL_STEP, phase=phase))
    return seed, kills


def judged(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures over all runs, which are printed as well."""
    timed = [row for row in rows if row["beyond_step_s"] is not None]
    beyond_s = [row["beyond_step_s"] for row in timed]
    costs_s = [row["cost_s"] for row in timed if row.get("cost_s") is not None]
    result = {
        "runs": len(rows),
        "passed": sum(row["passed"] for row in rows),
        "cost_s": median_and_max(costs_s),
        "beyond_step_s": median_and_max(beyond_s),
        "mttr_s": median_and_max([row["mttr_s"] for row in timed]),
    }
    print(f"{result['passed']} of {len(rows)} runs passed")
    if costs_s:
        print(
            "a loss costs, from the beginning of its step until all have completed it, less a"
            f" step: median {1e3 * median(costs_s):.1f} ms, max {1e3 * max(costs_s):.1f} ms"
        )
    if timed:
        print(
            f"mttr beyond the median step after the change: median {1e3 * median(beyond_s):.1f} ms,"
            f" max {1e3 * max(beyond_s):.1f} ms of {len(timed)}"
        )
    return result


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run them all; raises ConfigurationError, JobFailed if a reference fails."""
    seed, kills = drawn_kills(options, workers=options.nproc)
    result = {**circumstances("benchmarks.recovery"), "seed": seed}
    print(f"seed {seed}, load average before: {result['load_average_before']}", flush=True)
    rows = []
    with bench(
        nproc=options.nproc, steps=STEPS, framework=options.framework, zero=options.zero
    ) as running:
        references = References(running)
        for number, kill in enumerate(kills):
            rows.append(one_run(running, f"run-{number}", kill, references.of(kill)))
            show(number, rows[-1])
    result |= {
        "framework": options.framework,
        "zero": options.zero,
        "workers": options.nproc,
        "steps": STEPS,
        **judged(rows),
        "rows": rows,
    }
    return result


def run_series(
    parser: argparse.ArgumentParser, measure: Callable[[argparse.Namespace], dict[str, Any]]
) -> int:
    """Read the options and measure; exit code 1 if a run lost anything."""
    parser.add_argument("--runs", type=int, default=20, help="runs with a kill")
    parser.add_argument("--seed", type=int, help="of victims and phases (default: a new one)")
    options = parser.parse_args()
    result_file: Path | None = options.json
    return run_benchmark(
        lambda: measure(options),
        result_file,
        good=lambda result: result["passed"] == result["runs"],
    )


def main() -> int:
    """Read the options and measure."""
    parser = options_parser(__doc__)
    parser.add_argument("--framework", choices=dict(SCRIPTS), default="megatron")
    parser.add_argument("--zero", type=int, metavar="N", help="DeepSpeed's stage")
    return run_series(parser, measure)


if __name__ == "__main__":
    raise SystemExit(main())
