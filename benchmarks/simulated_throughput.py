"""Throughput after losses by the planner's own step simulation: nothing here is measured.

Of equal layers whose times are assumed, or of those that a running job has measured. Against
rerouting only (ReCycle's rule; by the window rule, and in orders chosen as ours) and against
dropping every hit replica (torchft's rule, global batch kept), coupled backward on both sides, and
split on both.
"""

from __future__ import annotations

from typing import Any

from benchmarks.scenarios import Scenario
from elaswave_plugin.core.planner.costs import CostModel, uniform_costs
from elaswave_plugin.core.planner.dvfs import ClockTable
from elaswave_plugin.core.planner.joint import joint_plan
from elaswave_plugin.core.planner.microbatch_split import REROUTE
from elaswave_plugin.core.planner.prediction import DataflowChoice, Predictor
from elaswave_plugin.core.planner.search import EXTRA_WINDOWS, PlanRules
from elaswave_plugin.core.step.simulate import LinkTime

# Long enough that every move pays: what is compared is the steady state.
HORIZON_S = 1e9
MODEL = (
    "equal layers of forward 1 and backward 2 a sample, messages of 0.05 + 0.10 a sample, reduction"
    " of 1 a layer at the end"
)
Seconds = dict[str, float | None]


def assumed_costs(num_layers: int) -> CostModel:
    """Return the costs that `MODEL` describes."""
    return uniform_costs(
        num_layers=num_layers,
        forward_s=1.0,
        backward_s=2.0,
        reduce_s=1.0,
        link=LinkTime(latency_s=0.05, sample_s=0.10),
    )


def rows_of(scenario: Scenario) -> list[dict[str, Any]]:
    """Simulated steps of one scenario, with its losses in each stage in turn, and their ratios."""
    costs = assumed_costs(scenario.layers)
    return [_row(scenario, stage, costs) for stage in scenario.stages]


def _row(scenario: Scenario, stage: int | None, costs: CostModel) -> dict[str, Any]:
    facts, step_s = scenario.facts(stage), simulated_steps(scenario, stage, costs)
    return {**facts, "simulated": True, "step_s": step_s, **ratios(facts, step_s)}


def ratios(facts: dict[str, Any], step_s: Seconds) -> dict[str, float | None]:
    """Return the ratios by which the rows are judged; None where one side cannot run."""

    def over(one: str, other: str) -> float | None:
        above, below = step_s.get(one), step_s.get(other)
        return None if above is None or below is None else above / below

    shares = {
        "of_live_share": over("healthy", "ours"),
        "of_live_share_clocks_1.1": over("healthy", "ours_clocks_1.1"),
    }
    return {
        "over_rerouting": over("rerouted", "ours"),
        "over_dropping": over("dropped", "ours"),
        **{
            name: None if share is None else share / facts["live_share"]
            for name, share in shares.items()
        },
        "over_rerouting_in_our_orders": over("rerouted_in_our_orders", "ours"),
        "over_rerouting_both_split": over("rerouted_split", "ours_split"),
        "over_split_rerouting": over("rerouted_split", "ours"),
    }


def simulated_steps(scenario: Scenario, stage: int | None, costs: CostModel) -> Seconds:
    """Return the seconds of a step by each rule; None where a stage has no worker or replica."""
    routed: dict[str, Any] = {
        "policies": (REROUTE,),
        "move_layers": False,
        "move_workers": False,
    }
    ours, split = {"horizon_s": HORIZON_S}, {"split_backward": True}
    fills_gaps = all(scenario.layout().without(scenario.dead(stage)).widths)

    def planned(**rules: Any) -> float:
        layout = scenario.layout()
        return joint_plan(
            before=layout,
            after=layout.without(scenario.dead(stage)),
            costs=costs,
            work=scenario.work,
            rules=PlanRules(**rules),
        ).seconds

    def by_windows() -> float:
        """Simulate the window rule's orders alone, by which the bars were set (DECISIONS.md)."""
        layout = scenario.layout()
        stages = layout.without(scenario.dead(stage)).stages
        replicas = tuple(tuple(group.replica for group in groups) for groups in stages)
        choice, predictor = DataflowChoice(REROUTE, scenario.dp), Predictor(costs, scenario.work)
        return min(
            predictor.predict(choice, replicas, layout.cuts, extra=extra).seconds
            for extra in EXTRA_WINDOWS
        )

    return {
        "healthy": rectangular_step(scenario, scenario.dp, costs),
        "ours": planned(**ours),
        "rerouted": by_windows() if fills_gaps else None,
        "rerouted_in_our_orders": planned(**routed) if fills_gaps else None,
        "dropped": (
            rectangular_step(scenario, scenario.whole_replicas, costs)
            if scenario.whole_replicas
            else None
        ),
        "ours_clocks_1.1": planned(**ours, clocks=ClockTable(clocks=(1.0, 1.1))),
        "ours_split": planned(**ours, **split),
        "rerouted_split": planned(**routed, **split) if fills_gaps else None,
    }


def rectangular_step(scenario: Scenario, width: int, costs: CostModel) -> float:
    """1F1B on ``width`` whole replicas with the same global batch."""
    predictor = Predictor(costs, scenario.work)
    replicas = (range(width),) * scenario.pp
    cuts = scenario.layout().cuts
    return predictor.predict(DataflowChoice("redeal", width), replicas, cuts, extra=0).seconds
