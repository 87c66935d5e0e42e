"""Worker of `python -m benchmarks.migration`: layers change stage, in three ways, again and again.

migration_worker.py OUT DP LAYERS ELEMENTS MOVED ROUNDS
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.bench_member import BenchMember
from benchmarks.contiguous import ContiguousPlan, Stages
from elaswave_plugin.core.layout.layout import launch_layout
from elaswave_plugin.core.layout.shards import MOMENTS, PARTS, WEIGHTS, ShardCut
from elaswave_plugin.core.layout.worker_facts import SealedShard
from elaswave_plugin.core.planner.pipeline_flow import flow_of
from elaswave_plugin.core.recovery_plan.placement import GridPlacement, ShardGroup
from elaswave_plugin.core.recovery_plan.plan import RecoveryPlan, make_plan
from elaswave_plugin.ipc.snapshot_record import BUFFERS
from elaswave_plugin.snapshot.free_memory import available_bytes
from elaswave_plugin.snapshot.restore import Access, read_parts
from elaswave_plugin.snapshot.snapshot_pool import SnapshotPool, capacity_of

READ_LIMIT_S = 120.0
INTERLEAVED, CONTIGUOUS = 0, 1
"""The steps under which the same state is sealed, cut in the two ways."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Two stages of ``dp`` workers, each layer of ``numel`` elements; ``moved`` layers leave."""

    dp: int
    layers: int
    numel: int
    moved: int

    @property
    def units(self) -> dict[int, int]:
        """Elements of each layer."""
        return dict.fromkeys(range(1, self.layers + 1), self.numel)

    def seatings(self) -> tuple[GridPlacement, GridPlacement]:
        """Before, and after the first layers of stage 1 have come to stage 0."""
        layout = launch_layout(tp=1, pp=2, dp=self.dp, num_layers=self.layers)
        before = GridPlacement.at_launch(layout, groups={}, units=self.units)
        cut = self.layers // 2 + self.moved
        after = GridPlacement.at_launch(
            layout.recut((0, cut, self.layers)), groups={}, units=self.units
        )
        return before, after

    def stages(self, placement: GridPlacement) -> Stages:
        """The same in one buffer a stage."""
        return Stages(units=self.units, cuts=placement.layout.cuts)


def state_of(units: Iterable[tuple[int, int, int]], part: str) -> torch.Tensor:
    """Values that tell (unit, start, stop) of each range, and the part, from any other."""
    ranges = [
        torch.arange(start, stop, dtype=torch.float32).remainder_(65536).add_(65536 * unit)
        for unit, start, stop in units
    ]
    return torch.cat(ranges).mul_(PARTS.index(part) + 1)


