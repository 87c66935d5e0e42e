"""The recoveries of a TP2 x PP2 x DP2 job of 8 workers: random victim and phase, run after run.

python -m benchmarks.hybrid_recovery [--runs 20] [--seed N] [--json FILE [--add]]

Each run has to equal the undisturbed one, bit for bit. --add keeps the runs that FILE has and puts
the new ones behind them, so that a long series may be made in slices.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.circumstances import circumstances
from benchmarks.measurement import bench
from benchmarks.recovery import STEPS, drawn_kills, judged, one_run, run_series, show
from elaswave_plugin.config import RECOVERY_PHASES
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.observer.run import read_run

TP, PP, DP = 2, 2, 2
WORKERS = TP * PP * DP


def earlier_slices(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The slices that --add keeps; raises ConfigurationError where there is no such file."""
    if not options.add:
        return []
    path: Path | None = options.json
    if path is None or not path.is_file():
        raise ConfigurationError(
            f"--add is given and --json is {None if path is None else str(path)!r}, wanted a file"
            " that an earlier slice wrote"
        )
    slices: list[dict[str, Any]] = json.loads(path.read_text())["slices"]
    return slices


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run one slice; raises ConfigurationError, JobFailed if the undisturbed run fails."""
    seed, kills = drawn_kills(options, workers=WORKERS)
    earlier = earlier_slices(options)
    one = {**circumstances("benchmarks.hybrid_recovery"), "seed": seed}
    print(f"seed {seed}, load average before: {one['load_average_before']}", flush=True)
    rows = []
    with bench(tp=TP, pp=PP, dp=DP, steps=STEPS) as running:
        reference = read_run(running.run("reference", running.options))
        for number, kill in enumerate(kills):
            rows.append(one_run(running, f"run-{number}", kill, reference))
            show(number, rows[-1])
    return result_of([*earlier, {**one, "rows": rows}])


def result_of(slices: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures over the runs of all slices; phases are medians."""
    rows = [row for one in slices for row in one["rows"]]
    timed = [row for row in rows if row["beyond_step_s"] is not None]
    return {
        "layout": f"TP{TP} x PP{PP} x DP{DP}, sequence parallel, {WORKERS} workers",
        "steps": STEPS,
        **judged(rows),
        "phases_s": {
            name: median(row["phases_s"][name] for row in timed) if timed else None
            for name in RECOVERY_PHASES
        },
        "slices": list(slices),
    }


def main() -> int:
    """Read the options and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    parser.add_argument("--add", action="store_true", help="keep the runs that the file has")
    return run_series(parser, measure)


if __name__ == "__main__":
    raise SystemExit(main())
