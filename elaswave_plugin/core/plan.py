"""From a committed view and everything that is sealed to one recovery plan, alike on every worker.

The restore point is the newest step whose every shard is sealed somewhere, own or copy; nothing is
planned from state that is not sealed. A plan is pure data with a digest, so that the workers can
compare what they computed before anything changes.
"""

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elaswave_plugin.core.dataflow import Flow
from elaswave_plugin.core.shards import ALIGNMENT, Piece, ShardCut, pieces_for
from elaswave_plugin.errors import SnapshotGapError


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedShard:
    """One verified-by-checksum snapshot of one shard, and who holds the bytes."""

    owner: int
    step: int
    epoch: int
    ranks: tuple[int, ...]
    shard: int
    length: int
    payload_bytes: int
    capsule_bytes: int
    table_digest: int
    holder: int
    holder_address: str
    is_copy: bool

    def __str__(self) -> str:
        kind = "copy of shard" if self.is_copy else "shard"
        return f"{kind} {self.shard}/{len(self.ranks)} of step {self.step} at w{self.holder}"

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "SealedShard":
        """Read the inventory record of a commit (keys as in ``runtime/snapshot.py``)."""
        return cls(
            owner=record["owner"],
            step=record["step"],
            epoch=record["epoch"],
            ranks=tuple(record["ranks"]),
            shard=record["shard"],
            length=record["length"],
            payload_bytes=record["payload_bytes"],
            capsule_bytes=record["capsule_bytes"],
            table_digest=record["table_digest"],
            holder=record["holder"],
            holder_address=record["holder_address"],
            is_copy=record["copy"],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryPlan:
    """What every worker does about one committed view."""

    epoch: int
    reason: str
    ranks: tuple[int, ...]
    restore_step: int
    sources: tuple[SealedShard, ...]
    before: ShardCut
    after: ShardCut
    dataflow: Flow

    def __str__(self) -> str:
        return (
            f"epoch {self.epoch}: width {self.before.width} -> {self.after.width}, "
            f"restore step {self.restore_step}, {self.dataflow}"
        )

    @property
    def digest(self) -> int:
        """A 63-bit fingerprint of the whole plan."""
        parts = (
            self.epoch,
            self.ranks,
            tuple((s.owner, s.step, s.epoch, s.holder, s.table_digest) for s in self.sources),
            self.before,
            self.after,
            self.dataflow,
        )
        return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1

    def pieces(self, slot: int) -> tuple[tuple[SealedShard, tuple[Piece, ...]], ...]:
        """What ``slot`` reads, grouped by source."""
        wanted = pieces_for(target=self.ranks.index(slot), before=self.before, after=self.after)
        return tuple(
            (source, tuple(piece for piece in wanted if piece.source == source.shard))
            for source in self.sources
            if any(piece.source == source.shard for piece in wanted)
        )

    def bytes_moved(self) -> int:
        """Bytes of state that travel between different workers."""
        return sum(
            12 * (piece.stop - piece.start)
            for slot in self.ranks
            for source, pieces in self.pieces(slot)
            if source.holder != slot
            for piece in pieces
        )


def restore_point(sealed: Iterable[SealedShard]) -> tuple[SealedShard, ...]:
    """The sources, one a shard in shard order, of the newest completely sealed step.

    The owner's own memory is preferred to a copy, then the lowest holder.
    Raises SnapshotGapError naming the missing shards of the newest step.
    """
    steps: dict[tuple[int, int, tuple[int, ...]], dict[int, SealedShard]] = {}
    for one in sorted(sealed, key=lambda s: (s.is_copy, s.holder)):
        steps.setdefault((one.step, one.epoch, one.ranks), {}).setdefault(one.shard, one)
    for (_, _, ranks), shards in sorted(steps.items(), reverse=True):
        if len(shards) == len(ranks):
            return tuple(shards[index] for index in range(len(ranks)))
    if not steps:
        raise SnapshotGapError("no sealed snapshot is left; restart from the last checkpoint")
    gaps = [
        f"step {step}: shards {sorted(set(range(len(ranks))) - set(shards))} of {len(ranks)}"
        for (step, _, ranks), shards in sorted(steps.items(), reverse=True)
    ]
    raise SnapshotGapError(
        f"state was lost with all its copies ({'; '.join(gaps)}); "
        "restart from the last checkpoint, or raise snapshot_copies"
    )


def make_plan(
    *,
    epoch: int,
    reason: str,
    ranks: Sequence[int],
    dataflow: Flow,
    buckets: Sequence[int],
    inventory: Iterable[Mapping[str, Any]],
    alignment: int = ALIGNMENT,
    rejected: Collection[tuple[int, int, int]] = (),
) -> RecoveryPlan:
    """Plan the recovery of a data-parallel job from a commit.

    ``ranks``: live slots in rank order; ``dataflow``: who of them runs what; ``buckets``: unpadded
    lengths in elements, cut at multiples of ``alignment``; ``rejected``: (holder, owner, step)
    whose bytes failed verification and are not used.
    """
    sealed = [
        one
        for one in map(SealedShard.from_record, inventory)
        if (one.holder, one.owner, one.step) not in rejected
    ]
    sources = restore_point(sealed)
    return RecoveryPlan(
        epoch=epoch,
        reason=reason,
        ranks=tuple(ranks),
        restore_step=sources[0].step,
        sources=sources,
        before=ShardCut(buckets=tuple(buckets), width=len(sources), alignment=alignment),
        after=ShardCut(buckets=tuple(buckets), width=len(ranks), alignment=alignment),
        dataflow=dataflow,
    )


def copy_targets(
    slot: int, *, ranks: Sequence[int], nodes: Sequence[int], copies: int
) -> tuple[int, ...]:
    """Slots that keep a copy of ``slot``'s snapshot: the next ranks, other nodes first.

    ``nodes[i]`` is the node of ``ranks[i]``. Fewer targets than ``copies`` when fewer are alive.
    """
    mine = ranks.index(slot)
    others = [(mine + distance) % len(ranks) for distance in range(1, len(ranks))]
    others.sort(key=lambda rank: nodes[rank] == nodes[mine])
    return tuple(ranks[rank] for rank in others[:copies])
