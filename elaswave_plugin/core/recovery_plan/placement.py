"""The workers that share each state, and the members of each group, as the membership changes.

A *shard group* is the workers that hold the same weights and share their optimizer state: one
data-parallel group. A data-parallel job is one shard group; a TP x PP x DP job has one for each
stage and tp position.

>>> from elaswave_plugin.core.layout.layout import launch_layout
>>> grid = GridPlacement.at_launch(
...     launch_layout(tp=2, pp=1, dp=2, num_layers=2), groups={}, units={1: 10, 2: 10}
... )
>>> [str(one) for one in grid.after((0, 1, 2)).shard_groups]
['stage 0 tp 0: w0', 'stage 0 tp 1: w1']
"""

from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from elaswave_plugin.core.layout.group_rules import (
    GroupEdit,
    GroupRule,
    coordinates_of,
    grown_coordinates,
    members_of,
    rule_of,
)
from elaswave_plugin.core.layout.layout import Coordinate, FreeWorker, ParallelLayout
from elaswave_plugin.core.layout.layout_delta import layout_delta, layout_with
from elaswave_plugin.core.planner.layer_times import LayerTimes
from elaswave_plugin.core.planner.pipeline_flow import PipelineFlow
from elaswave_plugin.core.step.dataflow import Slowness
from elaswave_plugin.errors import LayoutError


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardGroup:
    """One data-parallel group: ``ranks`` are slots in the order of their shards.

    ``units``: the parts of the model that it holds, each in a bucket of its own; ``buckets``: their
    unpadded lengths in elements, alike for all of them.
    """

    stage: int = 0
    tp: int = 0
    ranks: tuple[int, ...]
    units: tuple[int, ...]
    buckets: tuple[int, ...]

    @property
    def key(self) -> tuple[int, int]:
        """(stage, tp)."""
        return self.stage, self.tp

    def __str__(self) -> str:
        return f"stage {self.stage} tp {self.tp}: {' '.join(f'w{slot}' for slot in self.ranks)}"


# layout, times, slow, and activation_room where it is less than the job's: the work of the same
# workers, with the layers of each stage chosen for their number, `LayerTimes` and `Slowness`.
Partition = Callable[..., PipelineFlow]


