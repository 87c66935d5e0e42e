"""One plan of dataflow, widths, layers and clocks, from a small set of simulated candidates.

Every candidate is simulated: a cascade of planners, each taking what is best by its own measure,
loses several per cent to this. The candidates are the widths on the way from the live ones to level
ones; for each the present cuts, the minimax cuts, and minimax cuts for loads blended towards their
mean (bubbles charge every stage, not only the busiest); then, for the best of these, the other
dataflows and windows. Moves have to pay: gain over the horizon against twice the pause. The same
facts give the same plan on every worker.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import ceil

import numpy as np

from elaswave_plugin.core.dataflow import Slowness as SlowSlots
from elaswave_plugin.core.fair_shares import fair_width, slowest_seconds
from elaswave_plugin.core.layout import ParallelLayout
from elaswave_plugin.core.planner import reasons
from elaswave_plugin.core.planner.candidate import Candidate
from elaswave_plugin.core.planner.costs import CostModel
from elaswave_plugin.core.planner.dvfs import (
    ClockChoice,
    ClockTable,
    minimax_clocks,
    predicted_clocks,
    total_watts,
)
from elaswave_plugin.core.planner.layer_partition import (
    StageLoad,
    behind_seconds,
    benefit_seconds,
    moved_bytes,
    partitions,
    pause_seconds,
)
from elaswave_plugin.core.planner.microbatch_split import (
    POLICIES,
    REDEAL,
    REROUTE,
    RESIZE,
    Slowness,
)
from elaswave_plugin.core.planner.prediction import (
    DataflowChoice,
    Predictor,
    Seats,
    StepWork,
)
from elaswave_plugin.core.planner.width_moves import WidthMove, width_candidates
from elaswave_plugin.errors import ConfigurationError

BLENDS = (0.0, 0.1, 0.25)
# Of several cuts, the ones that move less are kept as well: they cost less pause.
PLAN_SLACKS = (0.0, 0.005, 0.02)
EXTRA_WINDOWS = (1, 0, 2)
GREEDY = None
# So many plans are tried in all orders and dataflows, more where they are cheap to simulate.
LEAST_REFINED, MOST_REFINED = 3, 8
LEAST_GREEDY, MOST_GREEDY = 3, 12
CHEAP_PASSES = 6_000
MOST_SMALL_PASSES = 4_000
MOST_SINGLE_PASSES = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRules:
    """What the planner may do.

    ``policies``: dataflows allowed (one: it is forced). ``horizon_s``: how long a plan is expected
    to last; ``least_gain``: share of the step below which no move is worth the trouble.
    ``split_backward``: weight gradients fill bubbles. ``clocks``: None leaves them alone.
    """

    policies: tuple[str, ...] = POLICIES
    move_layers: bool = True
    move_workers: bool = True
    split_backward: bool = False
    horizon_s: float = 600.0
    least_gain: float = 0.005
    clocks: ClockTable | None = None
    power_cap_w: float = float("inf")

    def __post_init__(self) -> None:
        unknown = [policy for policy in self.policies if policy not in POLICIES]
        if unknown or not self.policies:
            raise ConfigurationError(
                f"dataflow is {', '.join(unknown) or 'empty'!r}, wanted {', '.join(POLICIES)}"
            )
        if not self.horizon_s >= 0:
            raise ConfigurationError(f"horizon_s is {self.horizon_s}, wanted a number from 0")


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
    slowness: Slowness = ()

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
    slow: SlowSlots | None = None,
) -> JointPlan:
    """Plan for the layout ``after`` a change; state lies as in ``before``.

    ``speeds``: of each stage, 1 as measured; ``slow``: how many times as long single workers take,
    by slot. Raises ConfigurationError where nothing fits into memory, JobStopped where a stage has
    nobody and nobody can be moved there.
    """
    rules = rules or PlanRules()
    if after.num_layers != len(costs.bounds) - 1:
        raise ConfigurationError(
            f"costs are given for {len(costs.bounds) - 1} layers and the layout has"
            f" {after.num_layers}; wanted the same number"
        )
    search = _Search(before, after.staffed(), costs, work, rules, speeds, slow or {})
    return search.plan()


class _Search:
    """The candidates of one change, and what is needed to simulate more of them."""

    def __init__(
        self,
        before: ParallelLayout,
        after: ParallelLayout,
        costs: CostModel,
        work: StepWork,
        rules: PlanRules,
        speeds: Sequence[float] | None,
        slow: SlowSlots,
    ) -> None:
        self.before, self.after = before, after
        self.slow = {slot: factor for slot, factor in slow.items() if factor != 1.0}
        self.costs, self.work, self.rules = costs, work, rules
        num_stages = len(after.stages)
        self.speeds = tuple(speeds) if speeds is not None else (1.0,) * num_stages
        self.predictor = Predictor(costs, work, vpp=after.vpp)
        self.is_exact = self.predictor.is_exact(num_stages)
        self.knows_split = self.predictor.knows_split(num_stages)
        # All candidates only where each is cheap, so that a plan takes under half a second.
        self.passes = work.num_microbatches * num_stages
        self.is_small = self.passes <= MOST_SMALL_PASSES
        self.new_groups = tuple(
            0 if new is old else len(set(new) - set(old))
            for new, old in zip(after.stages, before.stages, strict=True)
        )
        self.rejected: list[str] = []

    def plan(self) -> JointPlan:
        """Simulate the candidates in rounds and keep the one of the greatest benefit."""
        found = self._first_round()
        if not found:
            raise ConfigurationError(self.rejected[0])
        most = max(LEAST_REFINED, min(MOST_REFINED, CHEAP_PASSES // self.passes))
        for one in sorted(found, key=_order)[:most] + found[:1]:
            found += self._refined(one, {_key(other) for other in found})
        found += self._greedy(sorted(found, key=_order))
        stay = min((one for one in found if self._stays(one)), key=_order, default=None)
        rated = sorted((self._rated(one, stay) for one in found), key=_rating)
        split = self._with_split_backward(rated, stay)
        chosen, splits = split or rated[0], split is not None
        seconds = chosen.seconds
        clocks = self._clocks(chosen, seconds, splits=splits)
        layout = self._moved(chosen.moves).recut(chosen.cuts)
        others = sorted((one for one in rated if _key(one) != _key(chosen)), key=_order)
        plan = JointPlan(
            layout=layout,
            chosen=chosen,
            healthy_s=self._healthy_s(),
            seconds=seconds if clocks is None else clocks.seconds,
            split_backward=splits,
            clocks=clocks,
            speeds=self.speeds if clocks is None else tuple(self._speeds_at(clocks.clocks)),
            candidates=(chosen, *others),
            slowness=self._slowness(chosen.moves),
        )
        return replace(plan, reasons=self._reasons(plan))

    # ---- candidates ---------------------------------------------------------------------------

    def _first_round(self) -> list[Candidate]:
        """One dataflow with every pair of widths and cuts; what stays as it is comes first."""
        found: list[Candidate] = []
        moves_allowed = self.rules.move_workers and self.after.vpp == 1
        ways = width_candidates(self.after.widths, most=4 if self.is_small else 2)
        for moves, widths in ways if moves_allowed else ways[:1]:
            choice = self._choices(moves)[0]
            for cuts in self._cuts(moves, widths):
                self._add(found, choice, moves, cuts, extra=EXTRA_WINDOWS[0])
        return found

    def _refined(self, base: Candidate, known: set[tuple[object, ...]]) -> list[Candidate]:
        """The other dataflows and windows for the widths and cuts of ``base``."""
        found: list[Candidate] = []
        for choice in self._choices(base.moves):
            for extra in EXTRA_WINDOWS if self.after.vpp == 1 else EXTRA_WINDOWS[:1]:
                if (choice, base.moves, base.cuts, extra) not in known:
                    self._add(found, choice, base.moves, base.cuts, extra=extra)
        return found

    def _greedy(self, ordered: Sequence[Candidate]) -> list[Candidate]:
        """The fastest plans, and the fastest and the rerouted one that stay, in greedy order.

        Only where that gains: the window rule goes by no prediction.
        """
        found: list[Candidate] = []
        if not self.predictor.knows_greedy(len(self.after.stages)) or self.slow:
            return found
        stay = [one for one in ordered if self._stays(one)]
        routed = [one for one in stay if one.choice.policy == REROUTE]
        most = max(LEAST_GREEDY, min(MOST_GREEDY, CHEAP_PASSES // self.passes))
        fastest = dict.fromkeys((one.choice, one.moves, one.cuts) for one in ordered)
        kept = [(one.choice, one.moves, one.cuts) for one in [*stay[:1], *routed[:1]]]
        for choice, moves, cuts in dict.fromkeys([*list(fastest)[:most], *kept]):
            self._add(found, choice, moves, cuts, extra=GREEDY)
        least = 1 - self.rules.least_gain
        by_windows = {}
        for one in reversed(ordered):
            by_windows[one.choice, one.moves, one.cuts] = one.seconds
        return [
            one
            for one in found
            if one.seconds < least * by_windows[one.choice, one.moves, one.cuts]
        ]

    def _choices(self, moves: Sequence[WidthMove]) -> list[DataflowChoice]:
        """The dataflows allowed; first the one that holds least in flight."""
        choices = []
        widths = self._widths(moves)
        if REDEAL in self.rules.policies:
            # Fluids know no slots that are wider than the weakest stage.
            fluid = max(1, int(min(self._fair_widths(moves))))
            slots = [min(widths) if self.is_exact else fluid]
            if self.is_exact:
                slots += [max(widths), round(sum(widths) / len(widths))]
            choices += [DataflowChoice(REDEAL, width) for width in dict.fromkeys(slots)]
        # Cutting single samples gains next to nothing, and is the costliest to simulate.
        is_worth = self.work.microbatch_size > 1 or self.passes <= MOST_SINGLE_PASSES
        if RESIZE in self.rules.policies and (is_worth or not choices):
            choices.append(DataflowChoice(RESIZE, self.work.launch_width))
        if REROUTE in self.rules.policies and self.is_exact:
            choices.append(DataflowChoice(REROUTE, self.work.launch_width))
        if not choices:
            raise ConfigurationError(
                f"{sum(widths)} replicas are too many to simulate rerouting; allow {REDEAL} as well"
            )
        return choices

    def _cuts(
        self, moves: Sequence[WidthMove], widths: Sequence[int]
    ) -> tuple[tuple[int, ...], ...]:
        """The present cuts, and those by minimax for plain and for blended loads."""
        now = self.before.cuts
        found = [now]
        if self.rules.move_layers and self.after.vpp == 1:
            slacks = PLAN_SLACKS if self.is_small else PLAN_SLACKS[1:]
            for blend in BLENDS if self.is_small else BLENDS[1:2]:
                loads = self._loads(moves, widths, blend=blend)
                try:
                    options = partitions(self.costs, loads, now=now, slacks=slacks)
                except ConfigurationError as error:
                    self.rejected.append(str(error))
                    continue
                found += [option.cuts for option in options[: 1 if blend else len(slacks)]]
        return tuple(dict.fromkeys(found))

    def _add(
        self,
        found: list[Candidate],
        choice: DataflowChoice,
        moves: tuple[WidthMove, ...],
        cuts: tuple[int, ...],
        *,
        extra: int | None,
    ) -> None:
        """Simulate one candidate and keep it, or the reason why it is impossible."""
        try:
            predicted = self.predictor.predict(
                choice,
                self._seats(moves),
                cuts,
                extra=extra,
                speeds=self.speeds,
                slowness=self._slowness(moves),
            )
        except ConfigurationError as error:
            self.rejected.append(str(error))
            return
        # Chunk by chunk where the pipeline is interleaved: virtual stages take turns.
        loads = self._loads(moves, self._widths(moves)) * self.after.vpp
        now = self.before.cuts
        found.append(
            Candidate(
                choice=choice,
                moves=moves,
                cuts=cuts,
                extra=extra,
                windows=predicted.windows,
                seconds=predicted.seconds,
                moved_bytes=moved_bytes(self.costs, loads, cuts, now=now),
                pause_s=pause_seconds(self.costs, loads, cuts, now=now),
                behind_s=behind_seconds(self.costs, loads, cuts, now=now),
            )
        )

    def _loads(
        self, moves: Sequence[WidthMove], widths: Sequence[int], *, blend: float = 0.0
    ) -> list[StageLoad]:
        """What each stage's busiest worker has to do, blended towards the mean of the stages."""
        size = self.work.microbatch_size
        if REDEAL in self.rules.policies or REROUTE in self.rules.policies:
            samples = [size * busiest for busiest in self._busiest(moves)]
        else:
            samples = [size * self.work.num_microbatches / width for width in widths]
        mean = sum(samples) / len(samples)
        slot_width, fair = min(widths), self._fair_widths(moves)
        loads = []
        for stage, width in enumerate(widths):
            joiners = self.new_groups[stage] + sum(move.target == stage for move in moves)
            loads.append(
                StageLoad(
                    samples=(1 - blend) * samples[stage] + blend * mean,
                    width=width,
                    speed=self.speeds[stage],
                    in_flight=(len(widths) - stage) * size * ceil(slot_width / fair[stage]),
                    joiners=joiners,
                )
            )
        return loads

    def _widths(self, moves: Sequence[WidthMove]) -> tuple[int, ...]:
        widths = list(self.after.widths)
        for source, target in moves:
            widths[source] -= 1
            widths[target] += 1
        return tuple(widths)

    def _moved(self, moves: Sequence[WidthMove]) -> ParallelLayout:
        layout = self.after
        for source, target in moves:
            layout = layout.moved(source=source, target=target)
        return layout

    def _slowness(self, moves: Sequence[WidthMove]) -> Slowness:
        """Of each replica, by stage; nothing where nobody is slow."""
        if not self.slow:
            return ()
        return slowness_of(self._moved(moves), self.slow)

    def _fair_widths(self, moves: Sequence[WidthMove]) -> Sequence[float]:
        """How many usual workers each stage is worth."""
        return [fair_width(stage) for stage in self._slowness(moves)] or self._widths(moves)

    def _busiest(self, moves: Sequence[WidthMove]) -> list[float]:
        """What the last worker of each stage is done after, in micro-batches of a usual one."""
        count, slowness = self.work.num_microbatches, self._slowness(moves)
        if self.is_exact and slowness:
            return [slowest_seconds(count, stage) for stage in slowness]
        return [float(ceil(count / width)) for width in self._fair_widths(moves)]

    def _seats(self, moves: Sequence[WidthMove]) -> Seats:
        """The replica seats of each stage after ``moves``, as `ParallelLayout.moved` gives them."""
        if not self.is_exact:
            return tuple(map(range, self._widths(moves)))
        seats = [[group.replica for group in groups] for groups in self.after.stages]
        for source, target in moves:
            seats[source].pop()
            vacant = set(range(self.after.dp)).difference(seats[target])
            seats[target] = sorted([*seats[target], min(vacant)])
        return tuple(map(tuple, seats))

    # ---- choosing -----------------------------------------------------------------------------

    def _stays(self, one: Candidate) -> bool:
        return not one.moves and one.cuts == self.before.cuts

    def _rated(self, one: Candidate, stay: Candidate | None) -> Candidate:
        """With its benefit; where staying is impossible (memory), time alone counts."""
        if stay is None:
            return replace(one, benefit_s=-one.seconds)
        benefit_s = benefit_seconds(
            before_s=stay.seconds,
            after_s=one.seconds,
            # A re-formed group needs its weights in any case.
            pause_s=max(0.0, one.pause_s - stay.pause_s),
            behind_s=max(0.0, one.behind_s - stay.behind_s),
            horizon_s=self.rules.horizon_s,
        )
        least = self.rules.least_gain
        if not self._stays(one) and one.seconds > stay.seconds * (1 - least):
            benefit_s = min(benefit_s, -least * self.rules.horizon_s)
        return replace(one, benefit_s=benefit_s)

    def _with_split_backward(
        self, rated: Sequence[Candidate], stay: Candidate | None
    ) -> Candidate | None:
        """The best of the best few with weight gradients in the bubbles; None where none gains.

        They, like greedy orders, are not simulated for slow workers.
        """
        if not self.rules.split_backward or not self.knows_split or self.slow:
            return None
        best = list(rated[:LEAST_REFINED])
        best += [one for one in rated[LEAST_REFINED:] if stay and _key(one) == _key(stay)]
        found = [replace(one, seconds=self._seconds(one, self.speeds, splits=True)) for one in best]
        stay = min((one for one in found if self._stays(one)), key=_order, default=None)
        chosen = min((self._rated(one, stay) for one in found), key=_rating)
        gains = chosen.seconds < rated[0].seconds * (1 - self.rules.least_gain)
        return chosen if gains else None

    def _clocks(self, chosen: Candidate, seconds: float, *, splits: bool) -> ClockChoice | None:
        """Clocks for the chosen plan, which takes ``seconds`` at the present ones."""
        if self.rules.clocks is None:
            return None
        table, cap_w = self.rules.clocks, self.rules.power_cap_w
        widths, work_s = self._widths(chosen.moves), self._work_seconds(chosen)
        best = minimax_clocks(work_s=work_s, widths=widths, table=table, power_cap_w=cap_w)
        if self.is_exact and self.after.vpp == 1 and not splits:
            # Greedy orders cost too much to simulate for every clock: windows stand for them.
            extra = EXTRA_WINDOWS[0] if chosen.extra is None else chosen.extra
            stand_in = replace(chosen, extra=extra)
            best = predicted_clocks(
                work_s=work_s,
                widths=widths,
                table=table,
                predict=lambda clocks: self._seconds(stand_in, self._speeds_at(clocks)),
                power_cap_w=cap_w,
            )
        clocked_s = self._seconds(chosen, self._speeds_at(best.clocks), splits=splits)
        present = (1.0,) * len(widths)
        watts = total_watts(present, widths, table)
        if clocked_s > seconds and 1.0 in table.clocks and watts <= cap_w:
            return ClockChoice(clocks=present, seconds=seconds, watts=watts)
        return replace(best, seconds=clocked_s)

    def _work_seconds(self, chosen: Candidate) -> list[float]:
        """Compute seconds of each stage's busiest worker, all its chunks together."""
        loads = self._loads(chosen.moves, self._widths(chosen.moves))
        parts = np.diff(self.costs.sample_seconds()[list(chosen.cuts)])
        return [
            load.samples * float(parts[stage :: len(loads)].sum()) / load.speed
            for stage, load in enumerate(loads)
        ]

    def _speeds_at(self, clocks: Sequence[float]) -> list[float]:
        assert self.rules.clocks is not None
        table = self.rules.clocks
        return [s * table.speed(clock) for s, clock in zip(self.speeds, clocks, strict=True)]

    def _seconds(self, one: Candidate, speeds: Sequence[float], *, splits: bool = False) -> float:
        """Simulate a candidate at other speeds, or with split backwards."""
        seats = self._seats(one.moves)
        if splits:
            return self.predictor.split_backward(
                one.choice, seats, one.cuts, extra=one.extra, speeds=speeds
            )[0]
        slowness = self._slowness(one.moves)
        return self.predictor.predict(
            one.choice, seats, one.cuts, extra=one.extra, speeds=speeds, slowness=slowness
        ).seconds

    def _healthy_s(self) -> float:
        """The step of the launch layout, with 1F1B windows and every worker at full speed."""
        choice = DataflowChoice(REDEAL, self.after.dp)
        seats: Seats = (range(self.after.dp),) * len(self.after.stages)
        return self.predictor.predict(choice, seats, self.before.cuts, extra=0).seconds

    def _reasons(self, plan: JointPlan) -> tuple[str, ...]:
        now, chosen = self.before.cuts, plan.chosen
        lines = [
            reasons.loss_reason(self.after),
            reasons.slow_reason(self.slow),
            reasons.dataflow_reason(plan.candidates, now=now),
            reasons.windows_reason(chosen),
        ]
        if self.rules.move_layers or self.rules.move_workers:
            stays, horizon_s = self._stays(chosen), self.rules.horizon_s
            lines[3:3] = [
                reasons.layers_reason(plan.candidates, self.after, now=now),
                reasons.workers_reason(plan.candidates),
                reasons.payback_reason(chosen, stays=stays, horizon_s=horizon_s),
            ]
        if plan.split_backward:
            lines.append("backward: split, weight gradients where a worker would wait")
        elif self.rules.split_backward and not self.slow:
            lines.append(
                "backward: stays whole, "
                + (
                    "weight gradients in bubbles gain nothing"
                    if self.knows_split
                    else "too many workers to place weight gradients"
                )
            )
        if plan.clocks is not None:
            lines.append(reasons.clocks_reason(plan.clocks))
        lines.append(
            reasons.result_reason(self.after, seconds=plan.seconds, healthy_s=plan.healthy_s)
        )
        if not self.is_exact:
            lines.append("estimated: stages flow as fluids, too many workers to simulate each")
        return tuple(line for line in lines if line is not None)


def slowness_of(layout: ParallelLayout, slow: SlowSlots) -> Slowness:
    """Of each replica, by stage, that of its slowest worker: it waits for all of its tp group."""
    return tuple(
        tuple(max(slow.get(slot, 1.0) for slot in group.slots) for group in groups)
        for groups in layout.stages
    )


def _order(one: Candidate) -> tuple[float, float, int]:
    return one.seconds, one.moved_bytes, len(one.moves)


def _rating(one: Candidate) -> tuple[float, float, float, int]:
    return -one.benefit_s, *_order(one)


def _key(one: Candidate) -> tuple[object, ...]:
    return one.choice, one.moves, one.cuts, one.extra