class Migrations:
    """One worker's part."""

    def __init__(self, member: BenchMember, move: Move) -> None:
        self._member, self._move = member, move
        self._slot = member.slot
        before, after = move.seatings()
        self._before, self._after = before.shard_groups, after.shard_groups
        old, new = move.stages(before), move.stages(after)
        self._old_stages = [
            old.shard_group(shard_group.stage, shard_group.ranks) for shard_group in self._before
        ]
        mine = self._mine(self._before)
        whole = _cut(mine).payload_bytes
        self._pool = SnapshotPool(
            member.member.snapshot_fds[:BUFFERS],
            slot=self._slot,
            capacity_bytes=capacity_of(2 * whole),
            needed_bytes=2 * whole,
            available_bytes=available_bytes(),
        )
        self._live = torch.stack([state_of(self._ranges(mine), part) for part in PARTS])
        self._seal(INTERLEAVED, self._before, self._ranges(mine))
        self._seal(CONTIGUOUS, self._old_stages, self._ranges_in_one(old))
        inventory = self._agreed_inventory()
        common: dict[str, Any] = {
            "epoch": member.view.epoch,
            "reason": "measured",
            "ranks": member.view.ranks,
            "dataflow": flow_of(layout=after.layout, num_microbatches=move.dp),
        }
        sealed = [one for one in inventory if one.step == INTERLEAVED]
        live = dict.fromkeys(member.view.ranks, (INTERLEAVED, member.view.epoch))
        self.interleaved = make_plan(
            shard_groups=self._after, inventory=sealed, live=live, **common
        )
        self.contiguous = ContiguousPlan(
            shard_groups=tuple(
                new.shard_group(shard_group.stage, shard_group.ranks) for shard_group in self._after
            ),
            sources=sealed_by_stage(one for one in inventory if one.step == CONTIGUOUS),
            restore_step=CONTIGUOUS,
            alignment=128,
            old=old,
            new=new,
            **common,
        )
        self._old, self._new = old, new

    def _mine(self, shard_groups: Sequence[ShardGroup]) -> ShardGroup:
        return next(shard_group for shard_group in shard_groups if self._slot in shard_group.ranks)

    def _ranges(self, shard_group: ShardGroup) -> list[tuple[int, int, int]]:
        """The ranges of this worker's shard where every layer is cut by itself."""
        (size,) = set(_cut(shard_group).shard_sizes)
        start = shard_group.ranks.index(self._slot) * size
        return [(unit, start, start + size) for unit in shard_group.units]

    def _ranges_in_one(self, stages: Stages) -> list[tuple[int, int, int]]:
        """The ranges of this worker's shard where a stage is one buffer."""
        shard_group = self._mine(self._before)
        size = stages.total(shard_group.stage) // len(shard_group.ranks)
        start = shard_group.ranks.index(self._slot) * size
        found = []
        for unit, at in stages.starts(shard_group.stage).items():
            low, high = max(start, at) - at, min(start + size, at + stages.units[unit]) - at
            if low < high:
                found.append((unit, low, high))
        return found

    def _seal(
        self, step: int, shard_groups: Sequence[ShardGroup], ranges: Sequence[tuple[int, int, int]]
    ) -> None:
        shard_group = self._mine(shard_groups)
        record = self._pool.begin_seal(
            step=step,
            epoch=self._member.view.epoch,
            shard_group=shard_group.key,
            units=shard_group.units,
            ranks=shard_group.ranks,
            parts=[state_of(ranges, part) for part in PARTS],
            capsule=b"none",
            before_seal=lambda: None,
        )()
        self._member.member.sealed(record, [])

    def _agreed_inventory(self) -> list[SealedShard]:
        """Return the inventory of the job, as a change of the view tells all."""
        dist.barrier()
        if self._slot == 0:
            self._member.member.severed(self._member.view.epoch, "the inventory is asked for")
        self._member.wait_for_change(self._idle)
        return self._member.follow().inventory

    def _idle(self) -> None:
        time.sleep(0.005)
        self._member.member.check()

    def run(self, number: int) -> None:
        """Each way once, and whether the state has come over."""
        ways = (
            ("blocking_contiguous", self.contiguous, PARTS),
            ("blocking_interleaved", self.interleaved, PARTS),
            ("nonblocking_interleaved", self.interleaved, WEIGHTS),
        )
        for name, plan, parts in ways:
            target = self._what_stays(plan)
            dist.barrier()
            begun_s = time.monotonic()
            fetched = self._read(plan, parts, target)
            self._gather(plan, target[0])
            paused_s = time.monotonic()
            if parts == WEIGHTS:
                fetched += self._read(plan, MOMENTS, target)
            over_s = time.monotonic()
            self._check(plan, target)
            self._member.write(
                what=name,
                run=number,
                begun_s=begun_s,
                paused_s=paused_s,
                over_s=over_s,
                fetched_bytes=fetched,
            )

    def _what_stays(self, plan: RecoveryPlan) -> torch.Tensor:
        """The new shard, with the parts that are in place before anything is read."""
        cut = self._cut_of(plan)
        target = torch.zeros(len(PARTS), cut.shard_numel)
        before = _spans(_cut(self._mine(self._before)))
        after = _spans(cut)
        for bucket, old in plan.state_in_place(self._slot).items():
            target[:, after[bucket]] = self._live[:, before[old]]
        return target

    def _cut_of(self, plan: RecoveryPlan) -> ShardCut:
        number = plan.shard_group_of(self._slot)
        assert number is not None
        return plan.after(number)

    def _read(self, plan: RecoveryPlan, parts: Sequence[str], target: torch.Tensor) -> int:
        access = Access(
            slot=self._slot,
            pool=self._pool,
            secret=self._member.member.secret,
            timeout_s=READ_LIMIT_S,
            check=self._member.member.check,
        )
        payload, fetched_bytes = read_parts(plan, parts, access)
        first = PARTS.index(parts[0])
        in_place = plan.state_in_place(self._slot)
        for bucket, span in enumerate(_spans(self._cut_of(plan))):
            if bucket not in in_place:
                target[first : first + len(parts), span] = payload[:, span]
        return fetched_bytes

    def _gather(self, plan: RecoveryPlan, shard: torch.Tensor) -> None:
        """Every worker of a stage needs the whole weights of the layers that have come to it."""
        stage = self._mine(self._after).stage
        come = self._new.starts(stage).keys() - self._old.starts(stage).keys()
        if plan is self.contiguous:
            for unit in sorted(come):
                self._broadcast(self._new.starts(stage)[unit], shard)
            return
        units = self._mine(self._after).units
        for unit, span in zip(units, _spans(self._cut_of(plan)), strict=True):
            if unit in come:
                whole = torch.empty(self._move.numel)
                dist.all_gather_into_tensor(whole, shard[span], group=self._group)

    def _broadcast(self, start: int, shard: torch.Tensor) -> None:
        """Broadcast a layer at ``start`` of the stage's one buffer from the holders of it."""
        stop, size = start + self._move.numel, shard.numel()
        whole = torch.empty(self._move.numel)
        for rank in range(start // size, (stop - 1) // size + 1):
            low, high = max(start, rank * size), min(stop, (rank + 1) * size)
            piece = whole[low - start : high - start]
            if rank == self._group.rank():
                piece.copy_(shard[low - rank * size : high - rank * size])
            dist.broadcast(piece, dist.get_global_rank(self._group, rank), group=self._group)

    def take_groups(self, groups: Sequence[Any]) -> None:
        """The data-parallel group of the own stage."""
        self._group = groups[0]

    def _check(self, plan: RecoveryPlan, target: torch.Tensor) -> None:
        shard_group = self._mine(self._after)
        ranges = (
            self._ranges_in_one(self._new) if plan is self.contiguous else self._ranges(shard_group)
        )
        for part, values in zip(PARTS, target, strict=True):
            if not torch.equal(values, state_of(ranges, part)):
                raise AssertionError(f"worker {self._slot}: {part} is not what was sealed")


def _cut(shard_group: ShardGroup) -> ShardCut:
    return ShardCut(buckets=shard_group.buckets, width=len(shard_group.ranks))


def _spans(cut: ShardCut) -> list[slice]:
    """Return where each bucket's shard lies in one part of a worker's state."""
    ends = list(accumulate(cut.shard_sizes))
    return [slice(end - size, end) for end, size in zip(ends, cut.shard_sizes, strict=True)]


def sealed_by_stage(sealed: Iterable[SealedShard]) -> tuple[tuple[SealedShard, ...], ...]:
    """Own snapshots of each stage in the order of their shards."""
    stages: dict[int, list[SealedShard]] = {}
    for one in sealed:
        stages.setdefault(one.shard_group[0], []).append(one)
    return tuple(
        tuple(sorted(stages[stage], key=lambda one: one.shard)) for stage in sorted(stages)
    )


def main(arguments: list[str]) -> None:
    """Measure all rounds."""
    out, _, *sizes, rounds = arguments
    dp, layers, numel, moved = map(int, sizes)
    torch.set_num_threads(1)
    member = BenchMember(Path(out))
    stages = {"0": tuple(range(dp)), "1": tuple(range(dp, 2 * dp))}
    _, *own = member.install(stages)
    migrations = Migrations(member, Move(dp=dp, layers=layers, numel=numel, moved=moved))
    migrations.take_groups(own)
    # The first round makes links and pages.
    for number in range(-1, int(rounds)):
        migrations.run(number)
    dist.barrier()
    member.uninstall()
    member.member.finish()
    member.links.close()


if __name__ == "__main__":
    main(sys.argv[1:])