class Placement(Protocol):
    """The part of a job's layout that recoveries ask for."""

    @property
    def shard_groups(self) -> tuple[ShardGroup, ...]:
        """All shard groups of the present membership."""

    @property
    def largest(self) -> tuple[int, ...]:
        """Lengths of the buckets of the largest state that any worker may come to hold."""

    @property
    def dealt_over(self) -> dict[str, Any]:
        """The keyword arguments with which a step's work is dealt out."""

    def shard_group_of(self, slot: int) -> ShardGroup | None:
        """The shard group of a worker; None for one that has no place."""

    def world(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """The slots of a view in the order of WORLD, whose first and last one have a place."""

    def after(self, ranks: Sequence[int], times: LayerTimes, slow: Slowness) -> "Placement":
        """The placement when only ``ranks`` (slots, in rank order) are left, for these ``times``.

        ``slow``: how many times as long workers take, by slot; others than ``ranks`` do not count.
        """

    def state(self) -> dict[str, Any]:
        """Return what to tell a worker that was not there, as a dict that JSON can carry."""

    def with_state(self, state: Mapping[str, Any]) -> "Placement":
        """Return the placement that `state` described."""

    def within(self, most: Mapping[int, float]) -> "Placement":
        """The same, where single workers, by slot, may have at ``most`` so much.

        As `OutOfMemory` says; LayoutError where no deal of the work makes one need less memory.
        """

    def described(self) -> dict[str, Any] | None:
        """The layout, and why layers and workers stay, as JSON; None where there are no stages."""

    def recut(self, cuts: Sequence[int]) -> "Placement":
        """The same places with other layers; LayoutError where there are no stages."""

    def edits(self, launched: Mapping[str, Sequence[int]], slot: int) -> dict[str, GroupEdit]:
        """Return the changes of the groups that ``slot`` holds.

        ``launched``: the members that they were made with, by name.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatPlacement:
    """A data-parallel job: all ``ranks`` in one shard group; ``launch_slots``: those of the launch.

    ``whole``: a worker runs replicas as wholes; see `deal`. ``most``: as `within` says.
    """

    launch_slots: tuple[int, ...]
    ranks: tuple[int, ...]
    buckets: tuple[int, ...] = ()
    slow: Slowness = field(default_factory=dict)
    whole: bool = False
    most: Mapping[int, float] = field(default_factory=dict)

    @property
    def shard_groups(self) -> tuple[ShardGroup, ...]:
        """The one shard group."""
        units = tuple(range(len(self.buckets)))
        return (ShardGroup(ranks=self.ranks, units=units, buckets=self.buckets),)

    @property
    def largest(self) -> tuple[int, ...]:
        """All of it."""
        return self.buckets

    @property
    def dealt_over(self) -> dict[str, Any]:
        """Slots at launch, live ones, and the slow ones of these."""
        over = {"launch_slots": self.launch_slots, "live": self.ranks, "slow": self.slow}
        over |= {"most": self.most} if self.most else {}
        return over | {"whole": True} if self.whole else over

    def shard_group_of(self, slot: int) -> ShardGroup | None:
        """The one shard group, for its members."""
        return self.shard_groups[0] if slot in self.ranks else None

    def world(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Order the workers as the view does: each has a place."""
        return tuple(ranks)

    def after(
        self, ranks: Sequence[int], times: LayerTimes | None = None, slow: Slowness | None = None
    ) -> "FlatPlacement":
        """The same with other members, whatever layers take."""
        return replace(self, ranks=tuple(ranks), slow=_of(ranks, slow))

    def state(self) -> dict[str, Any]:
        """Return the slow workers, and whether replicas stay whole; members say the rest."""
        return _slow_state(self.slow) | ({"whole": True} if self.whole else {})

    def with_state(self, state: Mapping[str, Any]) -> "FlatPlacement":
        """The same, with what was told."""
        return replace(self, slow=_slow_of(state), whole=state.get("whole", False))

    def within(self, most: Mapping[int, float]) -> "FlatPlacement":
        """The same, where single workers may have at ``most`` so much."""
        return replace(self, most=most)

    def described(self) -> None:
        """There are no stages."""

    def recut(self, cuts: Sequence[int]) -> "FlatPlacement":
        """Raises LayoutError."""
        raise LayoutError("a data-parallel job has no stages that layers could come to")

    def edits(self, launched: Mapping[str, Sequence[int]], slot: int) -> dict[str, GroupEdit]:
        """Return each group's edit: its members that are left or came back, in WORLD's order.

        Those of all workers of the launch are of all that there are.
        """
        width = len(self.launch_slots)

        def members(slots: Sequence[int]) -> tuple[int, ...]:
            # With workers of the reserve, if the launch had several; else none can join.
            if len(slots) == width > 1:
                return self.ranks
            return tuple(filter(set(slots).__contains__, self.ranks))

        return {name: GroupEdit(members(slots)) for name, slots in launched.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class GridPlacement:
    """A TP x PP x DP job.

    ``launch_slots``: coordinates by slot, of the launch and of the slots of the reserve;
    ``rules`` of the groups by name; ``units``: elements of
    every part of the model on one worker: layers by number from 1, what is in front of them below,
    what follows them above. ``partition``: chooses layers and workers of each stage after a change;
    None: they stay. ``why_workers_stay``: why none can change stage even where one is empty;
    ``why_layers_stay``: why not even layers can, also on request.
    ``times``: what layers took when this was planned; ``slow``: the slow workers then;
    ``room``: what each worker may hold, where one of them ran out of memory; ``planned``: the flow
    that ``partition`` chose this layout for.
    """

    layout: ParallelLayout
    launch_slots: Mapping[int, Coordinate]
    rules: Mapping[str, GroupRule]
    units: Mapping[int, int]
    partition: Partition | None = None
    why_workers_stay: str | None = None
    why_layers_stay: str | None = None
    times: LayerTimes = field(default_factory=LayerTimes)
    slow: Slowness = field(default_factory=dict)
    room: float | None = None
    planned: PipelineFlow | None = field(default=None, repr=False, compare=False)

    @classmethod
    def at_launch(
        cls,
        layout: ParallelLayout,
        *,
        groups: Mapping[str, Sequence[int]],
        units: Mapping[int, int],
        **more: Any,
    ) -> "GridPlacement":
        """The placement of the launch layout; ``groups``: members by name, ``more``: other fields.

        Raises ConfigurationError for a group that follows no axis of the layout.
        """
        rules = {name: rule_of(slots, layout) for name, slots in groups.items()}
        launch_slots = {**coordinates_of(layout), **grown_coordinates(layout)}
        return cls(layout=layout, launch_slots=launch_slots, rules=rules, units=units, **more)

    def units_of(self, stage: int) -> tuple[int, ...]:
        """The parts of the model that a stage holds, in the order of its buckets.

        Chunk by chunk, and in a chunk from the last to the first, as gradients become ready.
        """
        virtual = range(stage, len(self.layout.cuts) - 1, len(self.layout.stages))
        num_layers = self.layout.num_layers
        found: list[int] = []
        for part, (start, stop) in zip(virtual, self.layout.layers(stage), strict=True):
            low = min(self.units) if part == 0 else start + 1
            high = max(self.units) if stop == num_layers else stop
            found += [unit for unit in range(high, low - 1, -1) if unit in self.units]
        return tuple(found)

    @property
    def shard_groups(self) -> tuple[ShardGroup, ...]:
        """One for every stage and tp position."""
        shard_groups = []
        for stage, groups in enumerate(self.layout.stages):
            units = self.units_of(stage)
            buckets = tuple(self.units[unit] for unit in units)
            for tp in range(self.layout.tp):
                ranks = tuple(group.slots[tp] for group in groups)
                shard_groups.append(
                    ShardGroup(stage=stage, tp=tp, ranks=ranks, units=units, buckets=buckets)
                )
        return tuple(shard_groups)

    @property
    def largest(self) -> tuple[int, ...]:
        """The whole model: any layer may come to any stage."""
        return tuple(self.units.values())

    @property
    def dealt_over(self) -> dict[str, Any]:
        """The layout, the times of its layers, the slow workers, and the flow if it is planned."""
        over = {"layout": self.layout, "times": self.times, "slow": self.slow, **self._limit}
        return over if self.planned is None else over | {"planned": self.planned}

    @property
    def _limit(self) -> dict[str, float]:
        return {} if self.room is None else {"activation_room": self.room}

    def coordinate(self, slot: int) -> Coordinate | None:
        """The place of a worker; None for a free one."""
        return coordinates_of(self.layout).get(slot)

    def shard_group_of(self, slot: int) -> ShardGroup | None:
        """The shard group of a worker; None for a free one."""
        return next(
            (shard_group for shard_group in self.shard_groups if slot in shard_group.ranks), None
        )

    def world(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """The order of the view, but that free workers are at neither end."""
        return with_placed_ends(ranks, coordinates_of(self.layout))

    def state(self) -> dict[str, Any]:
        """Return the layout's differences from the launch, and the slow workers."""
        return layout_delta(self.layout, self.launch_slots) | _slow_state(self.slow)

    def with_state(self, state: Mapping[str, Any]) -> "GridPlacement":
        """The placement with the layout and the slow ones that were told."""
        layout = layout_with(state, self.layout, self.launch_slots)
        return replace(self, layout=layout, slow=_slow_of(state), planned=None)

    def after(
        self, ranks: Sequence[int], times: LayerTimes | None = None, slow: Slowness | None = None
    ) -> "GridPlacement":
        """Broken TP groups are dissolved; survivors of one stage form whole ones again.

        A worker that comes back goes to the stage of its launch, whose modules it has built, and a
        worker of the reserve to that of its slot. A stage that has no replica left takes one of
        another one.
        Raises LayoutError where there are fewer whole TP groups than stages.
        """
        times, slow = times or self.times, _of(ranks, slow)
        layout = self.layout
        if set(ranks) != set(layout.workers):
            layout = self._with_members(ranks)
        elif slow == self.slow:
            # A view that renews links, or that somebody's wish asked for: nothing else moves.
            return replace(self, times=times, planned=None)
        flow = None
        if self.partition:
            flow = self.partition(layout=layout, times=times, slow=slow, **self._limit)
            layout = flow.layout
        return replace(self, layout=layout, times=times, slow=slow, planned=flow)

    def _with_members(self, ranks: Sequence[int]) -> ParallelLayout:
        present = set(self.layout.workers)
        back = [
            FreeWorker(slot, self.launch_slots[slot].stage, self.launch_slots[slot].tp)
            for slot in set(ranks) - present
        ]
        layout = self.layout.without(present - set(ranks)).returned(back).reformed_in_place()
        scattered = not all(layout.widths) or any(
            self.launch_slots[slot].stage != coordinate.stage
            for slot, coordinate in coordinates_of(layout).items()
        )
        if self.why_workers_stay is None and (self.partition or scattered):
            layout = layout.reformed()
        if not all(layout.widths):
            self._check_staff(layout)
            layout = layout.staffed()
        return layout

    def within(self, most: Mapping[int, float]) -> "GridPlacement":
        """The same, where each worker may hold what the one that may hold least does."""
        return replace(self, room=min(most.values(), default=None), planned=None)

    def described(self) -> dict[str, Any]:
        """The places of all workers."""
        return {
            **self.layout.to_json(),
            "why_layers_stay": self.why_layers_stay,
            "why_workers_stay": self.why_workers_stay,
        }

    def recut(self, cuts: Sequence[int]) -> "GridPlacement":
        """Return the same places, with the layers as requested."""
        return replace(self, layout=self.layout.recut(cuts), planned=None)

    def _check_staff(self, layout: ParallelLayout) -> None:
        empty, num_stages = layout.widths.index(0), len(layout.stages)
        if self.why_workers_stay is not None:
            raise LayoutError(
                f"stage {empty} has {layout.groups_text(0)} left, and no other worker can take its"
                f" place: {self.why_workers_stay}; restart from the last checkpoint"
            )
        if sum(layout.widths) < num_stages:
            raise LayoutError(
                f"{layout.groups_text(sum(layout.widths))} left for {num_stages} stages, wanted one"
                " for each; restart from the last checkpoint, with fewer stages or more workers"
            )

    def edits(self, launched: Mapping[str, Sequence[int]], slot: int) -> dict[str, GroupEdit]:
        """Every group by its rule."""
        return edits_by_rule(self.rules, launched, layout=self.layout, slot=slot)


def with_placed_ends(ranks: Sequence[int], placed: Container[int]) -> tuple[int, ...]:
    """The slots with one that is ``placed`` at each end, as far as there are any.

    >>> with_placed_ends((4, 1, 2, 3, 5), {2, 3})
    (2, 1, 4, 5, 3)
    """
    order = list(ranks)
    for end, step in ((0, 1), (-1, -1)):
        found = next((n for n in range(len(order))[::step] if order[n] in placed), None)
        if found is not None:
            order[end], order[found] = order[found], order[end]
    return tuple(order)


def edits_by_rule(
    rules: Mapping[str, GroupRule], launched: Iterable[str], *, layout: ParallelLayout, slot: int
) -> dict[str, GroupEdit]:
    """Return the changes of the groups of ``slot``; identities follow from rule and members."""
    edits, alike = {}, Counter[GroupRule]()
    for name in launched:
        rule = rules[name]
        members = members_of(rule, layout, slot)
        # Frameworks make several groups of the same workers, on all of them in one order.
        alike[rule] += 1
        edits[name] = GroupEdit(members, f"{rule}, number {alike[rule]}: {members}")
    return edits


def _of(ranks: Sequence[int], slow: Slowness | None) -> Slowness:
    return {slot: slow[slot] for slot in sorted(ranks) if slot in slow} if slow else {}


def _slow_state(slow: Slowness) -> dict[str, Any]:
    return {"slow": [list(one) for one in sorted(slow.items())]} if slow else {}


def _slow_of(state: Mapping[str, Any]) -> Slowness:
    return dict(state.get("slow", ()))
