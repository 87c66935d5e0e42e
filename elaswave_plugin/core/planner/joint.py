"""One plan of dataflow, widths, layers and clocks: the best of a set of simulated candidates.

Every candidate (search.py) is simulated: a cascade of planners, each taking what is best by its own
measure, loses several per cent to this. Moves have to pay: gain over the horizon against twice the
pause and what is lost behind the compute. The same facts give the same plan on every worker.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from elaswave_plugin.core.layout.layout import ParallelLayout
from elaswave_plugin.core.planner import reasons
from elaswave_plugin.core.planner.candidate import Candidate
from elaswave_plugin.core.planner.costs import CostModel
from elaswave_plugin.core.planner.dvfs import (
    ClockChoice,
    minimax_clocks,
    predicted_clocks,
    total_watts,
)
from elaswave_plugin.core.planner.layer_partition import benefit_seconds, tail_seconds
from elaswave_plugin.core.planner.microbatch_split import (
    REDEAL,
    REROUTE,
    MicrobatchSplit,
    StageSlowness,
)
from elaswave_plugin.core.planner.prediction import DataflowChoice, Replicas, StepWork
from elaswave_plugin.core.planner.rules import PlanRules
from elaswave_plugin.core.planner.search import (
    EXTRA_WINDOWS,
    Search,
    key_of,
    order_of,
)
from elaswave_plugin.core.step.dataflow import Slowness
from elaswave_plugin.errors import ConfigurationError

# So many of the best plans are simulated with split backwards too: it is not always the first.
MOST_SPLIT = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class JointPlan:
    """The chosen plan. ``seconds`` is predicted by simulation, like all others here.

    ``healthy_s``: the launch layout with one micro-batch slot a replica; ``speeds``: of each stage
    under the chosen clocks; ``candidates``: all that were simulated, the chosen one first and the
    others by time; ``reasons``: why, as sentences; ``slowness`` of the layout's replicas.
    """

    layout: ParallelLayout
    chosen: Candidate
    healthy_s: float
    seconds: float
    split_backward: bool
    clocks: ClockChoice | None
    speeds: tuple[float, ...]
    candidates: tuple[Candidate, ...]
    reasons: tuple[str, ...] = field(default=())
    slowness: StageSlowness = ()

    def __str__(self) -> str:
        return "\n".join([str(self.layout), *self.reasons])

    @property
    def digest(self) -> int:
        """A 63-bit fingerprint of what is to be done, to be compared between workers.

        Predicted seconds are no part of it: they decide, and need not be equal to the last bit.
        """
        one, clocks = self.chosen, None if self.clocks is None else self.clocks.clocks
        order = (one.choice, one.extra, one.windows, self.split_backward)
        todo = (self.layout, order, one.moves, clocks, self.speeds, self.slowness)
        return int.from_bytes(hashlib.sha256(repr(todo).encode()).digest()[:8], "big") >> 1


def joint_plan(
    *,
    before: ParallelLayout,
    after: ParallelLayout,
    costs: CostModel,
    work: StepWork,
    rules: PlanRules | None = None,
    speeds: Sequence[float] | None = None,
    slow: Slowness | None = None,
) -> JointPlan:
    """Plan for the layout ``after`` a change; state lies as in ``before``.

    ``speeds``: of each stage, 1 as measured; ``slow``: how many times as long single workers take,
    by slot. Raises ConfigurationError where nothing fits into memory, JobStopped where a stage has
    no worker and none can be moved there.
    """
    rules = rules or PlanRules()
    if after.num_layers != len(costs.bounds) - 1:
        raise ConfigurationError(
            f"costs are given for {len(costs.bounds) - 1} layers and the layout has"
            f" {after.num_layers}; wanted the same number"
        )
    return _Choice(Search(before, after.staffed(), costs, work, rules, speeds, slow or {})).plan()


class _Choice:
    """The choice of one candidate, with its clocks and the reasons."""

    def __init__(self, search: Search) -> None:
        self._search, self._rules = search, search.rules

    def plan(self) -> JointPlan:
        """Keep the candidate of the greatest benefit."""
        search = self._search
        found = search.candidates()
        stay = min((one for one in found if search.stays(one)), key=order_of, default=None)
        rated = sorted((self._rated(one, stay) for one in found), key=_rating)
        split = self._with_split_backward(rated, stay)
        chosen, splits = split or rated[0], split is not None
        seconds = chosen.seconds
        clocks = self._clocks(chosen, seconds, splits=splits)
        layout = search.moved(chosen.moves).recut(chosen.cuts)
        others = sorted((one for one in rated if key_of(one) != key_of(chosen)), key=order_of)
        plan = JointPlan(
            layout=layout,
            chosen=chosen,
            healthy_s=self._healthy_s(),
            seconds=seconds if clocks is None else clocks.seconds,
            split_backward=splits,
            clocks=clocks,
            speeds=search.speeds if clocks is None else tuple(self._speeds_at(clocks.clocks)),
            candidates=(chosen, *others),
            slowness=search.slowness(chosen.moves),
        )
        return replace(plan, reasons=self._reasons(plan))

    def _rated(self, one: Candidate, stay: Candidate | None) -> Candidate:
        """With its benefit; where staying is impossible (memory), time alone counts."""
        if stay is None:
            return replace(one, benefit_s=-one.seconds)
        benefit_s = benefit_seconds(
            before_s=stay.seconds,
            after_s=one.seconds,
            # A re-formed group needs its weights in any case.
            pause_s=max(0.0, one.pause_s - stay.pause_s),
            tail_s=max(0.0, self._tail_s(one) - self._tail_s(stay)),
            horizon_s=self._rules.horizon_s,
        )
        least = self._rules.least_gain
        if not self._search.stays(one) and one.seconds > stay.seconds * (1 - least):
            benefit_s = min(benefit_s, -least * self._rules.horizon_s)
        return replace(one, benefit_s=benefit_s)

    def _tail_s(self, one: Candidate) -> float:
        slowdown = self._search.costs.slowdown
        return tail_seconds(follow_s=one.follow_s, step_s=one.seconds, slowdown=slowdown)

    def _with_split_backward(
        self, rated: Sequence[Candidate], stay: Candidate | None
    ) -> Candidate | None:
        """The best of the best few with weight gradients in the bubbles; None where none gains.

        They, like greedy orders, are not simulated for slow workers.
        """
        search = self._search
        if not self._rules.split_backward or not search.knows_split or search.slow:
            return None
        # Weight gradients in its bubbles can make up for what rerouting lacks.
        routed = [one for one in rated if search.stays(one) and one.choice.policy == REROUTE][:1]
        best = [
            *rated[:MOST_SPLIT],
            *search.level(rated),
            *([] if stay is None else [stay]),
            *routed,
        ]
        found = [
            replace(one, seconds=search.seconds(one, search.speeds, splits=True))
            for one in {key_of(one): one for one in best}.values()
        ]
        stay = min((one for one in found if search.stays(one)), key=order_of, default=None)
        chosen = min((self._rated(one, stay) for one in found), key=_rating)
        gains = chosen.seconds < rated[0].seconds * (1 - self._rules.least_gain)
        return chosen if gains else None

    def _clocks(self, chosen: Candidate, seconds: float, *, splits: bool) -> ClockChoice | None:
        """Clocks for the chosen plan, which takes ``seconds`` at the present ones."""
        if self._rules.clocks is None:
            return None
        table, cap_w = self._rules.clocks, self._rules.power_cap_w
        widths, work_s = self._search.widths(chosen.moves), self._work_seconds(chosen)
        best = minimax_clocks(work_s=work_s, widths=widths, table=table, power_cap_w=cap_w)
        if self._search.is_exact and self._search.after.vpp == 1:
            # Greedy orders and split backwards cost too much to simulate for every clock.
            extra = EXTRA_WINDOWS[0] if chosen.extra is None else chosen.extra
            stand_in = replace(chosen, extra=extra)
            best = predicted_clocks(
                work_s=work_s,
                widths=widths,
                table=table,
                predict=lambda clocks: self._search.seconds(stand_in, self._speeds_at(clocks)),
                power_cap_w=cap_w,
            )
        clocked_s = self._search.seconds(chosen, self._speeds_at(best.clocks), splits=splits)
        present = (1.0,) * len(widths)
        watts = total_watts(present, widths, table)
        if clocked_s > seconds and 1.0 in table.clocks and watts <= cap_w:
            return ClockChoice(clocks=present, seconds=seconds, watts=watts)
        return replace(best, seconds=clocked_s)

    def _work_seconds(self, chosen: Candidate) -> list[float]:
        """Compute seconds of each stage's busiest worker, all its chunks together."""
        loads = self._search.loads(chosen.moves)
        parts = np.diff(self._search.costs.sample_seconds()[list(chosen.cuts)])
        return [
            load.samples * float(parts[stage :: len(loads)].sum()) / load.speed
            for stage, load in enumerate(loads)
        ]

    def _speeds_at(self, clocks: Sequence[float]) -> list[float]:
        assert self._rules.clocks is not None
        table = self._rules.clocks
        speeds = self._search.speeds
        return [s * table.speed(clock) for s, clock in zip(speeds, clocks, strict=True)]

    def _healthy_s(self) -> float:
        """The step of the launch layout, with 1F1B windows and every worker at full speed."""
        search = self._search
        choice = DataflowChoice(REDEAL, search.after.dp)
        replicas: Replicas = (range(search.after.dp),) * len(search.after.stages)
        return search.predictor.predict(choice, replicas, search.before.cuts, extra=0).seconds

    def _reasons(self, plan: JointPlan) -> tuple[str, ...]:
        search = self._search
        now, chosen = search.before.cuts, plan.chosen
        lines = [
            reasons.loss_reason(search.after),
            reasons.slow_reason(search.slow),
            reasons.dataflow_reason(plan.candidates, now=now),
            reasons.windows_reason(chosen),
        ]
        if self._rules.move_layers or self._rules.move_workers:
            stays, horizon_s = search.stays(chosen), self._rules.horizon_s
            lines[3:3] = [
                reasons.layers_reason(plan.candidates, search.after, now=now),
                reasons.workers_reason(plan.candidates),
                reasons.payback_reason(chosen, stays=stays, horizon_s=horizon_s),
            ]
        if plan.split_backward:
            lines.append("backward: split, weight gradients where a worker would wait")
        elif self._rules.split_backward and not search.slow:
            lines.append(
                "backward: stays whole, "
                + (
                    "weight gradients in bubbles gain nothing"
                    if search.knows_split
                    else "too many workers to place weight gradients"
                )
            )
        if plan.clocks is not None:
            lines.append(reasons.clocks_reason(plan.clocks))
        lines.append(
            reasons.result_reason(search.after, seconds=plan.seconds, healthy_s=plan.healthy_s)
        )
        if not search.is_exact:
            lines.append("estimated: stages flow as fluids, too many workers to simulate each")
        return tuple(line for line in lines if line is not None)


def _rating(one: Candidate) -> tuple[float, float, float, int]:
    return -one.benefit_s, *order_of(one)


def plan_split(plan: JointPlan, work: StepWork) -> MicrobatchSplit:
    """Return the samples that each worker runs at every stage."""
    return plan.chosen.choice.split(plan_replicas(plan), work, plan.slowness)


def plan_replicas(plan: JointPlan) -> Replicas:
    """The replicas of each stage of the plan's layout."""
    if plan.chosen.choice.policy == REROUTE:
        return tuple(tuple(group.replica for group in groups) for groups in plan.layout.stages)
    return tuple(map(range, plan.layout.widths))
