"""Two sealed snapshots of a worker's shard in shared memory, and verified reads of any worker's.

A buffer holds: its record (`ipc/snapshot_record.py`) | payload (the shard's flat state) | step
capsule | table of 64-bit xxh3 checksums, one for each chunk of payload and capsule. The record
names the length and the digest of the table, so that a reader of any range checks exactly the
chunks that it used, wherever the bytes came from.
"""

import mmap
import os
import resource
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
import xxhash

from elaswave_plugin.core.layout.worker_facts import SealedShard
from elaswave_plugin.errors import ConfigurationError, SnapshotUnreadableError
from elaswave_plugin.ipc.snapshot_record import BODY_OFFSET, NOTES, clear_record, write_record
from elaswave_plugin.snapshot.host_copies import Copy, HostCopies, PinnedBlocks

# Small enough that a range read checks little more than it needs, large enough that the table is
# 0.003 % of the payload and hashing runs at memory speed.
CHUNK_BYTES = 256 * 1024
_ENTRY = struct.Struct("<Q")
# Read at once: a reader behind a training step shares the interpreter with it.
_RUN_BYTES = 32 * CHUNK_BYTES
# What a GPU copies comes faster than one processor hashes.
_HASHERS = 4


def num_chunks(length: int) -> int:
    """Chunks in ``length`` bytes."""
    return -(-length // CHUNK_BYTES)


def capacity_of(body_bytes: int) -> int:
    """Bytes of a buffer for a record, a body and its table, in whole pages."""
    return _pages(BODY_OFFSET + body_bytes + _ENTRY.size * num_chunks(body_bytes))


def taken_of(body_bytes: int) -> int:
    """Bytes of memory that such a buffer takes: most of the room of its record is never touched."""
    return capacity_of(body_bytes) - BODY_OFFSET + mmap.PAGESIZE


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


class _Table:
    """The checksums of a body that is being written from its begin on."""

    def __init__(self, body: memoryview, hashers: ThreadPoolExecutor | None) -> None:
        """``hashers``: threads that hash; without them it is done while caches hold the bytes."""
        self._body, self._hashers = body, hashers
        self._done = 0
        self._entries = bytearray()
        self._later: list[Future[bytes]] = []

    def written(self, stop: int, *, last: bool = False) -> None:
        """The body is written up to ``stop``: hash its whole chunks."""
        end = stop if last else stop // CHUNK_BYTES * CHUNK_BYTES
        run, self._done = self._body[self._done : end], max(self._done, end)
        if self._hashers is None:
            self._entries += _checksums(run)
        elif run:
            self._later.append(self._hashers.submit(_checksums, run))

    def close(self, stop: int) -> bytes:
        """Return the table of the body, which ends at ``stop``."""
        self.written(stop, last=True)
        return bytes(self._entries) + b"".join(run.result() for run in self._later)


def _checksums(run: memoryview) -> bytes:
    """The entries of whole chunks, the last of which may be short."""
    starts = range(0, len(run), CHUNK_BYTES)
    chunks = (run[start : start + CHUNK_BYTES] for start in starts)
    return b"".join(_ENTRY.pack(xxhash.xxh3_64_intdigest(chunk)) for chunk in chunks)


class SnapshotPool:
    """The two buffers of one worker: a seal goes to the one that the last one is not in."""

    def __init__(
        self,
        fds: Sequence[int],
        *,
        slot: int,
        capacity_bytes: int,
        needed_bytes: int,
        available_bytes: int,
        body_bytes: int = 0,
    ) -> None:
        """Map ``fds`` (anonymous shared memory made by the agent) at ``capacity_bytes`` each.

        Memory for ``body_bytes`` of each is taken here, more of it as it is used. ``needed_bytes``
        is what all snapshots of this node will use; raises ConfigurationError when
        ``available_bytes`` are fewer, or the system gives no memory. A replacement finds the
        buffers of its predecessor, which have their memory.
        """
        is_there = all(os.fstat(fd).st_size == capacity_bytes for fd in fds)
        if needed_bytes > available_bytes and not is_there:
            raise ConfigurationError(
                f"the snapshots of this node need {needed_bytes} bytes of host memory, the loss of"
                f" one worker included, and {available_bytes} are available; free memory, use fewer"
                " workers a node or fewer copies (--elaswave-snapshot-copies), or turn snapshots"
                " off with --elaswave-snapshots off"
            )
        self._slot = slot
        # The buffer of the last seal, which a recovery may read.
        self._last = 1
        self._copies = HostCopies()
        self._hashers = ThreadPoolExecutor(_HASHERS, thread_name_prefix="elaswave-hash")
        self._maps: list[mmap.mmap] = []
        self._pins: list[PinnedBlocks] = []
        self._ends = [capacity_bytes, capacity_bytes]
        try:
            for fd in fds:
                os.ftruncate(fd, capacity_bytes)
                if body_bytes and not is_there:
                    os.posix_fallocate(fd, BODY_OFFSET, taken_of(body_bytes) - mmap.PAGESIZE)
                self._maps.append(mmap.mmap(fd, capacity_bytes))
                self._pins.append(PinnedBlocks(memoryview(self._maps[-1])[BODY_OFFSET:]))
        except OSError as error:
            raise ConfigurationError(
                f"worker {slot} wants {len(fds)} buffers of {capacity_bytes} bytes of shared memory"
                f" for its snapshots, {taken_of(body_bytes)} of each at once, and may have"
                f" {_allowed_bytes(available_bytes)} ({error.strerror}): raise `ulimit -f` or"
                " `ulimit -v`, free memory, or turn snapshots off with --elaswave-snapshots off"
            ) from error

    def begin_seal(
        self,
        *,
        step: int,
        epoch: int,
        ranks: Sequence[int],
        shard_group: tuple[int, int] = (0, 0),
        units: Sequence[int] = (),
        parts: Sequence[torch.Tensor],
        capsule: bytes,
        before_seal: Callable[[], None],
        settled: Callable[[], None] = lambda: None,
    ) -> Callable[[], SealedShard]:
        """Return what seals the flat ``parts`` and the capsule, in any thread, before parts change.

        It returns the record, and raises ConfigurationError for a capsule without room.
        ``ranks``: slots of the workers that share the state of ``shard_group``, in shard order;
        ``units``: the parts of the model that it consists of; ``before_seal`` runs when the
        bytes are in place and not yet final, ``settled`` as in `HostCopies.of`.
        """
        copy = self._copies.of(parts, settled=settled)
        on_host = all(part.device.type == "cpu" for part in parts)
        needed_bytes = sum(4 * part.numel() for part in parts)
        buffer = self._last = 1 - self._last

        def seal() -> SealedShard:
            whole = memoryview(self._maps[buffer])
            clear_record(whole)
            body, hashers = whole[BODY_OFFSET:], None
            if not on_host:
                self._pins[buffer].pin(needed_bytes)
                hashers = self._hashers
            payload_bytes, length, digest = write_body(body, copy, capsule, hashers)
            before_seal()
            sealed = SealedShard(
                owner=self._slot,
                buffer=buffer,
                step=step,
                epoch=epoch,
                shard_group=shard_group,
                units=tuple(units),
                ranks=tuple(ranks),
                shard=ranks.index(self._slot),
                length=length,
                payload_bytes=payload_bytes,
                capsule_bytes=len(capsule),
                table_digest=digest,
            )
            write_record(whole, sealed)
            self._free_behind(buffer, BODY_OFFSET + length)
            return sealed

        return seal

    def _free_behind(self, buffer: int, used_bytes: int) -> None:
        """Give back what a larger shard of an earlier view has used of a buffer."""
        end, former = _pages(used_bytes), self._ends[buffer]
        if end < former:
            self._pins[buffer].free(end - BODY_OFFSET)
            self._maps[buffer].madvise(mmap.MADV_REMOVE, end, former - end)
        self._ends[buffer] = end

    def go_back(self, buffer: int) -> None:
        """Keep what is sealed in ``buffer``: what was sealed after it is void.

        Alike on all workers, newcomers included, so that they write to the same buffer next.
        """
        self._last = buffer

    def close(self) -> None:
        """Have no memory pinned any more; the end of the process does the same."""
        for pins in self._pins:
            pins.free(0)

    def reader(self, buffer: int) -> Callable[[int, memoryview], None]:
        """A function that copies bytes at an offset of a buffer's body into a view."""
        source = memoryview(self._maps[buffer])[BODY_OFFSET:]

        def read(offset: int, into: memoryview) -> None:
            into[:] = source[offset : offset + len(into)]

        return read


def _allowed_bytes(available_bytes: int) -> int:
    """The least of what is available and the limits of this process."""
    limits = [resource.getrlimit(one)[0] for one in (resource.RLIMIT_FSIZE, resource.RLIMIT_AS)]
    return min(available_bytes, *(one for one in limits if one != resource.RLIM_INFINITY))


def write_body(
    target: memoryview, copy: Copy, capsule: bytes, hashers: ThreadPoolExecutor | None
) -> tuple[int, int, int]:
    """Write payload, capsule and table; returns the payload's bytes, all bytes, the table's digest.

    Raises ConfigurationError where they do not fit.
    """
    floats, checksums = np.frombuffer(target, dtype=np.float32), _Table(target, hashers)
    offset = 0
    for offset in copy(floats):
        checksums.written(4 * offset)
    payload_bytes = 4 * offset
    body_bytes = payload_bytes + len(capsule)
    length = body_bytes + _ENTRY.size * num_chunks(body_bytes)
    if length > len(target):
        raise ConfigurationError(
            f"what a snapshot holds beside {payload_bytes} bytes of weights and moments (random"
            f" states, schedule, position in the data) is {len(capsule)} bytes, which do not"
            f" fit into its {len(target)}: keep large objects out of the scheduler's state"
        )
    target[payload_bytes:body_bytes] = capsule
    table = checksums.close(body_bytes)
    target[body_bytes:length] = table
    return payload_bytes, length, xxhash.xxh3_64_intdigest(table)


class VerifiedReader:
    """Ranges of one sealed shard, read through ``read(offset, into)`` and checked by chunk."""

    def __init__(
        self,
        sealed: SealedShard,
        read: Callable[[int, memoryview], None],
        *,
        ask: Callable[[int, int], None] = lambda offset, length: None,
    ) -> None:
        """Read and check the table; raises SnapshotUnreadableError.

        ``ask(offset, length)`` is told what is read after the next reading, while that comes.
        """
        self._sealed = sealed
        self._read, self._ask = read, ask
        self._body_bytes = sealed.payload_bytes + sealed.capsule_bytes
        self._table = bytearray(_ENTRY.size * num_chunks(self._body_bytes))
        read(self._body_bytes, memoryview(self._table))
        if xxhash.xxh3_64_intdigest(self._table) != sealed.table_digest:
            raise self._unreadable("the checksum table")

    def _unreadable(self, what: str) -> SnapshotUnreadableError:
        words = f"{what} of {self._sealed} does not match its checksum"
        return SnapshotUnreadableError(words, self._sealed)

    def read_ranges(self, ranges: Sequence[tuple[int, memoryview]]) -> int:
        """Fill each view from its byte offset and return the bytes read.

        Whole chunks are read to where they belong, and checked there; only what begins or ends
        inside of a chunk is copied once more. Raises SnapshotUnreadableError.
        """
        wholes: list[tuple[int, memoryview]] = []
        partial: list[tuple[int, memoryview]] = []
        for start, into in ranges:
            stop = start + len(into)
            first = min(num_chunks(start) * CHUNK_BYTES, stop)
            last = stop if stop == self._body_bytes else stop // CHUNK_BYTES * CHUNK_BYTES
            last = max(first, last)
            for begin in range(first, last, _RUN_BYTES):
                end = min(begin + _RUN_BYTES, last)
                wholes.append((begin, into[begin - start : end - start]))
            partial += [(start, into[: first - start]), (last, into[last - start :])]
        cut = [
            (begin, memoryview(bytearray(min(end, self._body_bytes) - begin)))
            for begin, end in _chunk_runs([(start, len(into)) for start, into in partial])
        ]
        total = self._read_runs([*wholes, *cut])
        for begin, run in cut:
            for start, into in partial:
                if begin <= start and start + len(into) <= begin + len(run):
                    into[:] = run[start - begin : start - begin + len(into)]
        return total

    def _read_runs(self, runs: Sequence[tuple[int, memoryview]]) -> int:
        """Read runs of whole chunks, each asked for before the one in front of it is read."""
        total = 0
        for number, (begin, into) in enumerate(runs):
            if number == 0:
                self._ask(begin, len(into))
            for later, view in runs[number + 1 : number + 2]:
                self._ask(later, len(view))
            total += self._read_chunks(begin, into)
        return total

    def _read_chunks(self, begin: int, into: memoryview) -> int:
        """Read whole chunks from ``begin`` on and check each; returns their bytes."""
        self._read(begin, into)
        for start in range(0, len(into), CHUNK_BYTES):
            chunk = (begin + start) // CHUNK_BYTES
            (wanted,) = _ENTRY.unpack_from(self._table, chunk * _ENTRY.size)
            if xxhash.xxh3_64_intdigest(into[start : start + CHUNK_BYTES]) != wanted:
                raise self._unreadable(f"chunk {chunk}")
        return len(into)

    def read_capsule(self) -> bytes:
        """The step capsule."""
        capsule = bytearray(self._sealed.capsule_bytes)
        self.read_ranges([(self._sealed.payload_bytes, memoryview(capsule))])
        return bytes(capsule)


def _chunk_runs(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Contiguous runs [begin, end) of whole chunks that cover the (start, length) ranges."""
    runs: list[tuple[int, int]] = []
    for start, length in sorted(ranges):
        if not length:
            continue
        begin = start // CHUNK_BYTES * CHUNK_BYTES
        end = num_chunks(start + length) * CHUNK_BYTES
        if runs and begin <= runs[-1][1]:
            runs[-1] = (runs[-1][0], max(end, runs[-1][1]))
        else:
            runs.append((begin, end))
    return runs


class NotesMemory:
    """The memories of one worker, used in turn: what it left last is whole at any time."""

    def __init__(self, fds: Sequence[int], *, slot: int) -> None:
        self._fds, self._slot = dict(zip(NOTES, fds, strict=True)), slot
        self._last = NOTES[-1]

    @property
    def _next(self) -> int:
        return next(one for one in NOTES if one != self._last)

    def has_room_for(self, notes: bytes, *, available_bytes: int) -> bool:
        """Return whether the next memory has the size of these notes, or may be given it."""
        lacking = capacity_of(len(notes)) - os.fstat(self._fds[self._next]).st_size
        return lacking <= max(0, available_bytes)

    def seal(
        self, notes: bytes, *, step: int, epoch: int, shard_group: tuple[int, int]
    ) -> SealedShard:
        """Seal notes as the capsule of a shard without elements; raises ConfigurationError."""
        size, buffer = capacity_of(len(notes)), self._next
        try:
            os.ftruncate(self._fds[buffer], size)
            os.posix_fallocate(self._fds[buffer], 0, size)
            whole = memoryview(mmap.mmap(self._fds[buffer], size))
        except OSError as error:
            raise ConfigurationError(
                f"worker {self._slot} wants {size} bytes of shared memory for what it alone knows"
                f" of the script's loop, before others enter ({error.strerror}): free memory, or"
                " keep less by elaswave_plugin.keep"
            ) from error
        clear_record(whole)
        _, length, digest = write_body(whole[BODY_OFFSET:], lambda floats: iter(()), notes, None)
        sealed = SealedShard(
            owner=self._slot,
            buffer=buffer,
            step=step,
            epoch=epoch,
            shard_group=shard_group,
            units=(),
            ranks=(self._slot,),
            shard=0,
            length=length,
            payload_bytes=0,
            capsule_bytes=len(notes),
            table_digest=digest,
        )
        write_record(whole, sealed)
        self._last = buffer
        return sealed

    def free(self) -> None:
        """Give the memory back: those that have entered know the loop themselves."""
        for fd in self._fds.values():
            os.ftruncate(fd, 0)
