"""Measures what a loss costs: the seconds of the struck step beyond those of a healthy one.

python -m benchmarks.lost_share [--shape DP4] [--against CHECKOUT] [--repeat 10] [--json FILE]

Workers of examples/train_gpt.py lose one of them, in the first forward pass and in the last
backward pass, in the reduction and in the update of a step. DP4 computes 57 million parameters, two
micro-batches a replica; in the other shapes layers sleep (benchmarks/emulated_compute.py). A cost
runs from the end of the step before, on all workers, to the end of the struck one on all that are
left. ``--against``: a checkout of another commit, with its own .venv, whose jobs run in turn with
these. The struck step may have the forward passes of a healthy one, those of the lost worker's
replica, and one of each survivor: exit code 1 where it has more, or costs too much of the other's.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.circumstances import circumstances
from benchmarks.measurement import Bench, bench, run_benchmark
from elaswave_plugin.demo import jobs
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.observer.run import RunFiles, counted_steps, read_run

HERE = Path(__file__).resolve()
LATE_STRIKE, EMULATED = (HERE.with_name(f"{one}.py") for one in ("late_strike", "emulated_compute"))
# Of the former, which the package of another checkout may lack.
PASS_EVENT = "forward_pass"
PHASES = ("forward", "backward", "reduce", "optimizer")
VICTIM = 2
STEPS, LOSS, FIRST = 6, 4, 2
RUN_LIMIT_S = 600.0


class Shape(NamedTuple):
    """A job: micro-batches of each replica, and the milliseconds that a layer sleeps, if so.

    ``share``: the most that a loss may cost, of its cost in the other checkout.
    """

    workers: int
    replicas: int
    microbatches: int
    share: float
    arguments: tuple[str, ...]
    layer_ms: int = 0

    @property
    def most_passes(self) -> int:
        """Forward passes of all workers that the struck step may have."""
        of_replica = self.workers // self.replicas * self.microbatches
        return of_replica * (self.replicas + 1) + self.workers - 1


SMALL = ("--num-layers", "4", "--hidden-size", "64", "--seq-length", "32")
PP2 = ("--pipeline-model-parallel-size", "2")
TP2_PP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel", *PP2)
SHAPES = {
    "DP4": Shape(
        *(4, 4, 2, 0.45),
        (
            *("--num-layers", "8", "--hidden-size", "768", "--num-attention-heads", "12"),
            *("--seq-length", "128"),
        ),
    ),
    "DP8": Shape(8, 8, 2, 0.35, SMALL, 85),
    "PP2xDP4": Shape(8, 4, 4, 0.6, (*SMALL, *PP2), 70),
    "TP2xPP2xDP2": Shape(8, 2, 4, 0.75, (*SMALL, *TP2_PP2), 70),
}


def run_once(running: Bench, shape: Shape, phase: str) -> RunFiles:
    """Run a job that loses a worker in a phase of a step; raises JobFailed."""
    directory = running.folder / phase
    command = jobs.job_command(
        running.options,
        socket_path=running.socket_path,
        data=running.folder / "data" / "text",
        directory=directory,
    )
    place = command.index(str(running.options.script))
    command[place:place] = [str(LATE_STRIKE), str(shape.microbatches)]
    if shape.layer_ms:
        command[place + 2 : place + 2] = [str(EMULATED), str(shape.layer_ms)]
    command += [*shape.arguments, "--global-batch-size", str(shape.microbatches * shape.replicas)]
    command += ["--elaswave-kill", f"{VICTIM}@{LOSS}:{phase}", "--elaswave-dump-state", "never"]
    jobs.run_job(command, phase, running.folder / f"{phase}.log", limit_s=RUN_LIMIT_S)
    return read_run(directory)


def done_s(run: RunFiles) -> dict[int, float]:
    """Return when each step was complete on all its workers."""
    found = counted_steps(run).items()
    return {step: max(float(one["time_s"]) for one in lines) for step, lines in found}


def cost_of(run: RunFiles) -> dict[str, float]:
    """Return the seconds of a healthy step, and what the struck one took beyond it."""
    done = done_s(run)
    healthy_s = median(done[step] - done[step - 1] for step in range(FIRST, LOSS))
    return {
        "healthy_s": healthy_s,
        "cost_s": done[LOSS] - done[LOSS - 1] - healthy_s,
        "forward_passes": sum(one["step"] == LOSS for one in run.of_kind(PASS_EVENT)),
    }


def once(shape: Shape) -> dict[str, Any]:
    """Run a job of each phase; returns their costs."""
    with bench(nproc=shape.workers, steps=STEPS) as running:
        return {phase: cost_of(run_once(running, shape, phase)) for phase in PHASES}


def of_checkout(checkout: Path, shape: str) -> dict[str, Any]:
    """The same by the code of a checkout; raises JobFailed."""
    # Its own package, and its own parts of the benchmarks.
    done = subprocess.run(
        [checkout / ".venv" / "bin" / "python", "-P", str(HERE), "--shape", shape, "--once"],
        env={**os.environ, "PYTHONPATH": str(checkout)},
        cwd=checkout,
        capture_output=True,
        text=True,
        timeout=len(PHASES) * RUN_LIMIT_S,
    )
    if done.returncode:
        raise jobs.JobFailed(f"the jobs of {checkout} failed: {done.stderr[-2000:]}", 1)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run the repeats; raises ConfigurationError, JobFailed."""
    if options.against and not (options.against / ".venv" / "bin" / "python").is_file():
        raise ConfigurationError(f"--against is {str(options.against)!r}, which has no .venv")
    trees = {"here": HERE.parents[1], **({"against": options.against} if options.against else {})}
    result = {**circumstances("benchmarks.lost_share"), "shape": options.shape}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in trees}
    for number in range(options.repeat):
        for name in sorted(trees, reverse=bool(number % 2)):
            found[name].append(of_checkout(trees[name], options.shape))
            told = {phase: round(one["cost_s"], 2) for phase, one in found[name][-1].items()}
            print(f"{number} {name:8} cost in s {told}", flush=True)
    return result | {phase: of_phase(phase, found, options.shape) for phase in PHASES}


