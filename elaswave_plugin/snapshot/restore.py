"""Reads a worker's new weights from the sealed snapshots that a plan names, or from the next best.

The optimizer state follows from the same plan (`DeferredMoments`). Own memory is read in place;
other shards are fetched from the agent that holds them. Bytes that fail their checksum or do not
arrive are rejected by all workers together, and the plan is made again without them: another copy,
then an older step, then the job stops with the gap named.
"""

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from elaswave_plugin.core.layout.shards import ELEMENT_BYTES, MOMENTS, PARTS, WEIGHTS, ShardPiece
from elaswave_plugin.core.layout.worker_facts import SealedShard
from elaswave_plugin.core.recovery_plan.plan import RecoveryPlan
from elaswave_plugin.errors import (
    EpochChanged,
    LinkError,
    PlanDigestError,
    SnapshotGapError,
    SnapshotUnreadableError,
)
from elaswave_plugin.ipc.secret import Secret
from elaswave_plugin.ipc.snapshot_record import NOTES
from elaswave_plugin.snapshot.fetch import Fetcher
from elaswave_plugin.snapshot.snapshot_pool import SnapshotPool, VerifiedReader
from elaswave_plugin.values.plain import bytes_of, gathered
from elaswave_plugin.values.untouched import untouched_zeros

_STALL_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """A worker's way to sealed state: own memory in place, that of others with the job's secret.

    ``timeout_s``: for a piece that is fetched; ``stall_s``: the longest that nothing may come of
    it. ``unheard``: addresses of which nothing was heard in this view, which others reach for us.
    ``check`` is called all the time while bytes are awaited, and may raise EpochChanged.
    """

    slot: int
    pool: SnapshotPool
    secret: Secret
    timeout_s: float
    stall_s: float = math.inf
    unheard: set[str] = field(default_factory=set)
    check: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoredState:
    """A worker's verified new weights: masters [shard_numel] float32, and the step capsule."""

    plan: RecoveryPlan
    masters: torch.Tensor
    capsule: bytes
    fetched_bytes: int


