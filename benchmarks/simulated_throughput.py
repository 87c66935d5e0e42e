"""Throughput after losses by the planner's own step simulation: simulated, nothing is measured.

Equal layers of forward 1 and backward 2 a sample, messages of 0.05 + 0.10 a sample, reduction of 1
a layer at the end. Against rerouting only (ReCycle's rule, the same orders of operations) and
against dropping every hit replica (torchft's rule, global batch kept), coupled backward on both
sides; the same with split backward is in the rows as well.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.measurement import circumstances, run_benchmark
from benchmarks.shape import Shape
from elaswave_plugin.core.planner.costs import CostModel, uniform_costs
from elaswave_plugin.core.planner.dvfs import ClockTable
from elaswave_plugin.core.planner.joint import PlanRules, joint_plan
from elaswave_plugin.core.planner.prediction import DataflowChoice, Predictor, StepWork
from elaswave_plugin.core.planner.reasons import concentration, most_gain
from elaswave_plugin.core.step_time import LinkTime

# Long enough that every move pays: what is compared is the steady state.
HORIZON_S = 1e9
ONE, SPREAD = "one stage", "spread"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario(Shape):
    """Losses in one ``stage``, or spread over different stages and replicas (stage None)."""

    losses: int
    stage: int | None

    @property
    def place(self) -> str:
        """Where the losses are."""
        return SPREAD if self.stage is None else ONE

    def dead(self) -> list[int]:
        """The slots that are lost; the n-th in replica n."""
        stages = self.layout().stages
        return [
            stages[number % self.pp if self.stage is None else self.stage][number % self.dp].slots[
                0
            ]
            for number in range(self.losses)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """What a ratio of the rows of one shape and number of losses has to reach."""

    shape: str
    losses: int
    place: str
    ratio: str
    least: float

    def applies(self, row: dict[str, Any]) -> bool:
        """Whether a row is one of this bar's."""
        return (row["shape"], row["losses"], row["place"]) == (self.shape, self.losses, self.place)


SMALL, BIG = "PP4xDP4 L24 m16", "PP8xDP12 L48 m16"
BARS = (
    Bar(shape="PP2xDP2 L24 m16", losses=1, place=ONE, ratio="over_rerouting", least=1.35),
    Bar(shape=SMALL, losses=1, place=ONE, ratio="over_rerouting", least=1.03),
    Bar(shape=SMALL, losses=2, place=ONE, ratio="over_rerouting", least=1.42),
    Bar(shape=BIG, losses=6, place=ONE, ratio="over_rerouting", least=1.45),
    Bar(shape=BIG, losses=8, place=ONE, ratio="over_rerouting", least=2.0),
    Bar(shape=BIG, losses=6, place=SPREAD, ratio="over_rerouting", least=1.05),
    Bar(shape=BIG, losses=6, place=ONE, ratio="over_dropping", least=1.55),
    Bar(shape=BIG, losses=6, place=SPREAD, ratio="over_dropping", least=1.55),
    Bar(shape=BIG, losses=8, place=ONE, ratio="over_dropping", least=2.1),
    Bar(shape=BIG, losses=8, place=SPREAD, ratio="over_dropping", least=2.1),
    *(
        Bar(shape=SMALL, losses=losses, place=place, ratio="of_live_share", least=0.90)
        for losses in (1, 2)
        for place in (ONE, SPREAD)
    ),
    *(
        Bar(shape=BIG, losses=losses, place=place, ratio=ratio, least=least)
        for losses in (1, 6, 8)
        for place in (ONE, SPREAD)
        for ratio, least in (("of_live_share", 0.92), ("of_live_share_clocks_1.1", 0.96))
    ),
)


def scenarios() -> Iterator[Scenario]:
    """Small shapes with 1 to 4 losses and the 96 workers with 1, 6 and 8; every stage in turn."""
    shapes = [(2, 2, 24, slots, (1,)) for slots in (8, 16)]
    shapes += [(4, 4, 24, slots, (1, 2, 3)) for slots in (8, 16)]
    shapes += [(8, 12, 48, 16, (1, 6, 8))]
    for pp, dp, layers, slots, losses in shapes:
        for count in losses:
            for stage in (*range(pp), None):
                yield Scenario(pp=pp, dp=dp, layers=layers, slots=slots, losses=count, stage=stage)
    for slots in (8, 16):
        yield Scenario(pp=4, dp=4, layers=24, slots=slots, losses=4, stage=None)


