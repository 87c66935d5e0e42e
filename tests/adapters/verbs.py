"""A change of a job whose workers are threads: sealed, planned, read, written, and compared whole.

What is compared is the state by the names of parameters, which no layout has to do with.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
import xxhash

from elaswave_plugin.core.layout.shards import MOMENTS, PARTS
from elaswave_plugin.core.layout.worker_facts import SealedShard
from elaswave_plugin.core.planner.layer_times import LayerTimes
from elaswave_plugin.core.recovery_plan.placement import Placement
from elaswave_plugin.core.recovery_plan.plan import RecoveryPlan, copy_targets, make_plan
from elaswave_plugin.recovery.recover import compare_weights
from elaswave_plugin.snapshot.restore import read_parts, restore
from elaswave_plugin.snapshot.snapshot_pool import VerifiedReader
from tests.adapters.one_process import OneProcess, Seat

# By (name, part) of a state: its flat values.
Whole = dict[tuple[str, str], torch.Tensor]


def drawn(name: str, part: str, numel: int) -> torch.Tensor:
    """The values that a parameter's master or moment has in these tests; moments are positive."""
    seed = xxhash.xxh3_64_intdigest(f"{name}|{part}".encode()) >> 1
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(numel, generator=generator) + (0.5 if part in MOMENTS else -0.5)


def fill(seat: Seat) -> None:
    """Have the drawn state, weights included."""
    framework = seat.framework
    for piece in framework.named_pieces():
        whole = drawn(piece.name, piece.part, piece.numel)
        piece.data.detach().copy_(whole[piece.start : piece.start + piece.data.numel()])
    parts = torch.cat([part.reshape(-1).float() for part in framework.read_shard()]).view(3, -1)
    masters, moments = parts[0].clone(), parts[1:].clone()
    framework.write_weights(masters)
    framework.write_moments(moments)
    framework.sync_weights()


class Change:
    """The changes of one job, and the bytes that each of them has read."""

    def __init__(
        self,
        one: OneProcess,
        placement: Placement,
        *,
        alignment: int,
        flow: Callable[[Placement], Any],
        weights: Callable[[Seat], Iterable[tuple[str, torch.Tensor, torch.Tensor]]],
        steps: Callable[[Seat], Any],
        step: Callable[[Seat], None],
        place: Callable[[Seat, Placement, tuple[int, ...]], Placement] = lambda _, now, ranks: now,
        keeps: bool = False,
    ) -> None:
        """``flow(placement)``: the work; ``weights(seat)``: (name, weights, their masters' values).

        ``steps(seat)``: what a capsule brings, ``step(seat)``: count one step more in all of it;
        ``place(seat, placement, ranks)``: tell a worker its view, and return it with the rules of
        its own groups. ``keeps``: what is in place stays.
        """
        self._one, self.placement, self._alignment = one, placement, alignment
        self._flow, self._weights, self._place, self._keeps = flow, weights, place, keeps
        self._steps, self._count = steps, step
        self.ranks = tuple(seat.slot for seat in one.seats)
        self._step = 0
        self._steps_before = one.each(self.ranks, steps)

    # ---- before ---------------------------------------------------------------------------------

    def seal(self) -> list[SealedShard]:
        """Seal the state of all, and give two others a copy of each shard."""
        self._step += 1
        epoch, memories = self._one.epoch, self._one.memories

        def sealing(seat: Seat) -> SealedShard | None:
            group = self.placement.shard_group_of(seat.slot)
            if group is None:
                return None
            return seat.memory.pool.begin_seal(
                step=self._step,
                epoch=epoch,
                shard_group=group.key,
                units=group.units,
                ranks=group.ranks,
                parts=seat.framework.read_shard(),
                capsule=seat.framework.read_capsule(),
                before_seal=lambda: None,
            )()

        sealed = self._one.each(self.ranks, sealing)
        for slot, record in sealed.items():
            targets = copy_targets(slot, ranks=self.ranks, nodes=self.ranks, copies=2)
            for holder in targets if record else ():
                assert record is not None
                into = memories[holder].store.begin_copy(record, holder, lambda: None)
                memories[slot].pool.reader(record.buffer)(0, into)
                memories[holder].store.end_copy(record, whole=True)
        return [
            one
            for slot in self.ranks
            for one in memories[slot].store.inventory(memories[slot].address)
            if (one.epoch, one.step) == (epoch, self._step)
        ]

    # ---- the change -----------------------------------------------------------------------------

    def to(self, ranks: Sequence[int]) -> RecoveryPlan:
        """Have these workers go on; state is read of the snapshots that those who stay hold."""
        inventory = [one for one in self.seal() if one.holder in ranks]
        staying = set(self.ranks) & set(ranks)
        point = (self._step, self._one.epoch) if self._keeps else None
        gone = set(self.ranks) - set(ranks)
        self._one.each(gone if self._keeps else set(self.ranks) | set(ranks), self._spoil)
        self.ranks, self.placement = tuple(ranks), self.after(ranks)
        self._one.open(ranks)
        plan_of = partial(
            make_plan,
            epoch=self._one.epoch,
            reason="a change",
            ranks=self.placement.world(self.ranks),
            shard_groups=self.placement.shard_groups,
            dataflow=self._flow(self.placement),
            inventory=inventory,
            alignment=self._alignment,
            live=dict.fromkeys(staying, point),
        )
        with reads() as found:
            plans = self._one.each(ranks, partial(self._recover, plan_of))
        plan = plans[ranks[0]]
        check_read_once(plan, found, ranks)
        for slot in ranks:
            self._one.memories[slot].store.release(self._one.epoch)
        return plan

    def after(self, ranks: Sequence[int]) -> Placement:
        """The placement of these; raises LayoutError where there is none."""
        return self.placement.after(ranks, LayerTimes(), {})

    def _spoil(self, seat: Seat) -> None:
        """Have nothing that is right, as in the middle of an update, and as one that is gone."""
        for piece in seat.framework.named_pieces():
            piece.data.detach().fill_(torch.nan)
        for _, weights, _ in self._weights(seat):
            weights.fill_(torch.nan)
        self._count(seat)

    def _recover(self, plan_of: Callable[..., RecoveryPlan], seat: Seat) -> RecoveryPlan:
        """The verbs in the order of `recovery/recover.py`."""
        framework = seat.framework
        framework.pause()
        placement = self._place(seat, self.placement, self.ranks)
        edits = placement.edits(seat.groups.launched(), seat.slot)
        seat.groups.edit_groups(self.placement.world(self.ranks), edits)
        state = restore(seat.access, make_plan=plan_of)
        framework.rebind(state.plan)
        framework.write_weights(state.masters)
        framework.write_capsule(state.capsule)
        differing = compare_weights(framework, state.plan)
        assert differing is None, differing
        framework.write_moments(read_parts(state.plan, MOMENTS, seat.access)[0])
        return state.plan

    def through(self, *views: Sequence[int]) -> None:
        """Go through these memberships, and compare after each."""
        for ranks in views:
            self.to(ranks)
            self.check()

    def through_every_loss(self) -> None:
        """Lose each set of up to two workers, who come back then; compare before and after each."""
        everyone = self.ranks
        self.check()
        for lost in losses(everyone):
            self.through(tuple(slot for slot in everyone if slot not in lost), everyone)

    # ---- afterwards -----------------------------------------------------------------------------

    def check(self) -> None:
        """Compare all state with what was drawn, bit for bit, and weights with their masters."""
        found: dict[tuple[str, str], list[tuple[int, torch.Tensor]]] = defaultdict(list)
        numels: dict[str, int] = {}

        def pieces(seat: Seat) -> list[Any]:
            for name, weights, wanted in self._weights(seat):
                assert torch.equal(weights, wanted), f"weights {name} of worker {seat.slot}"
            return [*seat.framework.named_pieces()]

        of_all = self._one.each(self.ranks, pieces)
        for piece in (piece for of_one in of_all.values() for piece in of_one):
            found[piece.name, piece.part].append((piece.start, piece.data.detach().flatten()))
            numels[piece.name] = piece.numel
        assert found, "nobody has any state"
        for (name, part), have in found.items():
            wanted = drawn(name, part, numels[name])
            covered = torch.zeros(numels[name], dtype=torch.bool)
            for start, data in have:
                assert torch.equal(data, wanted[start : start + len(data)]), f"{part} of {name}"
                covered[start : start + len(data)] = True
            assert covered.all(), f"{part} of {name} is nowhere"
        steps = self._one.each(self.ranks, self._steps)
        assert steps.items() <= self._steps_before.items(), f"{steps}, {self._steps_before} before"


