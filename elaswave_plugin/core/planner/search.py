"""The candidates of one change, each simulated: widths, layers, dataflows and orders of operations.

First one dataflow with every pair of widths and cuts. The widths are those on the way from the
live ones to level ones. The cuts are the present ones and minimax ones, which count not only what a
stage has to do, but also how long the first micro-batch takes to reach it and the last one to go
back: early stages can do with more layers than late ones. Then, for the best of these, the other
dataflows and windows; and the greedy order for those that could be the fastest, which windows do
not show.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from elaswave_plugin.core.layout.layout import ParallelLayout
from elaswave_plugin.core.planner.costs import CostModel
from elaswave_plugin.core.planner.dvfs import ClockTable
from elaswave_plugin.core.planner.layer_partition import (
    StageLoad,
    evaluate,
    follow_seconds,
    moved_bytes,
    partitions,
    pause_seconds,
)
from elaswave_plugin.core.planner.microbatch_split import (
    POLICIES,
    REDEAL,
    REROUTE,
    RESIZE,
    StageSlowness,
)
from elaswave_plugin.core.planner.prediction import DataflowChoice, Predictor, Replicas, StepWork
from elaswave_plugin.core.step.dataflow import Slowness, fair_width, slowest_seconds
from elaswave_plugin.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRules:
    """The choices that the planner may make.

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


MOST_CANDIDATES = 4


class WidthMove(NamedTuple):
    """One replica leaves stage ``source`` and works for stage ``target``."""

    source: int
    target: int


def width_moves(widths: Sequence[int]) -> tuple[WidthMove, ...]:
    """One worker at a time from the widest to the narrowest stage until they differ by at most 1.

    Ties go to the lowest target and the highest source, so moves stay far from each other.
    """
    now = list(widths)
    moves = []
    while max(now) - min(now) > 1:
        source = len(now) - 1 - now[::-1].index(max(now))
        target = now.index(min(now))
        now[source] -= 1
        now[target] += 1
        moves.append(WidthMove(source, target))
    return tuple(moves)


def width_candidates(
    widths: Sequence[int], *, most: int = MOST_CANDIDATES
) -> tuple[tuple[tuple[WidthMove, ...], tuple[int, ...]], ...]:
    """(moves, widths after them) for at most ``most`` prefixes, none and all included.

    Where losses are concentrated in one stage no move of layers helps enough; a worker that changes
    stage does: from the widest to the narrowest, until all are level.

    >>> for moves, widths in width_candidates((3, 12, 12, 12)):
    ...     print(len(moves), *widths)
    0 3 12 12 12
    2 5 12 11 11
    4 7 11 11 10
    6 9 10 10 10
    """
    moves = width_moves(widths)
    steps = min(most - 1, len(moves))
    counts = [round(index * len(moves) / steps) for index in range(1, steps + 1)]
    found = []
    for count in (0, *counts):
        now = list(widths)
        for source, target in moves[:count]:
            now[source] -= 1
            now[target] += 1
        found.append((moves[:count], tuple(now)))
    return tuple(found)


# How much of filling and draining the pipeline the cuts count: windows hide a part of it.
FILLS = (0.5, 1.0, 0.0, 0.25, 0.75)
# Of several cuts, the ones that move less are kept as well: they cost less pause.
PLAN_SLACKS = (0.0, 0.005, 0.02)
EXTRA_WINDOWS = (1, 0, 2)
GREEDY = None
# So many plans are tried in all orders and dataflows, more where they are cheap to simulate.
LEAST_REFINED, MOST_REFINED = 3, 8
LEAST_GREEDY, MOST_GREEDY = 5, 8
CHEAP_PASSES = 6_000
MOST_SMALL_PASSES = 4_000
CHEAP_TO_TRY_ALL = 1_000

