"""The recovery plan of a committed view, from all sealed shards; the same on every worker.

The restore point is the newest step of which every shard is sealed somewhere, own or copy; nothing
is planned from state that is not sealed. A plan is pure data with a digest, so the workers can
compare their plans before anything changes.
"""

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from elaswave_plugin.core.layout.shards import ALIGNMENT, ShardCut, ShardPiece, pieces_for
from elaswave_plugin.core.layout.worker_facts import SealedShard
from elaswave_plugin.core.planner.pipeline_flow import Flow, PipelineFlow
from elaswave_plugin.core.recovery_plan.placement import ShardGroup
from elaswave_plugin.core.step.dataflow import Dataflow
from elaswave_plugin.errors import SnapshotGapError


class EntryCheck(NamedTuple):
    """A replica with newcomers, and the replica that repeats the first of its micro-batches.

    ``newcomers`` leave if the losses of ``reporter`` and ``repeater`` differ.
    """

    newcomers: tuple[int, ...]
    reporter: int
    repeaters: tuple[int, ...]
    repeater: int
    microbatches: tuple[int, ...]

    def __str__(self) -> str:
        ks = " ".join(map(str, self.microbatches))
        return f"micro-batches {ks} of w{self.reporter} by w{self.repeater}"


def entry_checks(flow: Dataflow | PipelineFlow, came: Collection[int]) -> tuple[EntryCheck, ...]:
    """Return the checks of a step in which the slots ``came`` work for the first time.

    A newcomer can hold the right weights and still compute something else: its script may have a
    variable that the loops of the others have changed. A whole replica without newcomers reveals
    it. Empty if there is none, or if stages are unequally wide.

    >>> from elaswave_plugin.core.step.dataflow import deal
    >>> flow = deal(num_microbatches=6, launch_slots=(0, 1, 2), live=(0, 1, 2))
    >>> for one in entry_checks(flow, {1}):
    ...     print(one)
    micro-batches 1 of w1 by w0
    """
    if isinstance(flow, Dataflow):
        return _of_workers(flow, came)
    return _of_pipelines(flow, came) if flow.is_healthy else ()


def _of_workers(flow: Dataflow, came: Collection[int]) -> tuple[EntryCheck, ...]:
    busy = [slot for slot, ks in flow.placement if ks]
    there = [slot for slot in busy if slot not in came]
    return tuple(
        EntryCheck(
            (slot,), slot, (there[0],), there[0], flow.contributions(slot)[0].microbatches[:1]
        )
        for slot in busy
        if slot in came and there
    )


