"""`elaswave plan`: what a job would do about lost workers, predicted from the given costs.

Settings of the job have its names and defaults; the costs are those of equal layers.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from elaswave_plugin.config import ElasticConfig, from_section, parse_clocks
from elaswave_plugin.core.layout.layout import ParallelLayout, launch_layout, sizes_of
from elaswave_plugin.core.planner.costs import CostModel, uniform_costs
from elaswave_plugin.core.planner.dvfs import ClockTable
from elaswave_plugin.core.planner.joint import JointPlan, joint_plan, plan_replicas
from elaswave_plugin.core.planner.microbatch_split import REDEAL, REROUTE, RESIZE
from elaswave_plugin.core.planner.prediction import StepWork
from elaswave_plugin.core.planner.search import PlanRules
from elaswave_plugin.core.step.simulate import LinkTime
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.observer.output_file import check_output

_GIB = 2**30
# The buffers that a worker's snapshots alternate between.
_BUFFERS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerBytes:
    """A worker's weights, gradients and optimizer state, and its snapshots in host memory.

    ``kept``: copies of gradients, so that their sums stand through a loss, in every step;
    ``redone``: gradients beside them in the redo of a struck step.
    """

    state: float
    snapshots: float
    kept: float
    redone: float

    def __str__(self) -> str:
        kept = f" (kept sums: {self.kept / _GIB:.2f}, in a redo {self.redone / _GIB:.2f} more)"
        beside = kept if self.kept else ""
        return (
            f"{self.state / _GIB:.2f} GiB{beside} and {self.snapshots / _GIB:.2f} GiB of snapshots"
        )


def bytes_of_stages(
    layout: ParallelLayout, costs: CostModel, *, keeps_sums: bool
) -> tuple[WorkerBytes, ...]:
    """Count a worker of each stage; the optimizer state of a stage is shared out by its width.

    Activations are not counted: the planner keeps them below `--memory-gib` by its windows.
    """
    found = []
    for stage, replicas in enumerate(layout.stages):
        spans = layout.layers(stage)
        resident, shared, weights = (
            sum(float(totals[stop] - totals[start]) for start, stop in spans)
            for totals in map(costs.totals, ("resident_bytes", "optimizer_bytes", "weight_bytes"))
        )
        share = shared / len(replicas)
        gradients = (resident - weights) * (keeps_sums and len(replicas) > 1)
        found.append(
            WorkerBytes(
                state=resident + share,
                snapshots=_BUFFERS * share,
                kept=gradients / len(replicas),
                redone=gradients,
            )
        )
    return tuple(found)


def change_text(before: Sequence[WorkerBytes], after: Sequence[WorkerBytes]) -> str:
    """Return a line a stage: the bytes of a worker before and after."""
    pairs = enumerate(zip(before, after, strict=True))
    return "\n".join(f"stage {stage}: {old} -> {new}" for stage, (old, new) in pairs)


MOST_SHOWN_WORKERS = 64
SHOWN_CANDIDATES = 5
GIB, MIB = 2**30, 2**20
# Workers of each stage, before and after.
_Held = tuple[Sequence[WorkerBytes], Sequence[WorkerBytes]]
_COUNTS = ("microbatches", "microbatch_size")
_ABOVE_0 = ("forward_ms", "backward_ms", "memory_gib", "link_gbytes", "power_cap_w")
_FROM_0 = ("latency_ms", "sample_ms", "weights_mib", "activation_mib", "horizon_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """The options of the command, as given; sizes and counts are checked where they are used."""

    tp: int
    pp: int
    dp: int | None
    workers: int | None
    vpp: int
    layers: int
    dead: tuple[str, ...]
    microbatches: int
    microbatch_size: int
    consistency: str
    respawn: int
    dataflow: str
    move_layers: str
    split_backward: str
    forward_ms: float
    backward_ms: float
    latency_ms: float
    sample_ms: float
    weights_mib: float
    activation_mib: float
    memory_gib: float | None
    link_gbytes: float
    horizon_s: float
    clocks: str | None
    power_cap_w: float | None


def run_plan(options: PlanOptions, json_file: Path | None, console: Console) -> int:
    """Plan, print and write; raises ConfigurationError and LayoutError."""
    settings = _settings(options)
    _check_numbers(options)
    check_output("--json", json_file)
    before = _layout(options)
    after = before.without(dead_slots(options.dead)).reformed()
    work = StepWork(
        num_microbatches=options.microbatches * before.dp,
        microbatch_size=options.microbatch_size,
        launch_width=before.dp,
    )
    rules = _rules(options, settings)
    costs = _costs(options)
    plan = joint_plan(before=before, after=after, costs=costs, work=work, rules=rules)
    # Nothing is kept with virtual stages.
    keeps = options.consistency == "exact" and options.vpp == 1
    held = (
        bytes_of_stages(before, costs, keeps_sums=keeps),
        bytes_of_stages(plan.layout, costs, keeps_sums=keeps),
    )
    _print(before, plan, held, console)
    if not settings.moves_layers and settings.move_layers == "auto" and not after.is_rectangular:
        console.print(
            f"layers and workers keep their stages, since lost workers come back (respawn is"
            f" {settings.respawn}); --respawn 0 shows what is done where they do not",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    if json_file is not None:
        text = json.dumps(plan_record(before, plan, work, held), indent=1)
        json_file.write_text(text + "\n", encoding="utf-8")
        console.print(f"written to {json_file}", markup=False, highlight=False, soft_wrap=True)
    return 0


def dead_slots(texts: tuple[str, ...]) -> tuple[int, ...]:
    """Read slots and ranges, "5" or "4-9"; raises ConfigurationError."""
    slots: list[int] = []
    for text in texts:
        first, _, last = text.partition("-")
        if not first.isdigit() or not (last.isdigit() or text == first):
            raise ConfigurationError(
                f"--dead is {text!r}, wanted a slot or a range, as in 5 or 4-9"
            )
        span = range(int(first), int(last or first) + 1)
        if not span:
            raise ConfigurationError(f"--dead is {text!r}, wanted the lower slot first")
        slots += span
    return tuple(slots)


def plan_record(
    before: ParallelLayout, plan: JointPlan, work: StepWork, held: _Held
) -> dict[str, Any]:
    """Return what --json writes of a plan: its seconds are predicted by simulation."""
    chosen = plan.chosen
    return {
        "simulated": True,
        "layout_before": before.to_json(),
        "layout_after": plan.layout.to_json(),
        "worker_bytes": {
            name: [asdict(one) for one in stages]
            for name, stages in zip(("before", "after"), held, strict=True)
        },
        "plan": {
            "dataflow": str(chosen.choice),
            "order": chosen.order,
            "windows": list(chosen.windows),
            "split_backward": plan.split_backward,
            "layers_per_stage": [
                [list(span) for span in plan.layout.layers(stage)]
                for stage in range(len(plan.layout.stages))
            ],
            "samples_per_worker": _samples(plan, work),
            "width_moves": [list(move) for move in chosen.moves],
            "bytes_to_move": chosen.moved_bytes,
            "pause_s": chosen.pause_s,
            "predicted_step_s": plan.seconds,
            "predicted_step_before_s": plan.healthy_s,
            "clocks": None if plan.clocks is None else list(plan.clocks.clocks),
            "reasons": list(plan.reasons),
            "candidates": [str(one).strip() for one in plan.candidates],
        },
    }


def _samples(plan: JointPlan, work: StepWork) -> list[dict[str, int]]:
    """The least and the most samples of a worker in a step, by stage."""
    found = []
    for replicas in plan_replicas(plan):
        samples = plan.chosen.choice.split((replicas,), work).stages[0].samples().sum(0)
        found.append({"least": int(np.min(samples)), "most": int(np.max(samples))})
    return found


def _layout(options: PlanOptions) -> ParallelLayout:
    if (options.dp is None) == (options.workers is None):
        raise ConfigurationError(
            f"--dp is {options.dp} and --workers is {options.workers}, wanted exactly one of them"
        )
    dp = options.dp
    if options.workers is not None:
        dp = sizes_of(options.workers, tp=options.tp, pp=options.pp)
    assert dp is not None
    return launch_layout(
        tp=options.tp, pp=options.pp, dp=dp, num_layers=options.layers, vpp=options.vpp
    )


def _check_numbers(options: PlanOptions) -> None:
    """Raise ConfigurationError for an amount that is none, by the name of its option."""
    for names, least, words in (
        (_COUNTS, 1, "1 or more"),
        (_ABOVE_0, math.ulp(0), "a number above 0"),
        (_FROM_0, 0, "a number from 0"),
    ):
        for name in names:
            value = getattr(options, name)
            if value is not None and not least <= value < math.inf:
                option = "--" + name.replace("_", "-")
                raise ConfigurationError(f"{option} is {value:g}, wanted {words}")


def _costs(options: PlanOptions) -> CostModel:
    memory_gib = math.inf if options.memory_gib is None else options.memory_gib
    return uniform_costs(
        num_layers=options.layers,
        forward_s=options.forward_ms / 1e3,
        backward_s=options.backward_ms / 1e3,
        activation_bytes=options.activation_mib * MIB,
        weight_bytes=options.weights_mib * MIB,
        link=LinkTime(latency_s=options.latency_ms / 1e3, sample_s=options.sample_ms / 1e3),
        memory_bytes=memory_gib * GIB,
        transfer_bytes_per_s=options.link_gbytes * 1e9,
        rebind_s=0.1,
    )


def _settings(options: PlanOptions) -> ElasticConfig:
    """The job's settings that plans depend on; raises ConfigurationError."""
    if options.split_backward == "always":
        raise ConfigurationError(
            "--split-backward is always, and a plan splits backwards where the step gains by it;"
            " give auto or never"
        )
    names = ("consistency", "respawn", "dataflow", "move_layers", "split_backward")
    return from_section({name: getattr(options, name) for name in names}, source="elaswave plan")