def of_phase(
    phase: str, found: Mapping[str, Sequence[dict[str, Any]]], shape: str
) -> dict[str, Any]:
    """Return the figures of a phase, by checkout, and whether they are good; prints them."""
    result: dict[str, Any] = {
        name: {
            "cost_s": [one[phase]["cost_s"] for one in runs],
            "median_cost_s": median(one[phase]["cost_s"] for one in runs),
            "median_healthy_s": median(one[phase]["healthy_s"] for one in runs),
            "forward_passes": [one[phase]["forward_passes"] for one in runs],
        }
        for name, runs in found.items()
    }
    here, most = result["here"], SHAPES[shape].most_passes
    passes = max(here["forward_passes"])
    result |= {"most_passes": most, "good": passes <= most}
    line = f"{phase:10} costs {here['median_cost_s']:.2f} s beyond {here['median_healthy_s']:.2f} s"
    line += f"; forward passes at most {passes}, wanted {most}"
    if "against" in result:
        other = result["against"]["median_cost_s"]
        result |= {"ratio": here["median_cost_s"] / other}
        line += f"; there {other:.2f} s, ratio {result['ratio']:.2f}"
        if phase != PHASES[0]:
            share = SHAPES[shape].share
            result["good"] &= result["ratio"] <= share
            line += f", wanted {share}"
    print(f"{line}{'' if result['good'] else ': MISSED'}", flush=True)
    return result


def main() -> int:
    """Read the options and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    parser.add_argument("--against", type=Path, help="a checkout of another commit")
    parser.add_argument("--repeat", type=int, default=10, help="jobs of each phase")
    parser.add_argument("--shape", choices=SHAPES, default="DP4", help="the job")
    parser.add_argument("--once", action="store_true", help="print the costs of one job a phase")
    options = parser.parse_args()
    if options.once:
        print(json.dumps(once(SHAPES[options.shape])))
        return 0
    result_file: Path | None = options.json
    return run_benchmark(
        lambda: measure(options),
        result_file,
        good=lambda result: all(result[phase]["good"] for phase in PHASES),
    )


if __name__ == "__main__":
    sys.exit(main())
