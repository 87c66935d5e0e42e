"""The layout that our interleaved one is compared with: all layers of a stage in one buffer.

Its shards are contiguous ranges of the whole stage, as a distributed optimizer has them that knows
no layers. A layer that changes stage moves the bounds of every shard of both stages.

>>> stages = Stages(units={1: 256, 2: 256}, cuts=(0, 2))
>>> stages.starts(0), stages.total(0)
({1: 0, 2: 256}, 512)
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from elaswave_plugin.core.layout.shards import ShardCut, ShardPiece
from elaswave_plugin.core.layout.worker_facts import SealedShard
from elaswave_plugin.core.recovery_plan.placement import ShardGroup
from elaswave_plugin.core.recovery_plan.plan import RecoveryPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """``units``: elements of each layer, from 1 on; ``cuts``: layers in front of each stage."""

    units: Mapping[int, int]
    cuts: tuple[int, ...]

    def starts(self, stage: int) -> dict[int, int]:
        """Return where each layer of a stage begins in the stage's buffer."""
        found, at = {}, 0
        for unit in range(self.cuts[stage] + 1, self.cuts[stage + 1] + 1):
            found[unit] = at
            at += self.units[unit]
        return found

    def total(self, stage: int) -> int:
        """Elements of a stage."""
        return sum(self.units[unit] for unit in self.starts(stage))

    def shard_group(self, stage: int, ranks: tuple[int, ...]) -> ShardGroup:
        """The workers of a stage, whose buffer is one bucket."""
        return ShardGroup(stage=stage, ranks=ranks, units=(stage,), buckets=(self.total(stage),))


@dataclass(frozen=True, slots=True, kw_only=True)
class ContiguousPlan(RecoveryPlan):
    """A plan whose shard groups are stages with one bucket each; ``sources`` are by stage."""

    old: Stages
    new: Stages

    def before(self, sealed: SealedShard) -> ShardCut:
        """Return the cut of the stage of which ``sealed`` is a shard."""
        return ShardCut(buckets=(self.old.total(sealed.shard_group[0]),), width=len(sealed.ranks))

    def pieces(self, slot: int) -> tuple[tuple[SealedShard, tuple[ShardPiece, ...]], ...]:
        """Return what ``slot`` reads, grouped by source."""
        number = self.shard_group_of(slot)
        if number is None:
            return ()
        size = self.after(number).shard_numel
        start = self.shard_groups[number].ranks.index(slot) * size
        found: dict[SealedShard, list[ShardPiece]] = {}
        for source, piece in self._overlaps(self.shard_groups[number].stage, start, start + size):
            found.setdefault(source, []).append(piece)
        return tuple((source, tuple(pieces)) for source, pieces in found.items())

    def _overlaps(
        self, stage: int, start: int, stop: int
    ) -> Iterator[tuple[SealedShard, ShardPiece]]:
        """Elements [start, stop) of a new stage, by layer and by the old shard that has them."""
        for unit, at in self.new.starts(stage).items():
            low, high = max(start, at), min(stop, at + self.new.units[unit])
            old_stage = next(s for s in range(len(self.sources)) if unit in self.old.starts(s))
            shift = self.old.starts(old_stage)[unit] - at
            size = self.before(self.sources[old_stage][0]).shard_numel
            while low < high:
                shard = (low + shift) // size
                until = min(high, (shard + 1) * size - shift)
                yield (
                    self.sources[old_stage][shard],
                    ShardPiece(
                        bucket=unit,
                        start=low,
                        stop=until,
                        source=shard,
                        source_offset=low + shift - shard * size,
                        target_offset=low - start,
                    ),
                )
                low = until
