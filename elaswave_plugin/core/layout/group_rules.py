"""The members of a process group, as a rule over layout coordinates instead of a list of ranks.

A group that a framework makes at launch holds, along each axis (stage, replica, tp), either the
worker's own place or every place. The rule is read off the members at launch, and gives the
members under any later layout, ragged ones included.

>>> from elaswave_plugin.core.layout.layout import launch_layout
>>> layout = launch_layout(tp=2, pp=2, dp=2, num_layers=4)
>>> data_parallel = rule_of((0, 2), layout)
>>> print(data_parallel)
own stage, all replicas, own tp
>>> after = layout.without([0])
>>> members_of(data_parallel, after, 2), members_of(data_parallel, after, 1)
((2,), (1,))
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from elaswave_plugin.core.layout.layout import Coordinate, ParallelLayout
from elaswave_plugin.core.layout.reserve import grown_coordinate
from elaswave_plugin.errors import ConfigurationError


class GroupRule(NamedTuple):
    """The part that a group takes of each axis; ``stages`` empty: the worker's own."""

    stages: tuple[int, ...]
    all_replicas: bool
    all_tp: bool

    def __str__(self) -> str:
        stages = "stages " + " ".join(map(str, self.stages)) if self.stages else "own stage"
        replicas = "all replicas" if self.all_replicas else "own replica"
        return f"{stages}, {replicas}, {'all tp' if self.all_tp else 'own tp'}"


def coordinates_of(layout: ParallelLayout) -> Mapping[int, Coordinate]:
    """Return the place of every worker that has one; free workers have none."""
    return {
        slot: Coordinate(stage, order, tp)
        for stage, groups in enumerate(layout.stages)
        for order, group in enumerate(groups)
        for tp, slot in enumerate(group.slots)
    }


def grown_coordinates(layout: ParallelLayout) -> Mapping[int, Coordinate]:
    """Return the place of every slot of the reserve, whether or not a worker is there."""
    tp, pp = layout.tp, len(layout.stages)
    width = tp * pp * layout.dp
    return {
        slot: grown_coordinate(slot, width=width, tp=tp, pp=pp)
        for slot in range(width, width + tp * pp * layout.reserve)
    }


def rule_of(members: Sequence[int], layout: ParallelLayout) -> GroupRule:
    """Find the rule of a group of these slots under the launch layout.

    Raises ConfigurationError if no rule describes the members.
    """
    coordinates = coordinates_of(layout)
    stages, orders, tps = (
        {getattr(coordinates[slot], axis) for slot in members} for axis in ("stage", "order", "tp")
    )
    rule = GroupRule(
        stages=tuple(sorted(stages)) if len(stages) > 1 else (),
        all_replicas=len(orders) > 1,
        all_tp=len(tps) > 1,
    )
    if sorted(members_of(rule, layout, members[0])) != sorted(members):
        raise ConfigurationError(
            f"a process group of slots {sorted(members)} follows no axis of {layout.summary()};"
            " make groups along tp, pp and dp only, in Megatron-Core's default order"
        )
    return rule


def members_of(rule: GroupRule, layout: ParallelLayout, slot: int) -> tuple[int, ...]:
    """Return the members of ``slot``'s group, by stage, replica and tp; of a free worker: itself.

    If stages are unequally wide, a replica's place at another stage is its own order modulo that
    stage's width. Such a group only tells positions, and two members may see different ones.
    """
    me = coordinates_of(layout).get(slot)
    if me is None:
        return (slot,)
    found: list[int] = []
    for stage in rule.stages or (me.stage,):
        groups = layout.stages[stage]
        own = me.order if stage == me.stage else me.order % max(1, len(groups))
        for group in groups if rule.all_replicas else groups[own : own + 1]:
            found += group.slots if rule.all_tp else group.slots[me.tp : me.tp + 1]
    return tuple(found)


class GroupEdit(NamedTuple):
    """The new members of a group; ``identity``: its name, equal on all of them; None: as before."""

    members: tuple[int, ...]
    identity: str | None = None
