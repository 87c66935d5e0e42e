"""Times the planning of one loss in very large jobs: layout, plan and one worker's op list."""

import gc
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from benchmarks import command
from benchmarks.circumstances import circumstances
from benchmarks.plan_ops import worker_ops
from elaswave_plugin.core.layout.layout import launch_layout
from elaswave_plugin.core.planner.costs import CostModel, uniform_costs
from elaswave_plugin.core.planner.joint import JointPlan, joint_plan
from elaswave_plugin.core.planner.prediction import StepWork
from elaswave_plugin.core.step.simulate import LinkTime
from elaswave_plugin.observer.output_file import check_output

SLOTS = 64
LAYERS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job and how many of its workers die at once; ``bar_s`` is what planning may take."""

    tp: int
    pp: int
    dp: int
    dead: int
    bar_s: float

    @property
    def workers(self) -> int:
        """Workers at launch."""
        return self.tp * self.pp * self.dp

    def __str__(self) -> str:
        return f"TP{self.tp} x PP{self.pp} x DP{self.dp}"


def jobs() -> tuple[Job, ...]:
    """The sizes with a bar, and a thousand workers, which are simulated one by one."""
    return (
        Job(tp=8, pp=8, dp=16, dead=10, bar_s=1.0),
        Job(tp=1, pp=50, dp=2_000, dead=1_000, bar_s=1.0),
        Job(tp=8, pp=50, dp=250, dead=1_000, bar_s=1.0),
        Job(tp=1, pp=50, dp=20_000, dead=10_000, bar_s=3.0),
        Job(tp=8, pp=50, dp=2_500, dead=10_000, bar_s=3.0),
    )


def measure(measured: tuple[Job, ...] | None = None, *, repeat: int = 3) -> dict[str, Any]:
    """One row a job: the median of ``repeat`` plans, each for other random losses."""
    return {
        "what": "seconds from the losses to the plan and one worker's op list, one process",
        **circumstances(),
        "layers": LAYERS,
        "microbatches_per_replica": SLOTS,
        "rows": [_row(job, repeat) for job in measured or jobs()],
    }


def run_bench(
    measured: Callable[[], dict[str, Any]], json_file: Path | None, echo: Callable[[str], None]
) -> int:
    """Measure, print and write; 0 only where every row kept its bar."""
    check_output("--json", json_file)
    result = measured()
    for row in result["rows"]:
        echo(
            f"{row['workers']:>9,} workers, {row['dead']:>6,} dead, {row['layout']}:"
            f" {row['seconds']:.3f} s (at most {row['bar_s']:g} s)"
        )
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        echo(f"written to {json_file}")
    return 0 if all(row["seconds"] < row["bar_s"] for row in result["rows"]) else 1


def _row(job: Job, repeat: int) -> dict[str, Any]:
    layout = launch_layout(tp=job.tp, pp=job.pp, dp=job.dp, num_layers=LAYERS)
    parts = {"layout_s": 0.0, "plan_s": 0.0, "ops_s": 0.0}
    runs = []
    for seed in range(repeat):
        gc.collect()  # what earlier rows left behind is not part of this one
        dead = random.Random(seed).sample(range(job.workers), job.dead)
        start = time.perf_counter()
        after = layout.without(dead).reformed()
        edited = time.perf_counter()
        work = StepWork(num_microbatches=SLOTS * job.dp, microbatch_size=1, launch_width=job.dp)
        plan = joint_plan(before=layout, after=after, costs=costs(), work=work)
        planned = time.perf_counter()
        ops = worker_ops(plan, costs(), work, stage=0, replica=0)
        end = time.perf_counter()
        runs.append((end - start, edited - start, planned - edited, end - planned))
    runs.sort()
    seconds, parts["layout_s"], parts["plan_s"], parts["ops_s"] = runs[len(runs) // 2]
    return {
        "workers": job.workers,
        "dead": job.dead,
        "seconds": round(seconds, 4),
        "slowest_s": round(runs[-1][0], 4),
        "bar_s": job.bar_s,
        "layout": str(job),
        **{name: round(value, 4) for name, value in parts.items()},
        "candidates": len(plan.candidates),
        "own_ops": len(ops),
        "plan": _summary(plan),
    }


def costs() -> CostModel:
    """Layers of 10 ms forward and 0.4 GB of weights, links of 25 GB/s."""
    return uniform_costs(
        num_layers=LAYERS,
        forward_s=0.01,
        backward_s=0.02,
        reduce_s=0.01,
        activation_bytes=1e7,
        weight_bytes=4e8,
        link=LinkTime(latency_s=0.0005, sample_s=0.001),
        transfer_bytes_per_s=25e9,
        rebind_s=0.1,
    )


def _summary(plan: JointPlan) -> list[str]:
    return [f"{plan.chosen.choice}, {len(plan.chosen.moves)} width moves", *plan.reasons]


def plan(json_file: command.JsonFile = None) -> int:
    """Time the planning of a loss among 100,000 and 1,000,000 workers."""
    return run_bench(measure, json_file, typer.echo)


def main(argv: Sequence[str]) -> int:
    """Measure as the command line says."""
    return command.run(plan, "plan", argv)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
