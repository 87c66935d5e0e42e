"""One plan of dataflow, widths, layers and clocks: the best of simulated candidates, and why.

Every candidate (search.py) is simulated: a cascade of planners, each taking what is best by its own
measure, loses several per cent to this. Moves have to pay: gain over the horizon against twice the
pause and what is lost behind the compute. The same facts give the same plan on every worker.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from elaswave_plugin.core.layout.layout import ParallelLayout
from elaswave_plugin.core.planner.costs import CostModel
from elaswave_plugin.core.planner.dvfs import (
    ClockChoice,
    minimax_clocks,
    predicted_clocks,
    total_watts,
)
from elaswave_plugin.core.planner.layer_partition import (
    benefit_seconds,
    layers_can_help,
    tail_seconds,
)
from elaswave_plugin.core.planner.microbatch_split import (
    REDEAL,
    REROUTE,
    MicrobatchSplit,
    StageSlowness,
)
from elaswave_plugin.core.planner.prediction import DataflowChoice, Replicas, StepWork
from elaswave_plugin.core.planner.search import (
    EXTRA_WINDOWS,
    Candidate,
    PlanRules,
    Search,
    key_of,
    order_of,
    plan_of,
)
from elaswave_plugin.core.step.dataflow import Slowness
from elaswave_plugin.core.step.schedule import window_sizes
from elaswave_plugin.errors import ConfigurationError


def concentration(layout: ParallelLayout) -> tuple[float, float]:
    """(live share, rho): live of launch replicas, and mean width over the narrowest one.

    rho bounds what any plan can gain over rerouting once bubbles vanish.
    """
    widths = layout.widths
    mean = sum(widths) / len(widths)
    return mean / layout.dp, mean / min(widths)


# ---- why a plan was chosen, as sentences --------------------------------------------------------
#
# The candidates were compared all together; the order dataflow, layers, workers, clocks is only
# that of the explanation.


def loss_reason(layout: ParallelLayout) -> str:
    """Describe what is left of the launch layout, or what it has become."""
    live, rho = concentration(layout)
    count, total = sum(layout.widths), layout.dp * len(layout.stages)
    of = f"{count} of {total} replicas are live"
    present = of if count <= total else f"{count} replicas are live, {total} at launch"
    return f"{present} ({live:.3f}), mean over narrowest stage rho = {rho:.2f}"


def slow_reason(slow: Mapping[int, float]) -> str | None:
    """Name the slow workers, by slot, and how many times as long each takes."""
    if not slow:
        return None
    return "slow: " + ", ".join(f"w{slot} takes {slow[slot]:g}x as long" for slot in sorted(slow))


def dataflow_reason(candidates: Sequence[Candidate], *, now: tuple[int, ...]) -> str:
    """Describe what dealing again gives where nothing moves."""
    stay = [one for one in candidates if not one.moves and one.cuts == now]
    if not stay:
        return "dataflow: nothing fits into memory where layers and workers stay"
    best = _fastest(stay)
    routed = [one for one in stay if one.choice.policy == REROUTE]
    against = f", rerouting {_fastest(routed).seconds:.4g} s" if routed else ""
    return f"dataflow: {best.choice}, {best.order}, takes {best.seconds:.4g} s{against}"


def layers_reason(
    candidates: Sequence[Candidate], layout: ParallelLayout, *, now: tuple[int, ...]
) -> str:
    """Describe what moving layers gives where workers stay, or why it gives nothing."""
    others = [one for one in candidates if not one.moves and one.cuts != now]
    stay = [one for one in candidates if not one.moves and one.cuts == now]
    if layout.vpp > 1:
        return "layers: stay, since those of an interleaved pipeline are not moved"
    best_s = _fastest(others).seconds if others else float("inf")
    if others and (not stay or best_s < _fastest(stay).seconds):
        cuts = " ".join(map(str, _fastest(others).cuts))
        return f"layers: cuts {cuts} take {best_s:.4g} s"
    for stage, width in enumerate(layout.widths):
        (start, stop), lost = layout.layers(stage)[0], layout.dp - width
        if lost > 0 and not layers_can_help(layers=stop - start, launch_width=layout.dp, lost=lost):
            return (
                f"layers: stay; one less evens the load only if the {stop - start} of stage {stage}"
                f" are more than (live {width}) / (lost {lost}) = {width / lost:.3g}"
            )
    return "layers: stay; other cuts are no faster" if stay else "layers: no cuts fit"


def workers_reason(candidates: Sequence[Candidate]) -> str | None:
    """Describe the fastest plan in which workers change stage; None where there is none."""
    moved = [one for one in candidates if one.moves]
    if not moved:
        return None
    best = _fastest(moved)
    return f"workers: {len(best.moves)} that change stage take {best.seconds:.4g} s"


def payback_reason(chosen: Candidate, *, stays: bool, horizon_s: float) -> str:
    """Describe what is done, and whether moving pays over the horizon."""
    what = f"{chosen.choice}, {chosen.order}"
    if stays:
        return f"chosen: {what}, nothing moves; no move pays within {horizon_s:g} s"
    return (
        f"chosen: {what}, moves {chosen.moved_bytes / 2**20:.4g} MiB with a pause of"
        f" {chosen.pause_s:.3g} s and {chosen.follow_s:.3g} s behind compute; gains"
        f" {chosen.benefit_s:.4g} of the next {horizon_s:g} s"
    )


def windows_reason(chosen: Candidate) -> str | None:
    """Slots in flight, where memory made them fewer than wanted."""
    if chosen.extra is None or not chosen.windows:
        return None
    if chosen.windows == window_sizes(len(chosen.windows), extra=chosen.extra):
        return None
    return f"memory: slots in flight are {' '.join(map(str, chosen.windows))} by stage"


def result_reason(layout: ParallelLayout, *, seconds: float, healthy_s: float) -> str:
    """The predicted step against the launch layout's."""
    live, _ = concentration(layout)
    return (
        f"predicted step {seconds:.4g} s, {healthy_s:.4g} s at launch: {healthy_s / seconds:.3f} of"
        f" its throughput, {healthy_s / seconds / live:.3f} of the live share"
    )