def restore(
    access: Access,
    *,
    make_plan: Callable[..., RecoveryPlan],
    reading: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> RestoredState:
    """Read and verify a worker's weights; collective over WORLD.

    ``make_plan(rejected=...)`` makes the plan that avoids those snapshots. ``reading`` is entered
    around what may take the timeout for a source; one of which nothing comes for 2 s is put off
    while others have the same step. Where none has, all that is waited for in vain has one timeout.
    Raises PlanDigestError, SnapshotGapError.
    """
    rejected, put_off = frozenset[SealedShard](), frozenset[SealedShard]()
    # Where another copy can be had, one that does not come is not waited for.
    least_s, is_patient = min(_STALL_S, access.timeout_s), False
    access = replace(access, stall_s=least_s)
    plan = make_plan(rejected=rejected)
    while True:
        _compare_digests(plan)
        found: SealedShard | None = None
        state = None
        try:
            with reading():
                state = _read(plan, access)
        except SnapshotUnreadableError as error:
            found = error.sealed
        everyone = _exchange(found)
        if state is not None and not any(everyone):
            return state
        unread = {one for one in everyone if one is not None}
        if is_patient:
            # Whatever is silent beside that one had as long as it had.
            rejected, access = rejected | unread, replace(access, stall_s=least_s)
            plan = make_plan(rejected=rejected)
            continue
        put_off |= unread
        other = _plan_of_step(plan.restore_step, partial(make_plan, rejected=put_off))
        if other is None:
            is_patient, access = True, replace(access, stall_s=access.timeout_s)
        plan = other or make_plan(rejected=rejected)


def _plan_of_step(step: int, make_plan: Callable[[], RecoveryPlan]) -> RecoveryPlan | None:
    """A plan that goes back no further; None where there is none."""
    try:
        plan = make_plan()
    except SnapshotGapError:
        return None
    return plan if plan.restore_step == step else None


def _exchange(found: SealedShard | None) -> list[SealedShard | None]:
    everyone = gathered(None if found is None else asdict(found))
    return [None if one is None else SealedShard(**one) for one in everyone]


def _compare_digests(plan: RecoveryPlan) -> None:
    mine = torch.tensor([plan.digest], dtype=torch.int64)
    everyone = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    digests = {slot: int(one) for slot, one in zip(plan.ranks, everyone, strict=True)}
    if len(set(digests.values())) != 1:
        raise PlanDigestError(f"plans of view {plan.epoch} differ by worker: {digests}")


def _read(plan: RecoveryPlan, access: Access) -> RestoredState:
    (masters,), fetched_bytes = read_parts(plan, WEIGHTS, access)
    capsule = read_capsule(_nearest_capsule(plan, access.slot), plan, access)
    return RestoredState(plan=plan, masters=masters, capsule=capsule, fetched_bytes=fetched_bytes)


def read_capsule(source: SealedShard, plan: RecoveryPlan, access: Access) -> bytes:
    """Read and verify the capsule of a shard; raises SnapshotUnreadableError."""
    with _open(source, plan, access) as reader:
        return reader.read_capsule()


def _nearest_capsule(plan: RecoveryPlan, slot: int) -> SealedShard:
    """Return a source of the own shard group, on this worker if possible: capsules may differ."""
    number = plan.shard_group_of(slot)
    key = None if number is None else plan.shard_groups[number].key
    everything = [source for sources in plan.sources for source in sources]
    own = [source for source in everything if source.shard_group == key] or everything
    return next((source for source in own if source.holder == slot), own[0])


def read_parts(
    plan: RecoveryPlan, parts: Sequence[str], access: Access
) -> tuple[torch.Tensor, int]:
    """Read and verify some parts of a worker's new shard, and count what came from others.

    ``parts``: names of ``core/layout/shards.py``; the result is float32 of shape [parts,
    shard_numel]. Raises SnapshotUnreadableError, and what the check of ``access`` raises.
    """
    shard_group = plan.shard_group_of(access.slot)
    numel = 0 if shard_group is None else plan.after(shard_group).shard_numel
    payload = untouched_zeros(len(parts), numel)
    target = bytes_of(payload)
    fetched_bytes = 0
    for source, pieces in plan.pieces(access.slot):
        with _open(source, plan, access) as reader:
            before = plan.before(source).shard_numel
            num_bytes = reader.read_ranges(_ranges(parts, pieces, before, numel, target))
            fetched_bytes += 0 if source.holder == access.slot else num_bytes
    return payload, fetched_bytes


@contextmanager
def _open(source: SealedShard, plan: RecoveryPlan, access: Access) -> Iterator[VerifiedReader]:
    if source.holder == access.slot and not source.is_copy and source.buffer not in NOTES:
        copy = access.pool.reader(source.buffer)

        def read_own(offset: int, into: memoryview) -> None:
            access.check()
            copy(offset, into)

        yield VerifiedReader(source, read_own)
        return
    try:
        with Fetcher(
            source.holder_address,
            secret=access.secret,
            timeout_s=access.timeout_s,
            stall_s=access.stall_s,
            relays=_relays(plan, access.slot),
            unheard=access.unheard,
            check=access.check,
        ) as fetcher:
            of = {"owner": source.owner, "step": source.step, "epoch": source.epoch}
            notes = source.buffer in NOTES

            def ask(offset: int, length: int) -> None:
                fetcher.ask(
                    **of, notes=notes, offset=offset, length=length, timeout_s=access.timeout_s
                )

            def read(offset: int, into: memoryview) -> None:
                fetcher.fetch(
                    **of, notes=notes, offset=offset, into=into, timeout_s=access.timeout_s
                )

            yield VerifiedReader(source, read, ask=ask)
    except LinkError as error:
        raise SnapshotUnreadableError(f"{source} cannot be read: {error}", source) from error


def _relays(plan: RecoveryPlan, slot: int) -> list[str]:
    """Agents of other nodes, by which to go where one is not heard from here."""
    holders = [one for shards in plan.sources for one in shards]
    own = {_host(one.holder_address) for one in holders if one.holder == slot}
    return sorted({one.holder_address for one in holders if _host(one.holder_address) not in own})


def _host(address: str) -> str:
    return address.rpartition(":")[0]


def _ranges(
    parts: Sequence[str],
    pieces: tuple[ShardPiece, ...],
    before: int,
    after: int,
    target: memoryview,
) -> list[tuple[int, memoryview]]:
    """(byte offset in the source's payload, view of the new payload) of every part of a piece.

    ``before``, ``after``: elements of one part of the old and of the new shard.
    """
    ranges = []
    for order, part in enumerate(parts):
        for source, target_offset, count in _joined(pieces):
            start = (order * after + target_offset) * ELEMENT_BYTES
            stop = start + count * ELEMENT_BYTES
            offset = (PARTS.index(part) * before + source) * ELEMENT_BYTES
            ranges.append((offset, target[start:stop]))
    return ranges


def _joined(pieces: Sequence[ShardPiece]) -> list[tuple[int, int, int]]:
    """(source, target, elements); buckets that stay beside each other are read as one."""
    spans: list[tuple[int, int, int]] = []
    for piece in pieces:
        source, target, count = piece.source_offset, piece.target_offset, piece.stop - piece.start
        if spans:
            before, place, length = spans[-1]
            if (before + length, place + length) == (source, target):
                spans[-1] = before, place, length + count
                continue
        spans.append((source, target, count))
    return spans


_CHECK_EVERY_S = 0.02


class Followed(NamedTuple):
    """The seconds until the moments arrived, the seconds of waiting for them, the bytes fetched."""

    seconds: float = 0.0
    late_s: float = 0.0
    fetched_bytes: int = 0


class DeferredMoments:
    """The moments of one worker's new shard, on their way in a thread."""

    def __init__(
        self,
        plan: RecoveryPlan,
        access: Access,
        *,
        write: Callable[[torch.Tensor], None],
    ) -> None:
        """``write`` installs them, shape [2, shard_numel]."""
        self._check = access.check
        self._write = write
        self._timeout_s = access.timeout_s
        self._dropped = threading.Event()
        started_s = time.monotonic()

        def still_wanted() -> None:
            if self._dropped.is_set():
                raise EpochChanged(plan.epoch, "what was on its way is wanted no more")
            access.check()

        def read() -> tuple[torch.Tensor, int, float]:
            moments, fetched_bytes = read_parts(plan, MOMENTS, replace(access, check=still_wanted))
            return moments, fetched_bytes, time.monotonic() - started_s

        thread = ThreadPoolExecutor(1, thread_name_prefix="elaswave-state")
        self._arrival = thread.submit(read)
        thread.shutdown(wait=False)

    @property
    def is_on_its_way(self) -> bool:
        """True if some of them are still to come."""
        return not self._arrival.done()

    def complete(self) -> Followed:
        """Wait for the moments and install them; raises SnapshotUnreadableError, EpochChanged."""
        asked_s = time.monotonic()
        while not self._arrival.done():
            self._check()
            wait([self._arrival], timeout=_CHECK_EVERY_S)
        moments, fetched_bytes, seconds = self._arrival.result()
        late_s = time.monotonic() - asked_s
        self._write(moments)
        return Followed(seconds=seconds, late_s=late_s, fetched_bytes=fetched_bytes)

    def drop(self) -> None:
        """They are wanted no more; returns when nothing is read any longer.

        What reads asks before every few megabytes whether it is still wanted. Raises LinkError
        where it goes on reading all the same.
        """
        self._dropped.set()
        if not wait([self._arrival], timeout=self._timeout_s).done:
            raise LinkError(
                f"the optimizer state of an earlier view is still being read {self._timeout_s:g} s"
                " after it was given up"
            )
