"""The snapshot memory of a node: the memories of each of its slots, and copies for other nodes.

What a worker of this node has sealed is written in its memory (`ipc/snapshot_record.py`), so a
seal needs no message; copies of others have two buffers each, used in turn. All of it is the
guardian's, so that it outlives every trainer and agent of the node.

The rule: no buffer is written to that a recovery may read. A copy goes into the buffer that its
owner has sealed it in, and an owner seals a step only after a collective has shown that the step
before is held wherever it has to be: that one is whole, in the other buffer, and a loss finds it.
What is being written to, or was left half written, is offered to nobody.
"""

import contextlib
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Protocol

from elaswave_plugin.core.layout.worker_facts import SealedShard
from elaswave_plugin.ipc.snapshot_record import (
    BODY_OFFSET,
    MEMORIES,
    NOTES,
    clear_record,
    read_record,
    write_record,
)

# Of a connection that was shut down, until the thread that reads it has seen that.
_LEAVE_S = 30.0


_PREFIX = "elaswave copy of worker "


class Memory(Protocol):
    """Memory by name, which outlives this process."""

    def memory(self, name: str) -> int:
        """Return a descriptor of it; it is made where it is new."""

    def drop(self, name: str) -> None:
        """Let go of it."""

    def names(self) -> Iterable[str]:
        """List what there is."""


