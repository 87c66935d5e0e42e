"""The cost of snapshots (or exact mode): both sides in turn within one job, step time and CPU time.

python -m benchmarks.overhead --what snapshots|consistency [--steps 200] [--nproc 4]
                              [--repeat 3] [--json FILE]
"""

import argparse
import math
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.alternate import ALTERNATED, CPU_EVENT
from benchmarks.circumstances import circumstances
from benchmarks.measurement import bench, options_parser, run_benchmark
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.observer.blocks import BLOCK_STEPS, OnOff, split_blocks, step_times_s
from elaswave_plugin.observer.run import RunFiles, read_run

PROCESSES = ("trainer", "agent")


def percentile_s(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def cpu_times_s(run: RunFiles, process: str) -> OnOff:
    """Return the CPU seconds of every measured step, summed over the workers.

    `process` is "trainer" or "agent"; the values come from the events of `alternate.py`.
    """
    marks: dict[int, dict[int, float]] = {}
    for event in run.of_kind(CPU_EVENT):
        marks.setdefault(event["step"], {})[event["slot"]] = float(event[f"{process}_s"])
    return split_blocks(
        (step, sum(ends[slot] - marks[step - 1][slot] for slot in ends))
        for step, ends in sorted(marks.items())
        if step - 1 in marks
    )


def side(steps_s: Sequence[float], cpu_s: dict[str, Sequence[float]]) -> dict[str, Any]:
    """The figures of one side of the comparison; CPU seconds are means of a step, all workers."""
    return {
        "steps": len(steps_s),
        "median_step_s": median(steps_s),
        "p99_step_s": percentile_s(steps_s, 0.99),
        **{f"{process}_cpu_s": fmean(values) for process, values in cpu_s.items()},
        "cpu_s": sum(map(fmean, cpu_s.values())),
    }


def comparison(steps: OnOff, cpu: dict[str, OnOff]) -> dict[str, Any]:
    """Compare both sides: the figures of on and of off, and their ratios."""
    on = side(steps.on, {process: times.on for process, times in cpu.items()})
    off = side(steps.off, {process: times.off for process, times in cpu.items()})
    return {
        "on": on,
        "off": off,
        "ratio_of_medians": steps.ratio_of_medians,
        "ratio_of_cpu_s": on["cpu_s"] / off["cpu_s"],
    }


def pooled(repeats: Iterable[OnOff]) -> OnOff:
    """All values of all repeats."""
    all_of_them = list(repeats)
    return OnOff(
        on=tuple(chain.from_iterable(one.on for one in all_of_them)),
        off=tuple(chain.from_iterable(one.off for one in all_of_them)),
    )


def show(title: str, found: dict[str, Any]) -> None:
    """Print one comparison."""
    for name in ("on", "off"):
        one = found[name]
        print(
            f"{title:9} {name:3}  {one['steps']:4} steps  median {1e3 * one['median_step_s']:7.1f}"
            f" ms  p99 {1e3 * one['p99_step_s']:7.1f} ms  CPU a step {1e3 * one['cpu_s']:7.1f} ms"
            f" (trainers {1e3 * one['trainer_cpu_s']:.1f},"
            f" agents {1e3 * one['agent_cpu_s']:.1f})",
        )
    print(
        f"{title:9} on / off  median {found['ratio_of_medians']:.4f}"
        f"  CPU {found['ratio_of_cpu_s']:.4f}",
        flush=True,
    )


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run the repeats; raises ConfigurationError, JobFailed."""
    if options.steps < 2 * BLOCK_STEPS:
        raise ConfigurationError(
            f"--steps is {options.steps}, wanted at least {2 * BLOCK_STEPS}: a block on, one off"
        )
    if options.repeat < 1:
        raise ConfigurationError(f"--repeat is {options.repeat}, wanted at least 1")
    result = {**circumstances("benchmarks.overhead"), "what": options.what}
    print(f"load average before: {result['load_average_before']}", flush=True)
    steps: list[OnOff] = []
    cpu: list[dict[str, OnOff]] = []
    with bench(nproc=options.nproc, steps=options.steps) as running:
        for repeat in range(options.repeat):
            folder = running.run(f"repeat-{repeat}", running.options, alternate=options.what)
            run = read_run(folder)
            steps.append(step_times_s(run))
            cpu.append({process: cpu_times_s(run, process) for process in PROCESSES})
            show(f"repeat {repeat}", comparison(steps[-1], cpu[-1]))
    overall_cpu = {process: pooled(one[process] for one in cpu) for process in PROCESSES}
    result |= {
        "workers": options.nproc,
        "steps_a_repeat": options.steps,
        "repeats": [comparison(*one) for one in zip(steps, cpu, strict=True)],
        "overall": comparison(pooled(steps), overall_cpu),
    }
    show("overall", result["overall"])
    return result


def main() -> int:
    """Read the options and measure."""
    parser = options_parser(__doc__)
    parser.add_argument("--what", choices=ALTERNATED, required=True, help="what is on and off")
    parser.add_argument("--steps", type=int, default=200, help="steps of a repeat")
    parser.add_argument("--repeat", type=int, default=3, help="jobs one after the other")
    options = parser.parse_args()
    result_file: Path | None = options.json
    return run_benchmark(lambda: measure(options), result_file)


if __name__ == "__main__":
    raise SystemExit(main())