Moves = tuple[WidthMove, ...]
Cuts = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One simulated plan; ``benefit_s`` over the horizon, against the best plan without moves.

    ``extra``: slots in flight beyond 1F1B's, None for the greedy order. ``pause_s``: until weights
    have moved; ``follow_s``: until optimizer state has, behind the compute.
    """

    choice: DataflowChoice
    moves: tuple[WidthMove, ...]
    cuts: tuple[int, ...]
    extra: int | None
    windows: tuple[int, ...]
    seconds: float
    moved_bytes: float
    pause_s: float
    follow_s: float
    benefit_s: float = 0.0

    @property
    def is_greedy(self) -> bool:
        """True if operations go in greedy order; ``windows`` decide where there is a choice."""
        return self.extra is None

    @property
    def order(self) -> str:
        """The order of operations as text."""
        return "greedy" if self.is_greedy else f"window +{self.extra}"

    def __str__(self) -> str:
        cuts = " ".join(map(str, self.cuts))
        return (
            f"{self.seconds:10.4g} s  {self.choice!s:12} {self.order:9}"
            f"  {len(self.moves)} width moves  cuts {cuts}"
            f"  {self.moved_bytes / 2**20:.4g} MiB  pause {self.pause_s:.3g} s"
        )


class Search:
    """The candidates of one change, and what is needed to simulate more of them."""

    def __init__(
        self,
        before: ParallelLayout,
        after: ParallelLayout,
        costs: CostModel,
        work: StepWork,
        rules: PlanRules,
        speeds: Sequence[float] | None,
        slow: Slowness,
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
        self._passes = work.num_microbatches * num_stages
        self._is_small = self._passes <= MOST_SMALL_PASSES
        self._new_groups = tuple(
            0 if new is old else len(set(new) - set(old))
            for new, old in zip(after.stages, before.stages, strict=True)
        )
        self._rejected: list[str] = []

    def candidates(self) -> list[Candidate]:
        """Simulate them in rounds. Raises ConfigurationError where none is possible."""
        found = self._first_round()
        if not found:
            raise ConfigurationError(self._rejected[0])
        most = max(LEAST_REFINED, min(MOST_REFINED, CHEAP_PASSES // self._passes))
        for one in sorted(found, key=order_of)[:most] + found[:1]:
            found += self._refined(one, {key_of(other) for other in found})
        return found + self._greedy(sorted(found, key=order_of))

    def stays(self, one: Candidate) -> bool:
        """Return whether neither workers nor layers move."""
        return not one.moves and one.cuts == self.before.cuts

    def seconds(self, one: Candidate, speeds: Sequence[float], *, splits: bool = False) -> float:
        """Simulate a candidate at other speeds, or with split backwards."""
        replicas = self._replicas_after(one.moves)
        if splits:
            return self.predictor.split_backward(
                one.choice, replicas, one.cuts, extra=one.extra, speeds=speeds
            )[0]
        slowness = self.slowness(one.moves)
        return self.predictor.predict(
            one.choice, replicas, one.cuts, extra=one.extra, speeds=speeds, slowness=slowness
        ).seconds

    def level(self, ordered: Sequence[Candidate]) -> list[Candidate]:
        """The widths and cuts of the most even load, by the first candidate of each dataflow."""
        least = {plan: self._least_seconds(plan, 0.0) for plan in map(plan_of, ordered)}
        moves, cuts = min(least, key=lambda one: least[one])
        firsts: dict[DataflowChoice, Candidate] = {}
        for one in ordered:
            if (one.moves, one.cuts) == (moves, cuts) and one.choice in self._few(moves):
                firsts.setdefault(one.choice, one)
        return list(firsts.values())

    # ---- what the moves of workers make of the layout -----------------------------------------

    def widths(self, moves: Sequence[WidthMove]) -> tuple[int, ...]:
        """Replicas of each stage after ``moves``."""
        widths = list(self.after.widths)
        for source, target in moves:
            widths[source] -= 1
            widths[target] += 1
        return tuple(widths)

    def moved(self, moves: Sequence[WidthMove]) -> ParallelLayout:
        """The layout after ``moves``, with the cuts of the launch."""
        layout = self.after
        for source, target in moves:
            layout = layout.moved(source=source, target=target)
        return layout

    def slowness(self, moves: Sequence[WidthMove]) -> StageSlowness:
        """Return the slowness of each replica, by stage; nothing where no worker is slow."""
        if not self.slow:
            return ()
        return slowness_of(self.moved(moves), self.slow)

    def loads(self, moves: Sequence[WidthMove], *, fill: float = 0.0) -> list[StageLoad]:
        """Return each stage's load; ``fill``: the part of the pipeline's filling that counts."""
        size, widths = self.work.microbatch_size, self.widths(moves)
        if REDEAL in self.rules.policies or REROUTE in self.rules.policies:
            samples = [size * busiest for busiest in self._busiest(moves)]
        else:
            samples = [size * self.work.num_microbatches / width for width in widths]
        slot_width, fair = min(widths), self._fair_widths(moves)
        loads = []
        for stage, width in enumerate(widths):
            incoming = self._new_groups[stage] + sum(move.target == stage for move in moves)
            loads.append(
                StageLoad(
                    samples=samples[stage],
                    width=width,
                    speed=self.speeds[stage],
                    in_flight=(len(widths) - stage) * size * ceil(slot_width / fair[stage]),
                    incoming=incoming,
                    fill=fill * size,
                )
            )
        return loads

    def _fair_widths(self, moves: Sequence[WidthMove]) -> Sequence[float]:
        """Return the worth of each stage, in usual workers."""
        return [fair_width(stage) for stage in self.slowness(moves)] or self.widths(moves)

    def _busiest(self, moves: Sequence[WidthMove]) -> list[float]:
        """Return when the last worker of each stage is done, in micro-batches of a usual one."""
        count, slowness = self.work.num_microbatches, self.slowness(moves)
        if self.is_exact and slowness:
            return [slowest_seconds(count, stage) for stage in slowness]
        return [float(ceil(count / width)) for width in self._fair_widths(moves)]

    def _replicas_after(self, moves: Sequence[WidthMove]) -> Replicas:
        """The replicas of each stage after ``moves``, as `ParallelLayout.moved` gives them."""
        if not self.is_exact:
            return tuple(map(range, self.widths(moves)))
        replicas = [[group.replica for group in groups] for groups in self.after.stages]
        for source, target in moves:
            replicas[source].pop()
            vacant = set(range(self.after.max_width)).difference(replicas[target])
            replicas[target] = sorted([*replicas[target], min(vacant)])
        return tuple(map(tuple, replicas))

    # ---- rounds -------------------------------------------------------------------------------

    def _first_round(self) -> list[Candidate]:
        """One dataflow with every pair of widths and cuts; what stays as it is comes first."""
        found: list[Candidate] = []
        moves_allowed = self.rules.move_workers and self.after.vpp == 1
        ways = width_candidates(self.after.widths, most=4 if self._is_small else 2)
        for moves, _ in ways if moves_allowed else ways[:1]:
            choice = self._choices(moves)[0]
            for cuts in self._cuts(moves):
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
        """In greedy order, the widths and cuts that promise most, and the fastest that stays.

        Only where that gains: the window rule goes by no prediction.
        """
        found: list[Candidate] = []
        if not self.predictor.knows_greedy(len(self.after.stages)) or self.slow:
            return found
        by_windows: dict[tuple[Moves, Cuts], float] = {}
        of_dataflow: dict[tuple[DataflowChoice, Moves, Cuts], float] = {}
        for one in ordered:
            by_windows.setdefault(plan_of(one), one.seconds)
            of_dataflow.setdefault((one.choice, *plan_of(one)), one.seconds)
        most = max(LEAST_GREEDY, min(MOST_GREEDY, CHEAP_PASSES // self._passes))
        # Neither measure alone is as good a guess: windows and waits hide a part of the filling.
        promising = sorted(
            by_windows,
            key=lambda plan: self._least_seconds(plan, 0.5) + self._least_seconds(plan, 1.0),
        )[:most]
        tried = [(choice, moves, cuts) for moves, cuts in promising for choice in self._few(moves)]
        stay = [one for one in ordered if self.stays(one)]
        routed = [one for one in stay if one.choice.policy == REROUTE]
        tried += [(one.choice, one.moves, one.cuts) for one in [*stay[:1], *routed[:1]]]
        for choice, moves, cuts in dict.fromkeys(tried):
            self._add(found, choice, moves, cuts, extra=GREEDY)
        least = 1 - self.rules.least_gain
        # Of the same dataflow: one that loses whole may be the best of all with split backwards.
        return [
            one
            for one in found
            if one.seconds
            < least * of_dataflow.get((one.choice, *plan_of(one)), by_windows[plan_of(one)])
        ]

    def _least_seconds(self, plan: tuple[Moves, Cuts], fill: float) -> float:
        """Return the seconds of the stage that is done last, if no other makes it wait."""
        moves, cuts = plan
        loads = self.loads(moves, fill=fill) * self.after.vpp
        return evaluate(self.costs, loads, cuts, now=self.before.cuts).seconds

    def _choices(self, moves: Sequence[WidthMove]) -> list[DataflowChoice]:
        """The dataflows allowed; first the one that holds least in flight."""
        choices = []
        widths = self.widths(moves)
        if REDEAL in self.rules.policies:
            # Fluids know no slots that are wider than the weakest stage.
            fluid = max(1, int(min(self._fair_widths(moves))))
            slots = [min(widths) if self.is_exact else fluid]
            if self.is_exact:
                slots += [max(widths), round(sum(widths) / len(widths))]
            choices += [DataflowChoice(REDEAL, width) for width in dict.fromkeys(slots)]
        # Cutting single samples gains next to nothing, and is the costliest to simulate.
        is_worth = self.work.microbatch_size > 1 or self._passes <= CHEAP_TO_TRY_ALL
        if RESIZE in self.rules.policies and (is_worth or not choices):
            choices.append(DataflowChoice(RESIZE, self.work.launch_width))
        if REROUTE in self.rules.policies and self.is_exact and self._have_own(moves):
            choices.append(DataflowChoice(REROUTE, self.work.launch_width))
        if not choices:
            raise ConfigurationError(
                f"{sum(widths)} replicas are too many to simulate rerouting; allow {REDEAL} as well"
            )
        return choices

    def _have_own(self, moves: Sequence[WidthMove]) -> bool:
        """Return whether all are replicas of the launch: rerouting would give others nothing."""
        own = (replica for stage in self._replicas_after(moves) for replica in stage)
        return max(own) < self.work.launch_width

    def _few(self, moves: Sequence[WidthMove]) -> list[DataflowChoice]:
        """The dataflows to try in costly ways: of those by dealing, the one of the fewest slots."""
        choices = self._choices(moves)
        if self._passes <= CHEAP_TO_TRY_ALL:
            return choices
        most = max((one.slot_width for one in choices if one.policy == REDEAL), default=0)
        return [one for one in choices if one.policy != REDEAL or one.slot_width == most]

    def _cuts(self, moves: Sequence[WidthMove]) -> tuple[Cuts, ...]:
        """The present cuts, and those by minimax."""
        now = self.before.cuts
        found = [now]
        if self.rules.move_layers and self.after.vpp == 1:
            slacks = PLAN_SLACKS if self._is_small else PLAN_SLACKS[1:]
            for fill in FILLS if self._is_small else FILLS[:1]:
                loads = self.loads(moves, fill=fill)
                try:
                    options = partitions(self.costs, loads, now=now, slacks=slacks)
                except ConfigurationError as error:
                    self._rejected.append(str(error))
                    continue
                found += [option.cuts for option in options[: len(slacks) if fill else 1]]
        return tuple(dict.fromkeys(found))

    def _add(
        self,
        found: list[Candidate],
        choice: DataflowChoice,
        moves: Moves,
        cuts: Cuts,
        *,
        extra: int | None,
    ) -> None:
        """Simulate one candidate and keep it, or the reason why it is impossible."""
        try:
            predicted = self.predictor.predict(
                choice,
                self._replicas_after(moves),
                cuts,
                extra=extra,
                speeds=self.speeds,
                slowness=self.slowness(moves),
            )
        except ConfigurationError as error:
            self._rejected.append(str(error))
            return
        # Chunk by chunk where the pipeline is interleaved: virtual stages take turns.
        loads = self.loads(moves) * self.after.vpp
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
                follow_s=follow_seconds(self.costs, loads, cuts, now=now),
            )
        )


def slowness_of(layout: ParallelLayout, slow: Slowness) -> StageSlowness:
    """Of each replica, by stage, that of its slowest worker: it waits for all of its tp group."""
    return tuple(
        tuple(max(slow.get(slot, 1.0) for slot in group.slots) for group in groups)
        for groups in layout.stages
    )


def plan_of(one: Candidate) -> tuple[Moves, Cuts]:
    """Return where all are by a candidate: moves of workers, and cuts."""
    return one.moves, one.cuts


def order_of(one: Candidate) -> tuple[float, float, int]:
    """Candidates by time, and by what they move where that is equal."""
    return one.seconds, one.moved_bytes, len(one.moves)


def key_of(one: Candidate) -> tuple[object, ...]:
    """Return what identifies a candidate, apart from its cost."""
    return one.choice, one.moves, one.cuts, one.extra
