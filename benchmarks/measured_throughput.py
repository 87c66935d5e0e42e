"""Throughput after losses in real processes: real communication and schedule, layers asleep.

For each scenario, in turn and on the same executor: this plugin, rerouting only (ReCycle's rule),
and the same global batch on the replicas without a loss (torchft's rule). A job measures its own
costs before the loss; its plan's prediction for the steps after it stands beside what they took.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.scenarios import Scenario
from benchmarks.simulated_throughput import (
    ratios,
    rectangular_step,
    simulated_steps,
)
from elaswave_plugin.core.planner.layer_times import STEPS_FOR_COSTS, LayerTimes
from elaswave_plugin.demo import jobs
from elaswave_plugin.demo.options import DemoOptions, check_options
from elaswave_plugin.observer.run import RunFiles, read_run

# The loss comes as soon as costs are known; the step after it is redone, the next one warms up.
LOSS_STEP = STEPS_FOR_COSTS
STEPS, DROPPED_STEPS = LOSS_STEP + 4, 4
RUN_LIMIT_S = 1800.0
# Tensors that take next to no time of a CPU, which all workers share.
TINY = (
    *("--hidden-size=16", "--num-attention-heads=1", "--seq-length=16"),
    *("--hidden-dropout=0", "--attention-dropout=0"),
)
# Nobody is slow here but by the CPUs that all workers share.
PLUGIN = ("--elaswave", "--elaswave-respawn=0", "--elaswave-slow-workers=name")
COUPLED, SPLIT = ("--elaswave-split-backward=never",), ("--elaswave-split-backward=always",)
MOVING = ("--elaswave-move-layers=always",)
REROUTING = ("--elaswave-move-layers=never", "--elaswave-dataflow=reroute")
OURS, REROUTED = ("ours", (*MOVING, *COUPLED)), ("rerouted", (*REROUTING, *COUPLED))
OURS_SPLIT, REROUTED_SPLIT = (
    ("ours_split", (*MOVING, *SPLIT)),
    ("rerouted_split", (*REROUTING, *SPLIT)),
)
# A name and what is asked of the plugin.
Rule = tuple[str, tuple[str, ...]]
Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Jobs:
    """A zygote and a dataset that serve any number of jobs, in a folder that goes away."""

    options: DemoOptions
    folder: Path
    zygote: Path
    layer_ms: float

    def run(
        self, name: str, scenario: Scenario, *, dp: int, batch: int, steps: int, more: Sequence[str]
    ) -> RunFiles:
        """One job of ``dp`` replicas with ``batch`` micro-batches; raises JobFailed."""
        directory = self.folder / name
        command = [
            *(sys.executable, "-m", "elaswave_plugin.cli.main", "run"),
            *("--nproc-per-node", str(scenario.pp * dp), "--zygote", str(self.zygote)),
            *("--dir", str(directory), str(Path(__file__).with_name("emulated_compute.py"))),
            *(str(self.layer_ms), str(self.options.script)),
            *("--data-path", str(self.folder / "data" / "text")),
            f"--pipeline-model-parallel-size={scenario.pp}",
            f"--num-layers={scenario.layers}",
            f"--global-batch-size={batch}",
            f"--train-iters={steps}",
            *TINY,
            *(*PLUGIN, f"--elaswave-dir={directory}", *more),
        ]
        jobs.run_job(command, f"run {name}", self.folder / f"{name}.log", limit_s=RUN_LIMIT_S)
        return read_run(directory)


@contextmanager
def opened(layer_ms: float) -> Iterator[Jobs]:
    """Start what the jobs share; ``layer_ms``: forward of a layer. Raises JobFailed."""
    with tempfile.TemporaryDirectory(prefix="elaswave-bench-") as name:
        folder = Path(name)
        options = check_options(
            text=None,
            tp=1,
            pp=2,
            dp=2,
            steps=STEPS,
            kill=[f"0@{LOSS_STEP}"],
            seed=1234,
            json_file=None,
            out=folder / "out",
        )
        with jobs.prepared(options, None, data=folder / "data" / "text", logs=folder) as path:
            yield Jobs(options=options, folder=folder, zygote=path, layer_ms=layer_ms)


def step_s(run: RunFiles, first: int, stop: int) -> float:
    """The median over these steps of the slowest worker's time; the first of them warms up."""
    slowest: dict[int, float] = {}
    for line in run.steps:
        slowest[line["step"]] = max(line["step_s"], slowest.get(line["step"], 0.0))
    return median(slowest[step] for step in range(first + 1, stop))


