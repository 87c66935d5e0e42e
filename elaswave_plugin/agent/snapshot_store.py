"""The snapshot memory of a node: the memories of each of its slots, and copies for other nodes.

What a worker of this node has sealed is written in its memory (`ipc/snapshot_record.py`), so a
seal needs no message; copies of others are in `held_copies.py`. All of it is the guardian's, so
that it outlives every trainer and agent of the node.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

from elaswave_plugin.agent.held_copies import HeldCopies, Memory
from elaswave_plugin.core.layout.sealed_shard import SealedShard
from elaswave_plugin.ipc.snapshot_record import MEMORIES, NOTES, read_record


def buffer_name(slot: int, buffer: int) -> str:
    """The name by which the guardian knows a buffer."""
    return f"elaswave slot {slot} buffer {buffer}"


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
