"""The members of each pipeline if stages stay equally wide: whole replicas only.

A pipeline that has lost a worker cannot compute. Its survivors are free, and a free worker of each
stage together are a whole pipeline again: every worker stays in the stage of its launch.

>>> placement = ReplicaPlacement.at_launch(((0, 2), (1, 3)), groups={}, buckets=((10,), (20,)))
>>> after = placement.after((0, 1, 3))
>>> after.replicas, after.free, [str(one) for one in after.shard_groups]
(((1, 3),), (0,), ['stage 0 tp 0: w1', 'stage 1 tp 0: w3'])
>>> print(deal_replicas(num_microbatches=4, **after.dealt_over))
w1: 1 3 0 2 | w3: 1 3 0 2
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

from elaswave_plugin.core.layout.group_rules import GroupEdit, GroupRule, rule_of
from elaswave_plugin.core.layout.layout import FreeWorker, ParallelLayout, TpGroup
from elaswave_plugin.core.planner.layer_times import LayerTimes
from elaswave_plugin.core.recovery_plan.placement import ShardGroup, edits_by_rule, with_placed_ends
from elaswave_plugin.core.step.dataflow import Dataflow, Slowness, deal
from elaswave_plugin.errors import LayoutError

# The slot at each stage of one pipeline.
Replica = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPlacement:
    """A PP x DP job that has one pipeline or more at any time.

    ``launch_replicas``: the pipelines of the launch; ``ranks``: slots of all live workers, in rank
    order; ``buckets``: unpadded lengths by stage, in elements; ``rules`` of the groups by name;
    ``reserve``: pipelines that may join beyond the launch.
    """

    launch_replicas: tuple[Replica, ...]
    ranks: tuple[int, ...]
    buckets: tuple[tuple[int, ...], ...]
    rules: Mapping[str, GroupRule]
    reserve: int = 0

    @classmethod
    def at_launch(
        cls,
        launch_replicas: Sequence[Replica],
        *,
        groups: Mapping[str, Sequence[int]],
        buckets: Sequence[Sequence[int]],
        reserve: int = 0,
    ) -> "ReplicaPlacement":
        """Return the placement of the launch; ``groups``: members by name, all of the launch.

        Raises ConfigurationError for a group that follows no axis.
        """
        layout = _layout_of(tuple(launch_replicas), width=len(launch_replicas))
        return cls(
            launch_replicas=tuple(launch_replicas),
            ranks=tuple(slot for stage in zip(*launch_replicas, strict=True) for slot in stage),
            buckets=tuple(map(tuple, buckets)),
            rules={name: rule_of(slots, layout) for name, slots in groups.items()},
            reserve=reserve,
        )

    @property
    def places(self) -> tuple[Replica, ...]:
        """The pipelines of the launch, then those that the slots of the reserve would form."""
        num_stages = len(self.launch_replicas[0])
        first, count = num_stages * len(self.launch_replicas), num_stages * self.reserve
        beyond = range(first, first + count)
        return (*self.launch_replicas, *zip(*[iter(beyond)] * num_stages, strict=True))

    @property
    def stages(self) -> tuple[Replica, ...]:
        """The slots of each stage, in which they stay."""
        return tuple(zip(*self.places, strict=True))

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """The present pipelines, by the slot of their first stage.

        Workers that came together stay so; survivors of broken pipelines are matched in slot order.
        """
        live = set(self.ranks)
        whole = [replica for replica in self.places if live.issuperset(replica)]
        together = {slot for replica in whole for slot in replica}
        survivors = (
            sorted(slot for slot in stage if slot in live - together) for stage in self.stages
        )
        return tuple(sorted([*whole, *zip(*survivors, strict=False)]))

    @property
    def free(self) -> tuple[int, ...]:
        """Live workers that are in no pipeline."""
        busy = {slot for replica in self.replicas for slot in replica}
        return tuple(sorted(set(self.ranks) - busy))

    @property
    def shard_groups(self) -> tuple[ShardGroup, ...]:
        """One for every stage."""
        firsts = accumulate(map(len, self.buckets), initial=0)
        stages = zip(*self.replicas, strict=True)
        return tuple(
            ShardGroup(stage=stage, ranks=ranks, units=tuple(range(first, last)), buckets=lengths)
            for stage, (ranks, (first, last), lengths) in enumerate(
                zip(stages, pairwise(firsts), self.buckets, strict=True)
            )
        )

    @property
    def largest(self) -> tuple[int, ...]:
        """Return the buckets of the largest stage, since no worker changes stage."""
        return max(self.buckets, key=sum)

    @property
    def dealt_over(self) -> dict[str, Any]:
        """The pipelines of the launch and the present ones."""
        return {"launch_replicas": self.launch_replicas, "replicas": self.replicas}

    def place_of(self, slot: int) -> tuple[int, int] | None:
        """(stage, order of the pipeline) of a worker; None for a free one."""
        for order, replica in enumerate(self.replicas):
            if slot in replica:
                return replica.index(slot), order
        return None

    def shard_group_of(self, slot: int) -> ShardGroup | None:
        """The shard group of a worker; None for a free one."""
        return next(
            (shard_group for shard_group in self.shard_groups if slot in shard_group.ranks), None
        )

    def world(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return the order of the view, except that no free worker is at either end."""
        return with_placed_ends(ranks, {slot for replica in self.replicas for slot in replica})

    def after(
        self, ranks: Sequence[int], times: LayerTimes | None = None, slow: Slowness | None = None
    ) -> "ReplicaPlacement":
        """Return the same with other members; LayoutError if no pipeline is whole any more."""
        placement = replace(self, ranks=tuple(ranks))
        if not placement.replicas:
            empty = next(n for n, stage in enumerate(self.stages) if set(stage).isdisjoint(ranks))
            raise LayoutError(
                f"stage {empty} has no worker left, and in DeepSpeed's pipelines no worker can"
                " change stage; restart from the last checkpoint"
            )
        return placement

    def state(self) -> dict[str, Any]:
        """Return an empty dict: the members determine everything."""
        return {}

    def with_state(self, state: Mapping[str, Any]) -> "ReplicaPlacement":
        """Return the same."""
        return self

    def within(self, most: Mapping[int, float]) -> "ReplicaPlacement":
        """Return the same; LayoutError for any limit."""
        if most:
            raise LayoutError("a pipeline with fewer of DeepSpeed's micro-batches holds as many")
        return self

    def described(self) -> dict[str, Any]:
        """Return the places of all workers; a stage counts as one layer."""
        stage_of = {slot: stage for stage, slots in enumerate(self.stages) for slot in slots}
        layout = replace(
            _layout_of(self.replicas, width=len(self.launch_replicas)),
            free=tuple(FreeWorker(slot, stage_of[slot]) for slot in self.free),
            reserve=self.reserve,
        )
        why = "in DeepSpeed's pipelines everything stays in the stage of its launch"
        return {**layout.to_json(), "why_layers_stay": why, "why_workers_stay": why}

    def recut(self, cuts: Sequence[int]) -> "ReplicaPlacement":
        """Raise LayoutError."""
        raise LayoutError("layers of DeepSpeed's pipelines cannot change their stage")

    def edits(self, launched: Mapping[str, Sequence[int]], slot: int) -> dict[str, GroupEdit]:
        """Return every group by its rule; a free worker is in none except its own."""
        layout = _layout_of(self.replicas, width=len(self.launch_replicas))
        return edits_by_rule(self.rules, launched, layout=layout, slot=slot)


def _layout_of(replicas: Sequence[Replica], *, width: int) -> ParallelLayout:
    """The places of the pipelines, for the rules of groups: a stage counts as one layer."""
    stages = tuple(zip(*replicas, strict=True))
    return ParallelLayout(
        tp=1,
        dp=width,
        cuts=tuple(range(len(stages) + 1)),
        stages=tuple(
            tuple(TpGroup(order, (slot,)) for order, slot in enumerate(stage)) for stage in stages
        ),
    )


def deal_replicas(
    *, num_microbatches: int, launch_replicas: Sequence[Replica], replicas: Sequence[Replica]
) -> Dataflow:
    """Deal the micro-batches of a step over pipelines; all stages of one run the same ones.

    A pipeline counts as the launch pipeline that had its first stage.
    """
    flow = deal(
        num_microbatches=num_microbatches,
        launch_slots=[replica[0] for replica in launch_replicas],
        live=[replica[0] for replica in replicas],
    )
    placement = sorted((slot, flow.microbatches(one[0])) for one in replicas for slot in one)
    return replace(flow, placement=tuple(placement))