def one_round(jobs: Jobs, name: str, scenario: Scenario, rules: Sequence[Rule]) -> Row:
    """Seconds of a step by each rule, as measured and as predicted; raises JobFailed."""
    stage = scenario.usual_stage
    kills = [f"--elaswave-kill={slot}@{LOSS_STEP}:backward" for slot in scenario.dead(stage)]
    batch = scenario.work.num_microbatches
    measured: dict[str, float] = {}
    predicted: dict[str, float] = {}
    found: Row = {"step_s": measured, "predicted_s": predicted}
    for rule, settings in rules:
        run = jobs.run(
            f"{name}-{rule}",
            scenario,
            dp=scenario.dp,
            batch=batch,
            steps=STEPS,
            more=(*settings, *kills),
        )
        plan = run.of_kind("recovered")[-1]
        measured[rule] = step_s(run, LOSS_STEP + 1, STEPS)
        predicted[rule] = plan["predicted_step_s"]
        if not found.get("cuts"):
            times = LayerTimes.from_json(plan["layer_times_s"])
            costs = times.costs(num_layers=scenario.layers)
            measured["healthy"] = step_s(run, 0, LOSS_STEP)
            predicted["healthy"] = times.step_s(rectangular_step(scenario, scenario.dp, costs))
            found["cuts"] = plan["layout_after"]["cuts"]
            found["layer_times_s"] = plan["layer_times_s"]
            found["simulated_s"] = simulated_steps(scenario, stage, costs)
    whole = scenario.whole_replicas
    if whole:
        # The replica that has the most decides: with as many each, the step takes as long.
        even = whole * -(-batch // whole)
        run = jobs.run(
            f"{name}-dropped", scenario, dp=whole, batch=even, steps=DROPPED_STEPS, more=()
        )
        measured["dropped"] = step_s(run, 0, DROPPED_STEPS)
        predicted["dropped"] = times.step_s(found["simulated_s"]["dropped"])
    return found


def row_of(
    jobs: Jobs, scenario: Scenario, *, rounds: int, with_split: bool, tell: Callable[[str], None]
) -> Row:
    """The medians of some rounds of one scenario, and what is simulated with their costs.

    ``with_split``: whether split backwards are measured too.
    """
    facts = scenario.facts(scenario.usual_stage)
    every = (OURS, REROUTED, *((OURS_SPLIT, REROUTED_SPLIT) if with_split else ()))
    # Rerouting has nobody to go to where a stage has lost everybody.
    rules = every if facts["rho"] is not None else [one for one in every if MOVING[0] in one[1]]
    found = []
    for number in range(rounds):
        tell(
            f"{scenario.name}: round {number + 1} of {rounds}, {scenario.pp * scenario.dp} workers"
        )
        found.append(one_round(jobs, f"{scenario.name}-{number}", scenario, rules))
    return {**facts, "simulated": False, **summary(facts, found), "rounds": found}


def summary(facts: Row, rounds: Sequence[Row]) -> Row:
    """Medians over the rounds: seconds, ratios within a round, and errors of the predictions."""
    names = list(rounds[0]["step_s"])
    each = [ratios(facts, one["step_s"]) for one in rounds]
    split = [ratios(facts, one["simulated_s"])["over_rerouting_both_split"] for one in rounds]
    wanted = ("over_rerouting", "over_dropping", "of_live_share", "over_rerouting_both_split")
    return {
        "cuts": rounds[-1]["cuts"],
        "step_s": {name: median(one["step_s"][name] for one in rounds) for name in names},
        "predicted_s": {
            name: _median(one["predicted_s"][name] for one in rounds) for name in names
        },
        "prediction_error": {
            name: _median(
                None
                if one["predicted_s"][name] is None
                else one["predicted_s"][name] / one["step_s"][name] - 1
                for one in rounds
            )
            for name in names
        },
        **{name: _median(one[name] for one in each) for name in wanted},
        # With the costs of these jobs.
        "simulated_over_rerouting_both_split": _median(split),
    }


def _median(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