def row_of(scenario: Scenario) -> dict[str, Any]:
    """Simulated step seconds of one scenario and the ratios between them."""
    layout = scenario.layout()
    after = layout.without(scenario.dead())
    live, rho = concentration(after)
    planned = _planned(scenario, PlanRules(horizon_s=HORIZON_S))
    routed = {"policies": ("reroute",), "move_layers": False, "move_workers": False}
    rerouted = _planned(scenario, PlanRules(**routed))
    clocks = ClockTable(clocks=(1.0, 1.1))
    healthy_s, dropped_s = _rectangular(scenario, scenario.dp), None
    if scenario.losses < scenario.dp:
        dropped_s = _rectangular(scenario, scenario.dp - scenario.losses)
    split = {"split_backward": True}
    planned_split = _planned(scenario, PlanRules(horizon_s=HORIZON_S, **split))
    rerouted_split = _planned(scenario, PlanRules(**routed, **split))
    with_clocks = _planned(scenario, PlanRules(horizon_s=HORIZON_S, clocks=clocks))
    return {
        "shape": str(scenario),
        "losses": scenario.losses,
        "place": scenario.place,
        "stage": scenario.stage,
        "live_share": live,
        "rho": rho,
        "gmax": most_gain(after, microbatches_each=scenario.slots),
        "healthy_s": healthy_s,
        "planned_s": planned,
        "rerouted_s": rerouted,
        "dropped_s": dropped_s,
        "planned_clocks_1.1_s": with_clocks,
        "planned_split_s": planned_split,
        "rerouted_split_s": rerouted_split,
        "over_rerouting": rerouted / planned,
        "over_dropping": None if dropped_s is None else dropped_s / planned,
        "of_live_share": healthy_s / planned / live,
        "of_live_share_clocks_1.1": healthy_s / with_clocks / live,
        "over_rerouting_both_split": rerouted_split / planned_split,
    }


def measure(every: Iterator[Scenario]) -> dict[str, Any]:
    """All rows, and every bar with the least and the median of its rows."""
    rows = []
    for scenario in every:
        row = row_of(scenario)
        rows.append(row)
        stage = "" if scenario.stage is None else f" {scenario.stage}"
        print(
            f"{row['shape']:18} {row['losses']} lost, {row['place'] + stage:11}"
            f" rho {row['rho']:.2f} Gmax {row['gmax']:.2f}"
            f"  over rerouting {row['over_rerouting']:.2f}"
            f"  over dropping {row['over_dropping'] or float('inf'):.2f}"
            f"  of live share {row['of_live_share']:.3f}, clocks 1.1x"
            f" {row['of_live_share_clocks_1.1']:.3f}",
            flush=True,
        )
    bars = [judged(bar, rows) for bar in BARS]
    print("bars (simulated; a bar holds where its worst stage reaches it):")
    for bar in bars:
        print(
            f"  {'holds' if bar['holds'] else 'MISSED':6} {bar['shape']:18} {bar['losses']} lost,"
            f" {bar['place']:9} {bar['ratio']:25} wanted {bar['wanted']:.2f}"
            f"  worst {bar['worst']:.3f} median {bar['median']:.3f} best {bar['best']:.3f}"
        )
    return {
        "simulated": True,
        **circumstances("benchmarks.simulated_throughput"),
        "model": " ".join((__doc__ or "").split("\n\n")[1].split()),
        "bars": bars,
        "rows": rows,
    }


def judged(bar: Bar, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A bar with what its rows reach; it holds where all of them do."""
    values = [row[bar.ratio] for row in rows if bar.applies(row)]
    return {
        "shape": bar.shape,
        "losses": bar.losses,
        "place": bar.place,
        "ratio": bar.ratio,
        "wanted": bar.least,
        "worst": min(values),
        "median": median(values),
        "best": max(values),
        "holds": min(values) >= bar.least,
    }


def _planned(scenario: Scenario, rules: PlanRules) -> float:
    layout = scenario.layout()
    plan = joint_plan(
        before=layout,
        after=layout.without(scenario.dead()),
        costs=_costs(scenario.layers),
        work=_work(scenario),
        rules=rules,
    )
    return plan.seconds


def _rectangular(scenario: Scenario, width: int) -> float:
    """1F1B on ``width`` whole replicas with the same global batch."""
    predictor = Predictor(_costs(scenario.layers), _work(scenario))
    seats = (range(width),) * scenario.pp
    choice = DataflowChoice("redeal", width)
    return predictor.predict(choice, seats, scenario.layout().cuts, extra=0).seconds


def _work(scenario: Scenario) -> StepWork:
    return StepWork(
        num_microbatches=scenario.dp * scenario.slots,
        microbatch_size=1,
        launch_width=scenario.dp,
    )


def _costs(layers: int) -> CostModel:
    return uniform_costs(
        num_layers=layers,
        forward_s=1.0,
        backward_s=2.0,
        reduce_s=1.0,
        link=LinkTime(latency_s=0.05, sample_s=0.10),
    )


def main() -> int:
    """Simulate every scenario; 0 only where every bar holds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    options = parser.parse_args()
    return run_benchmark(
        lambda: measure(scenarios()),
        options.json,
        good=lambda result: all(bar["holds"] for bar in result["bars"]),
    )


if __name__ == "__main__":
    sys.exit(main())