class _Buffer:
    """One memory: `record` of what came last, all of which is here if `is_whole`.

    `stop`: ends the connection by which it is being filled; None where none is.
    """

    def __init__(self, name: str, fd: int, record: SealedShard) -> None:
        self.name = name
        self.fd = fd
        self.record = record
        self.is_whole = False
        self.stop: Callable[[], None] | None = None
        self._memory: mmap.mmap | None = None

    def fit(self, length: int) -> memoryview:
        """Return a body of that length, in the memory that is here where its size is the same."""
        size = -(-(BODY_OFFSET + length) // mmap.PAGESIZE) * mmap.PAGESIZE
        if self._memory is None or len(self._memory) != size:
            os.ftruncate(self.fd, size)
            # The former one is not closed by hand: what has read into it may still refer to it.
            self._memory = mmap.mmap(self.fd, size)
        clear_record(memoryview(self._memory))
        return memoryview(self._memory)[BODY_OFFSET : BODY_OFFSET + length]

    def seal(self) -> None:
        """Write down that it is whole, for the agent's next life."""
        assert self._memory is not None
        write_record(memoryview(self._memory), self.record)

    def is_before(self, epoch: int) -> bool:
        """Return whether it is of an earlier view, and nobody fills it."""
        return self.stop is None and self.record.epoch < epoch

    def close(self) -> None:
        os.close(self.fd)
        self._memory = None


def buffer_name(slot: int, buffer: int) -> str:
    """The name by which the guardian knows a buffer."""
    return f"elaswave slot {slot} buffer {buffer}"


class HeldCopies:
    """The memory of copies, by owner and buffer; `changed`: the lock of all that a store has.

    What an agent's earlier life has held is there from the start.
    """

    def __init__(self, changed: threading.Condition, memory: Memory) -> None:
        self._changed = changed
        self._memory = memory
        self._buffers: dict[tuple[int, int], _Buffer] = {}
        for name in memory.names():
            if name.startswith(_PREFIX):
                self._take_back(name)

    def _take_back(self, name: str) -> None:
        fd = self._memory.memory(name)
        record = read_record(fd)
        if record is None:
            os.close(fd)
            self._memory.drop(name)
            return
        buffer = self._buffers[record.owner, record.buffer] = _Buffer(name, fd, record)
        buffer.is_whole = True

    def begin(self, record: SealedShard, holder: int, stop: Callable[[], None]) -> memoryview:
        """Return the bytes to be filled with the body of `record`; `end` has to follow.

        `stop()` ends the connection that they come by: it is called where the owner begins again by
        another one; `holder`: the slot for which it is held. Raises ConnectionAbortedError where a
        newer copy is here, and OSError.
        """
        record = replace(record, holder=holder)
        if record.buffer not in range(MEMORIES):
            raise ValueError(f"buffer {record.buffer}, wanted less than {MEMORIES}")
        key = record.owner, record.buffer
        with self._changed:
            while (there := self._buffers.get(key)) is not None:
                if record.age < there.record.age:
                    raise ConnectionAbortedError(f"{record} is older than {there.record}")
                if there.stop is None:
                    break
                self._break_off(there, there.stop)
            self._drop_earlier_views(record)
            buffer = self._new(record) if there is None else there
            try:
                body = buffer.fit(record.length)
            except BaseException:
                if there is None:
                    self._free(buffer)
                raise
            buffer.record, buffer.is_whole, buffer.stop = record, False, stop
            self._buffers[key] = buffer
        return body

    def end(self, record: SealedShard, *, whole: bool) -> None:
        """All bytes are here, and were not overwritten at their owner meanwhile; or not."""
        with self._changed:
            buffer = self._buffers[record.owner, record.buffer]
            if whole:
                buffer.seal()
            buffer.is_whole, buffer.stop = whole, None
            self._changed.notify_all()

    def whole(self) -> Iterator[tuple[int, SealedShard, int]]:
        """(descriptor, record, holder) of each copy that may be read; under the lock."""
        for _, buffer in sorted(self._buffers.items()):
            if buffer.is_whole:
                yield buffer.fd, buffer.record, buffer.record.holder

    def _new(self, record: SealedShard) -> _Buffer:
        name = f"{_PREFIX}{record.owner} buffer {record.buffer}"
        return _Buffer(name, self._memory.memory(name), record)

    def _free(self, buffer: _Buffer) -> None:
        buffer.close()
        self._memory.drop(buffer.name)

    def release(self, epoch: int) -> None:
        """Offer nothing of an earlier view any more; under the lock.

        Owners of which there is nothing newer send their copies elsewhere: their memory is freed.
        The next copy of the others takes the place of what was released.
        """
        staying = {key[0] for key, one in self._buffers.items() if not one.is_before(epoch)}
        for key, buffer in list(self._buffers.items()):
            if buffer.is_before(epoch):
                buffer.is_whole = False
                if key[0] not in staying:
                    self._free(self._buffers.pop(key))

    def close(self) -> None:
        """Give all memory back; under the lock."""
        for buffer in self._buffers.values():
            buffer.close()
        self._buffers.clear()

    def _break_off(self, buffer: _Buffer, stop: Callable[[], None]) -> None:
        """End the connection that fills a buffer, and wait until it has let go."""
        # It may have ended by itself.
        with contextlib.suppress(OSError):
            stop()
        if not self._changed.wait_for(lambda: buffer.stop is not stop, _LEAVE_S):
            raise TimeoutError(f"the copy of {buffer.record} does not end")

    def _drop_earlier_views(self, record: SealedShard) -> None:
        """Free what this copy shows to be needed no more, so that not both take memory.

        In a new view all workers seal into the same buffer first, and the job was restored from the
        other one; they seal into that one when the first is held everywhere.
        """
        for key, buffer in list(self._buffers.items()):
            is_place = key[0] != record.owner and key[1] == record.buffer
            if is_place and buffer.is_before(record.epoch):
                self._free(self._buffers.pop(key))


class SnapshotStore:
    """The anonymous memory of sealed snapshots; safe to use from several threads."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._lock = threading.Condition()
        self._fds: dict[int, tuple[int, ...]] = {}
        self._copies = HeldCopies(self._lock, memory)

    def open_slot(self, slot: int) -> tuple[str, ...]:
        """Have the buffers of a slot of this node; returns their names."""
        names = tuple(buffer_name(slot, number) for number in range(MEMORIES))
        with self._lock:
            if slot not in self._fds:
                self._fds[slot] = tuple(map(self._memory.memory, names))
        return names

    def newest_step(self, slot: int) -> int:
        """The step of the newest snapshot of an own slot; -1 where nothing was sealed yet."""
        records = [one for fd in self._fds[slot] if (one := read_record(fd)) is not None]
        return max(record.age for record in records)[1] if records else -1

    def is_sealed(self, record: SealedShard) -> bool:
        """Return whether the buffer of an own slot still holds this."""
        return read_record(self._fds[record.owner][record.buffer]) == record

    def begin_copy(self, record: SealedShard, holder: int, stop: Callable[[], None]) -> memoryview:
        """Return the bytes to be filled with a copy, as `HeldCopies.begin` does.

        `holder`: the slot for which it is held. Raises ConnectionAbortedError also where its owner
        may have been given up: another worker has sealed in its slot since.
        """
        with self._lock:
            if any(
                one.owner == record.owner and one.epoch > record.epoch for _, one in self._sealed()
            ):
                raise ConnectionAbortedError(f"worker {record.owner} sealed in a newer view")
            return self._copies.begin(record, holder, stop)

    def end_copy(self, record: SealedShard, *, whole: bool) -> None:
        """A copy that has begun is whole, or is given up."""
        self._copies.end(record, whole=whole)

    def release(self, epoch: int) -> None:
        """Let go of what was sealed before `epoch` by others: it will not be asked for any more."""
        with self._lock:
            self._copies.release(epoch)

    def inventory(self, address: str) -> list[SealedShard]:
        """Every sealed record here, with its holder and where to fetch it."""
        with self._lock:
            return [replace(one, holder_address=address) for _, one in self._sealed()]

    def open(
        self, *, owner: int, step: int, epoch: int, notes: bool = False
    ) -> tuple[int, int] | None:
        """A descriptor of the memory (the caller closes it) and the length of its body in bytes.

        ``notes``: of its notes, not of its state. None where it is not here.
        """
        with self._lock:
            for fd, record in self._sealed():
                found = record.owner, record.step, record.epoch, record.buffer in NOTES
                if found == (owner, step, epoch, notes):
                    return os.dup(fd), record.length
        return None

    def close(self) -> None:
        """Let go of all memory."""
        with self._lock:
            for fd in [fd for fds in self._fds.values() for fd in fds]:
                os.close(fd)
            self._fds.clear()
            self._copies.close()

    def _sealed(self) -> Iterator[tuple[int, SealedShard]]:
        """(descriptor, record with its holder) of every sealed memory."""
        for slot, fds in sorted(self._fds.items()):
            for fd in fds:
                record = read_record(fd)
                if record is not None:
                    yield fd, replace(record, holder=slot)
        for fd, record, holder in self._copies.whole():
            yield fd, replace(record, holder=holder, is_copy=True)
