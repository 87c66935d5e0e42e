"""Throughput after losses, measured: real processes and communication, compute emulated by sleep.

python -m benchmarks.throughput [--scenario NAME]... [--layer-ms 4] [--rounds 3] [--json FILE]

For each scenario, in turn and on the same executor: this plugin with layers and workers that change
stage, the same without (dealing only), rerouting only (ReCycle's rule), and the same global batch
on the replicas without a loss (torchft's rule). Coupled backward everywhere. The step is the median
of those after the loss; rho and the largest possible gain over rerouting stand beside it.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.measurement import RUN_LIMIT_S, Bench, bench, circumstances, run_benchmark
from benchmarks.shape import Shape
from elaswave_plugin.core.planner.reasons import concentration, most_gain
from elaswave_plugin.demo import jobs
from elaswave_plugin.observer import RunFiles, read_run

STEPS, LOSS_STEP = 9, 3
# Tensors that take next to no time of a CPU, which all workers share.
TINY = ("--hidden-size=16", "--num-attention-heads=1", "--seq-length=16", "--hidden-dropout=0")
RULES = {
    "ours": ("--elaswave-move-layers=always",),
    "dealt": ("--elaswave-move-layers=never",),
    "rerouted": ("--elaswave-move-layers=never", "--elaswave-dataflow=reroute"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario(Shape):
    """Losses of single workers; ``least``: what is wanted of (rerouting, the live share)."""

    lost: tuple[int, ...]
    least: tuple[float, float]

    @property
    def replicas_hit(self) -> int:
        """Pipelines of the launch that have lost somebody."""
        return len({slot % self.dp for slot in self.lost})


SCENARIOS = {
    "pp2dp2-one": Scenario(pp=2, dp=2, layers=24, slots=16, lost=(0,), least=(1.35, 0.90)),
    "pp4dp4-one": Scenario(pp=4, dp=4, layers=24, slots=16, lost=(4,), least=(1.03, 0.90)),
    "pp4dp4-two": Scenario(pp=4, dp=4, layers=24, slots=16, lost=(4, 5), least=(1.42, 0.90)),
}


def run_job(
    running: Bench, name: str, scenario: Scenario, *, dp: int, layer_ms: float, more: Sequence[str]
) -> RunFiles:
    """One job of ``dp`` replicas with the scenario's global batch; raises JobFailed."""
    directory = running.folder / name
    launch = [sys.executable, "-m", "elaswave_plugin.cli", "run"]
    launch += ["--nproc-per-node", str(scenario.pp * dp), "--zygote", str(running.socket_path)]
    launch += ["--dir", str(directory), str(Path(__file__).with_name("emulated_compute.py"))]
    command = [
        *launch,
        *(str(layer_ms), str(running.options.script)),
        *("--data-path", str(running.folder / "data" / "text")),
        f"--pipeline-model-parallel-size={scenario.pp}",
        f"--num-layers={scenario.layers}",
        f"--global-batch-size={scenario.slots * scenario.dp}",
        f"--train-iters={STEPS}",
        "--attention-dropout=0",
        *TINY,
        *("--elaswave", "--elaswave-respawn=0", f"--elaswave-dir={directory}"),
        *more,
    ]
    jobs.run_job(command, f"run {name}", running.folder / f"{name}.log", limit_s=RUN_LIMIT_S)
    return read_run(directory)


def step_s(run: RunFiles, first: int, stop: int) -> float:
    """The median over these steps of the slowest worker's time; the first of them warms up."""
    slowest: dict[int, float] = {}
    for line in run.steps:
        slowest[line["step"]] = max(line["step_s"], slowest.get(line["step"], 0.0))
    return median(slowest[step] for step in range(first + 1, stop))


def one_round(
    running: Bench, name: str, scenario: Scenario, layer_ms: float
) -> dict[str, float | list[int]]:
    """Seconds of a step: healthy, and after the losses by each rule."""
    kills = [f"--elaswave-kill={slot}@{LOSS_STEP}:backward" for slot in scenario.lost]
    found: dict[str, Any] = {}
    for rule, more in RULES.items():
        run = run_job(
            running,
            f"{name}-{rule}",
            scenario,
            dp=scenario.dp,
            layer_ms=layer_ms,
            more=(*more, *kills),
        )
        found[rule] = step_s(run, LOSS_STEP + 1, STEPS)
        if rule == "ours":
            found["healthy"] = step_s(run, 0, LOSS_STEP)
            found["cuts"] = run.of_kind("recovered")[-1]["layout_after"]["cuts"]
    whole = scenario.dp - scenario.replicas_hit
    run = run_job(running, f"{name}-dropped", scenario, dp=whole, layer_ms=layer_ms, more=())
    found["dropped"] = step_s(run, 0, STEPS)
    return found


def judged(name: str, scenario: Scenario, rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The ratios of one scenario, medians over the rounds, with their ceilings."""
    seconds = {rule: median(one[rule] for one in rounds) for rule in ("healthy", *RULES, "dropped")}
    after = scenario.layout().without(scenario.lost)
    live, rho = concentration(after)
    ratios = [one["rerouted"] / one["ours"] for one in rounds]
    shares = [one["healthy"] / one["ours"] / live for one in rounds]
    row = {
        "scenario": name,
        "lost": list(scenario.lost),
        "live": live,
        "rho": rho,
        "most_over_rerouting": most_gain(after, microbatches_each=scenario.slots),
        "cuts": rounds[-1]["cuts"],
        "step_s": seconds,
        "over_rerouting": median(ratios),
        "over_dealing": median(one["dealt"] / one["ours"] for one in rounds),
        "over_dropping": median(one["dropped"] / one["ours"] for one in rounds),
        "of_live_share": median(shares),
        "rounds": list(rounds),
    }
    wanted = zip((row["over_rerouting"], row["of_live_share"]), scenario.least, strict=True)
    row["passed"] = all(seen >= least for seen, least in wanted)
    print(
        f"{name}: {row['over_rerouting']:.3f}x rerouting (most {row['most_over_rerouting']:.3f},"
        f" wanted {scenario.least[0]}), {row['over_dropping']:.3f}x dropping,"
        f" {row['of_live_share']:.3f} of the live share (wanted {scenario.least[1]}),"
        f" cuts {row['cuts']}",
        flush=True,
    )
    return row


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run the chosen scenarios; raises JobFailed."""
    result = {**circumstances("benchmarks.throughput"), "layer_ms": options.layer_ms}
    rows = []
    with bench(pp=2, dp=2, tp=1, steps=STEPS) as running:
        for name in options.scenario or SCENARIOS:
            scenario = SCENARIOS[name]
            rounds = [
                one_round(running, f"{name}-{number}", scenario, options.layer_ms)
                for number in range(options.rounds)
            ]
            rows.append(judged(name, scenario, rounds))
    return {
        **result,
        "emulated": "the compute of layers is asleep; communication and schedule are real",
        "rows": rows,
    }


def main() -> int:
    """Read the options and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    parser.add_argument("--scenario", action="append", choices=SCENARIOS, help="may be repeated")
    parser.add_argument("--layer-ms", type=float, default=4.0, help="forward of a layer")
    parser.add_argument("--rounds", type=int, default=3, help="of each scenario")
    options = parser.parse_args()
    return run_benchmark(
        lambda: measure(options),
        options.json,
        good=lambda result: all(row["passed"] for row in result["rows"]),
    )


if __name__ == "__main__":
    raise SystemExit(main())