def _of_pipelines(flow: PipelineFlow, came: Collection[int]) -> tuple[EntryCheck, ...]:
    stages = flow.layout.stages
    replicas = [
        tuple(slot for stage in stages for slot in stage[order].slots)
        for order in range(len(stages[0]))
    ]
    there = [order for order, slots in enumerate(replicas) if not set(slots) & set(came)]
    # Megatron-Core's interleaved schedule takes a multiple of the stages.
    count = len(stages) if flow.layout.vpp > 1 else 1
    return tuple(
        EntryCheck(
            tuple(slot for slot in slots if slot in came),
            stages[-1][order].slots[0],
            replicas[there[0]],
            stages[-1][there[0]].slots[0],
            flow.microbatches(stages[-1][order].slots[0])[:count],
        )
        for order, slots in enumerate(replicas)
        if there and set(slots) & set(came)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryPlan:
    """The actions of every worker for one committed view.

    ``sources``: the shards to read, by the shard group that sealed them and in their order;
    ``live``: slots whose model and optimizer are still equal to their part of ``sources``.
    """

    epoch: int
    reason: str
    ranks: tuple[int, ...]
    restore_step: int
    shard_groups: tuple[ShardGroup, ...]
    sources: tuple[tuple[SealedShard, ...], ...]
    alignment: int
    dataflow: Flow
    live: tuple[int, ...] = ()

    def __str__(self) -> str:
        before = {shards[0].shard_group[0]: shards[0] for shards in self.sources}
        widths, parts = {}, {}
        for one in self.shard_groups:
            old = before.get(one.stage)
            widths[one.stage] = f"{len(old.ranks) if old else 0} -> {len(one.ranks)}"
            if old is None or old.units != one.units:
                parts[one.stage] = f"{len(old.units) if old else 0} -> {len(one.units)}"
        moved = f"model parts {', '.join(parts.values())}, " if parts else ""
        return (
            f"view {self.epoch}: width {', '.join(widths.values())}, {moved}"
            f"restore step {self.restore_step}, {self.dataflow}"
        )

    @property
    def restore_buffer(self) -> int:
        """The buffer in which all of the sources lie at their owners, who seal alike."""
        return self.sources[0][0].buffer

    def shard_group_of(self, slot: int) -> int | None:
        """The number of the shard group of ``slot``; None for a worker without a place."""
        return next(
            (n for n, shard_group in enumerate(self.shard_groups) if slot in shard_group.ranks),
            None,
        )

    def before(self, sealed: SealedShard) -> ShardCut:
        """Return the cut of the state of which ``sealed`` is a shard."""
        lengths = {
            unit: length
            for shard_group in self.shard_groups
            for unit, length in zip(shard_group.units, shard_group.buckets, strict=True)
        }
        buckets = tuple(lengths[unit] for unit in sealed.units)
        return ShardCut(buckets=buckets, width=len(sealed.ranks), alignment=self.alignment)

    def after(self, shard_group: int) -> ShardCut:
        """Return the cut of a shard group's state from now on."""
        one = self.shard_groups[shard_group]
        return ShardCut(buckets=one.buckets, width=len(one.ranks), alignment=self.alignment)

    @property
    def digest(self) -> int:
        """A 63-bit fingerprint of every field, and of every field of every source."""
        return int.from_bytes(hashlib.sha256(repr(self).encode()).digest()[:8], "big") >> 1

    def weights_in_place(self, shard_group: int) -> frozenset[int]:
        """Return the buckets of a shard group whose final weights all its workers have."""
        one = self.shard_groups[shard_group]
        units = set(one.units)
        for slot in one.ranks:
            sealed = self._sealed_in(slot, one)
            units &= set(sealed.units if sealed else ())
        return frozenset(bucket for bucket, unit in enumerate(one.units) if unit in units)

    def state_in_place(self, slot: int) -> dict[int, int]:
        """Map the buckets whose final shard ``slot`` has to their numbers when sealed."""
        number = self.shard_group_of(slot)
        if number is None:
            return {}
        shard_group = self.shard_groups[number]
        sealed = self._sealed_in(slot, shard_group)
        if sealed is None or sealed.ranks != shard_group.ranks:
            return {}
        here = sorted(self.weights_in_place(number))
        return {bucket: sealed.units.index(shard_group.units[bucket]) for bucket in here}

    def in_place(self, slot: int) -> dict[str, int]:
        """Count the buckets of a worker: without gathering, without reading, and all of them."""
        number = self.shard_group_of(slot)
        if number is None:
            return {"weights": 0, "state": 0, "parts": 0}
        return {
            "weights": len(self.weights_in_place(number)),
            "state": len(self.state_in_place(slot)),
            "parts": len(self.shard_groups[number].units),
        }

    def _sealed_in(self, slot: int, shard_group: ShardGroup) -> SealedShard | None:
        """Return a shard of the shard group if ``slot`` has been in it since; None otherwise."""
        here = (
            s[0] for s in self.sources if s[0].shard_group == shard_group.key and slot in s[0].ranks
        )
        return next(here, None) if slot in self.live else None

    def pieces(self, slot: int) -> tuple[tuple[SealedShard, tuple[ShardPiece, ...]], ...]:
        """List what ``slot`` reads, grouped by source; nothing for a worker without a place."""
        number = self.shard_group_of(slot)
        if number is None:
            return ()
        shard_group, after = self.shard_groups[number], self.after(number)
        found = []
        staying = self.state_in_place(slot)
        for shards in self.sources:
            old = shards[0]
            if old.shard_group[1] != shard_group.tp or set(old.units).isdisjoint(shard_group.units):
                continue
            wanted = pieces_for(
                target=shard_group.ranks.index(slot),
                before=self.before(old),
                after=after,
                origins={
                    bucket: old.units.index(unit)
                    for bucket, unit in enumerate(shard_group.units)
                    if unit in old.units and bucket not in staying
                },
            )
            for source in shards:
                pieces = tuple(piece for piece in wanted if piece.source == source.shard)
                if pieces:
                    found.append((source, pieces))
        return tuple(found)

    def bytes_moved(self) -> int:
        """Count the bytes of state that travel between different workers."""
        return sum(
            12 * (piece.stop - piece.start)
            for slot in self.ranks
            for source, pieces in self.pieces(slot)
            if source.holder != slot
            for piece in pieces
        )


_Shards = dict[int, SealedShard]
_ShardGroups = dict[tuple[int, int], _Shards]


def restore_point(
    sealed: Iterable[SealedShard], shard_groups: Sequence[ShardGroup]
) -> tuple[tuple[SealedShard, ...], ...]:
    """Find the sources of the newest step sealed completely: by its shard groups, in shard order.

    ``shard_groups``: the parts of the model that workers need from now on. The owner's own memory
    is preferred to a copy, then the lowest holder.
    Raises SnapshotGapError naming the missing shards of every step.
    """
    steps: dict[tuple[int, int], _ShardGroups] = {}
    for one in sorted(sealed, key=lambda s: (s.is_copy, s.holder)):
        of_step = steps.setdefault((one.step, one.epoch), {})
        of_step.setdefault(one.shard_group, {}).setdefault(one.shard, one)
    newest_first = sorted(steps.items(), reverse=True)
    for _, of_step in newest_first:
        if not any(_missing(of_step, shard_group) for shard_group in shard_groups):
            origins = sorted(
                {
                    key
                    for shard_group in shard_groups
                    for key in _origins(of_step, shard_group).values()
                }
            )
            return tuple(tuple(of_step[key][n] for n in sorted(of_step[key])) for key in origins)
    if not steps:
        raise SnapshotGapError("no sealed snapshot is left; restart from the last checkpoint")
    gaps = [
        f"step {step}{place if len(shard_groups) > 1 else ''}: {what}"
        for (step, _), of_step in newest_first
        for place, what in dict.fromkeys(
            missing for shard_group in shard_groups for missing in _missing(of_step, shard_group)
        )
    ]
    raise SnapshotGapError(
        f"state was lost with all its copies ({'; '.join(gaps)}); "
        "restart from the last checkpoint, or raise snapshot_copies"
    )


def _origins(of_step: _ShardGroups, shard_group: ShardGroup) -> dict[int, tuple[int, int]]:
    """Find the shard group that had each part of the model that ``shard_group`` needs, if known."""
    return {
        unit: key
        for key, shards in of_step.items()
        if key[1] == shard_group.tp
        for unit in next(iter(shards.values())).units
        if unit in shard_group.units
    }


def _missing(of_step: _ShardGroups, shard_group: ShardGroup) -> list[tuple[str, str]]:
    """List (place, shards as text) of everything that ``shard_group`` needs and that is missing."""
    origins = _origins(of_step, shard_group)
    missing = []
    for stage, tp in dict.fromkeys(origins.values()):
        shards = of_step[stage, tp]
        width = len(next(iter(shards.values())).ranks)
        absent = sorted(set(range(width)) - set(shards))
        if absent:
            missing.append((f", stage {stage} tp {tp}", f"shards {absent} of {width}"))
    if len(origins) < len(shard_group.units):
        missing.append((f", stage {shard_group.stage} tp {shard_group.tp}", "all shards"))
    return missing


def make_plan(
    *,
    epoch: int,
    reason: str,
    ranks: Sequence[int],
    shard_groups: Sequence[ShardGroup],
    dataflow: Flow,
    inventory: Iterable[SealedShard],
    alignment: int = ALIGNMENT,
    rejected: Collection[SealedShard] = (),
    live: Mapping[int, tuple[int, int] | None] | None = None,
) -> RecoveryPlan:
    """Plan the recovery of a job from a commit.

    ``ranks``: live slots in rank order; ``shard_groups``: the workers that share state from now on,
    cut at multiples of ``alignment`` elements; ``dataflow``: the work of each; ``rejected``:
    shards whose bytes failed verification, which are not used; ``live``: (step,
    epoch) of the seal at which each slot's model and optimizer still are. Raises SnapshotGapError.
    """
    sources = restore_point((one for one in inventory if one not in rejected), shard_groups)
    point = sources[0][0].step, sources[0][0].epoch
    return RecoveryPlan(
        epoch=epoch,
        reason=reason,
        ranks=tuple(ranks),
        restore_step=sources[0][0].step,
        shard_groups=tuple(shard_groups),
        sources=sources,
        alignment=alignment,
        dataflow=dataflow,
        live=tuple(slot for slot in ranks if (live or {}).get(slot) == point),
    )


def copy_targets(
    slot: int,
    *,
    ranks: Sequence[int],
    nodes: Sequence[int],
    copies: int,
    peers: Collection[int] = (),
) -> tuple[int, ...]:
    """List slots to keep a copy of ``slot``'s snapshot: other nodes, then peers, then the next.

    ``nodes[i]`` is the node of ``ranks[i]``; ``peers``: the slots that share its state. Fewer
    targets than ``copies`` if fewer are alive. The next is the slot with the same place on its
    node, so that the slots of a node do not all choose the same one.
    """
    mine = ranks.index(slot)
    sharing = {slot, *peers}
    all_of: dict[int, list[int]] = {}
    peers_of: dict[int, list[int]] = {}
    for one, node in sorted(zip(ranks, nodes, strict=True)):
        all_of.setdefault(node, []).append(one)
        if one in sharing:
            peers_of.setdefault(node, []).append(one)

    def preference(rank: int) -> tuple[bool, bool, bool, int]:
        is_near, is_peer = nodes[rank] == nodes[mine], ranks[rank] in sharing
        places = peers_of if is_peer else all_of
        theirs, own = places[nodes[rank]], places[nodes[mine]]
        away = theirs.index(ranks[rank]) - own.index(slot)
        return is_near, not is_peer, away != 0, away % len(theirs)

    others = [(mine + distance) % len(ranks) for distance in range(1, len(ranks))]
    others.sort(key=preference)
    return tuple(ranks[rank] for rank in others[:copies])