def clocks_reason(clocks: ClockChoice) -> str:
    """Describe the clocks, and the seconds of a step that they give."""
    return (
        f"clocks: {' '.join(f'{clock:g}' for clock in clocks.clocks)} give {clocks.seconds:.4g} s"
    )


def _fastest(candidates: Iterable[Candidate]) -> Candidate:
    return min(candidates, key=lambda one: one.seconds)


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
        found = self._split(best)
        stay = min((one for one in found if search.stays(one)), key=order_of, default=None)
        chosen = min((self._rated(one, stay) for one in found), key=_rating)
        # The few may leave out an order of what turns out to be the best place of all.
        found += self._split(one for one in rated if plan_of(one) == plan_of(chosen))
        chosen = min((self._rated(one, stay) for one in found), key=_rating)
        gains = chosen.seconds < rated[0].seconds * (1 - self._rules.least_gain)
        return chosen if gains else None

    def _split(self, candidates: Iterable[Candidate]) -> list[Candidate]:
        search = self._search
        return [
            replace(one, seconds=search.seconds(one, search.speeds, splits=True))
            for one in {key_of(one): one for one in candidates}.values()
        ]

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
            loss_reason(search.after),
            slow_reason(search.slow),
            dataflow_reason(plan.candidates, now=now),
            windows_reason(chosen),
        ]
        if self._rules.move_layers or self._rules.move_workers:
            stays, horizon_s = search.stays(chosen), self._rules.horizon_s
            lines[3:3] = [
                layers_reason(plan.candidates, search.after, now=now),
                workers_reason(plan.candidates),
                payback_reason(chosen, stays=stays, horizon_s=horizon_s),
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
            lines.append(clocks_reason(plan.clocks))
        lines.append(result_reason(search.after, seconds=plan.seconds, healthy_s=plan.healthy_s))
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