def _rules(options: PlanOptions, settings: ElasticConfig) -> PlanRules:
    if options.power_cap_w is not None and options.clocks is None:
        raise ConfigurationError("--power-cap-w is given without --clocks; give the clocks as well")
    table = None
    if options.clocks is not None:
        table = ClockTable(clocks=parse_clocks(options.clocks, name="--clocks"))
    every = (REDEAL, REROUTE, RESIZE) if settings.consistency == "fast" else (REDEAL, REROUTE)
    return PlanRules(
        policies=every if settings.dataflow == "auto" else (settings.dataflow,),
        move_layers=settings.moves_layers,
        move_workers=settings.moves_layers,
        split_backward=settings.split_backward != "never",
        horizon_s=options.horizon_s,
        clocks=table,
        power_cap_w=math.inf if options.power_cap_w is None else options.power_cap_w,
    )


def _print(before: ParallelLayout, plan: JointPlan, held: _Held, console: Console) -> None:
    small = len(before.workers) <= MOST_SHOWN_WORKERS
    shown = [
        ("before", str(before) if small else before.summary()),
        ("after", str(plan.layout) if small else plan.layout.summary()),
        ("a worker's bytes, without activations", change_text(*held)),
        ("why", "\n".join(plan.reasons)),
        (
            f"the best of {len(plan.candidates)} simulated plans, the chosen one first",
            "\n".join(map(str, plan.candidates[:SHOWN_CANDIDATES])),
        ),
    ]
    for title, text in shown:
        console.print(title, style="bold", markup=False, highlight=False)
        console.print(text, markup=False, highlight=False, soft_wrap=True)
