"""Runs in which a worker hangs, one after the other: what it took until all were back at work.

python -m benchmarks.hangs [--moment step] [--framework deepspeed --zero N] [--runs 30]
                           [--nproc 4] [--json FILE]

Every slot hangs in the data load, in the forward pass and in the backward pass, where the others
wait for it in a collective; each in Python, in C with the interpreter's lock, and by SIGSTOP, in
turn. The limit is the default one: 2 s, or three times the median of the phase. Other moments are
the first steps and an evaluation (with a limit of 5 s), a save, and a wait in native collectives.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.circumstances import circumstances
from benchmarks.hang_moments import Moment, moments
from benchmarks.measurement import bench, options_parser, run_benchmark
from benchmarks.recovery import (
    STEPS,
    References,
    median_and_max,
    one_run,
)
from elaswave_plugin.config import Kill
from elaswave_plugin.demo.options import SCRIPTS
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.observer.run import RunFiles, read_run


def with_hang(row: dict[str, Any], run: RunFiles, hang: Kill, moment: Moment) -> dict[str, Any]:
    """The row of a run with what was seen of the hang; it fails where that was another one."""
    found = run.of_kind("hang_found")
    same = [(one["slot"], one["step"], one["phase"]) for one in found] == [
        (hang.slot, hang.step, moment.phase_of(hang))
    ]
    fields: dict[str, Any] = {"limit_s": None, "stalled_s": None, "beyond_limit_and_step_s": None}
    if same:
        fields |= {key: found[0][key] for key in ("limit_s", "stalled_s")}
        if row["beyond_step_s"] is not None:
            fields["beyond_limit_and_step_s"] = row["beyond_step_s"] - fields["limit_s"]
    return {**row, **fields, "passed": row["passed"] and same}


def show(number: int, row: dict[str, Any]) -> None:
    """Print the figures of one run."""
    times = "no single recovery"
    if row["beyond_limit_and_step_s"] is not None:
        times = (
            f"limit {row['limit_s']:.2f} s, to the next step {row['mttr_s']:.3f} s, beyond limit"
            f" and step {1e3 * row['beyond_limit_and_step_s']:6.1f} ms"
        )
    verdict = "ok" if row["passed"] else f"FAILED {row['failure'] or ''}"
    print(f"{number:3} {row['kill']:20} {times}: {verdict}", flush=True)


def judged(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures over all runs, which are printed as well."""
    timed = [row for row in rows if row["beyond_limit_and_step_s"] is not None]
    result = {
        "runs": len(rows),
        "passed": sum(row["passed"] for row in rows),
        "beyond_limit_and_step_s": median_and_max(
            [row["beyond_limit_and_step_s"] for row in timed]
        ),
        "mttr_s": median_and_max([row["mttr_s"] for row in timed]),
    }
    print(f"{result['passed']} of {len(rows)} runs passed")
    if timed:
        mttr_s, beyond_s = result["mttr_s"], result["beyond_limit_and_step_s"]
        print(
            f"hang to the next completed step: median {mttr_s['median']:.3f} s, max"
            f" {mttr_s['max']:.3f} s; beyond the limit and a step: median"
            f" {1e3 * beyond_s['median']:.1f} ms, max {1e3 * beyond_s['max']:.1f} ms"
        )
    return result


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run them all; raises ConfigurationError, JobFailed if a reference fails."""
    if options.runs < 1:
        raise ConfigurationError(f"--runs is {options.runs}, wanted at least 1")
    if options.moment != "step" and options.framework != "megatron":
        raise ConfigurationError(
            f"--moment is {options.moment}, which jobs of --framework {options.framework} do not"
            " have here: leave one of them out"
        )
    moment = moments()[options.moment]
    result = circumstances("benchmarks.hangs")
    print(f"load average before: {result['load_average_before']}", flush=True)
    rows = []
    with bench(
        nproc=options.nproc, steps=STEPS, framework=options.framework, zero=options.zero
    ) as shared:
        job = replace(shared.options, script=moment.script or shared.options.script)
        running = replace(shared, options=job, arguments=moment.arguments)
        references = References(running)
        for number, hang in enumerate(moment.hangs(options.runs, options.nproc)):
            name = f"run-{number}"
            row = one_run(running, name, hang, references.of(hang))
            rows.append(with_hang(row, read_run(running.folder / name), hang, moment))
            show(number, rows[-1])
    return {
        **result,
        "moment": options.moment,
        "framework": options.framework,
        "zero": options.zero,
        "workers": options.nproc,
        "steps": STEPS,
        **judged(rows),
        "rows": rows,
    }


def main() -> int:
    """Read the options and measure; exit code 1 if a run lost anything or a hang was not found."""
    parser = options_parser(__doc__)
    parser.add_argument("--framework", choices=dict(SCRIPTS), default="megatron")
    parser.add_argument("--zero", type=int, metavar="N", help="DeepSpeed's stage")
    parser.add_argument("--moment", choices=moments(), default="step", help="when it hangs")
    parser.add_argument("--runs", type=int, default=30, help="runs with a hang")
    options = parser.parse_args()
    result_file: Path | None = options.json
    return run_benchmark(
        lambda: measure(options),
        result_file,
        good=lambda result: result["passed"] == result["runs"],
    )


if __name__ == "__main__":
    raise SystemExit(main())