# Of a shard: the bytes of its payload that were read, from and to.
Reads = dict[tuple[tuple[int, int], int], list[tuple[int, int]]]


@contextmanager
def reads() -> Iterator[Reads]:
    """Watch what is read of payloads in this block."""
    found: Reads = defaultdict(list)
    native = VerifiedReader.read_ranges

    def read_ranges(reader: Any, ranges: Sequence[tuple[int, memoryview]]) -> int:
        shard = reader._sealed
        found[shard.shard_group, shard.shard] += [
            (start, start + into.nbytes) for start, into in ranges if start < shard.payload_bytes
        ]
        return native(reader, ranges)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VerifiedReader, "read_ranges", read_ranges)
        yield found


def check_read_once(plan: RecoveryPlan, found: Reads, ranks: Sequence[int]) -> None:
    """Each byte of the state that is not in place was read by one worker, once; no padding was."""
    for of, ranges in found.items():
        ordered = sorted(ranges)
        for (_, stop), (following, _) in pairwise(ordered):
            assert stop <= following, f"shard {of}: bytes from {following} to {stop} read twice"
    staying = sum(
        min(length, (shard + 1) * size) - min(length, shard * size)
        for slot in ranks
        for bucket in plan.state_in_place(slot)
        for number in [plan.shard_group_of(slot)]
        if number is not None
        for group in [plan.shard_groups[number]]
        for shard in [group.ranks.index(slot)]
        for length in [group.buckets[bucket]]
        for size in [plan.after(number).shard_sizes[bucket]]
    )
    wanted = sum(sum(group.buckets) for group in plan.shard_groups) - staying
    total = sum(stop - start for ranges in found.values() for start, stop in ranges)
    assert total == len(PARTS) * 4 * wanted, f"{total} bytes read, wanted {12 * wanted}"


def losses(ranks: Sequence[int], *, most: int = 2) -> Iterator[tuple[int, ...]]:
    """Every set of up to ``most`` workers of which others are left."""
    for count in range(1, min(most, len(ranks) - 1) + 1):
        yield from combinations(ranks, count)
