"""The snapshot memory of one supervisor: its trainer's two buffers, and what it holds for others.

What a worker of this node has sealed is written in its memory (`ipc/snapshot_record.py`), so a
seal needs no message; copies of others are in `held_copies.py`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from elaswave_plugin.core.layout.sealed_shard import SealedShard
from elaswave_plugin.ipc.snapshot_record import read_record
from elaswave_plugin.supervisor.held_copies import HeldCopies


class SnapshotStore:
    """The anonymous memory of sealed snapshots; safe to use from several threads."""

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.fds = (_new_memory(f"elaswave-{slot}-0"), _new_memory(f"elaswave-{slot}-1"))
        self._lock = threading.Condition()
        self._held: dict[int, tuple[int, ...]] = {}
        self._copies = HeldCopies(self._lock)

    def newest_step(self) -> int:
        """The step of the newest own snapshot; -1 where nothing was sealed yet."""
        records = [record for fd in self.fds if (record := read_record(fd)) is not None]
        return max(record.age for record in records)[1] if records else -1

    def is_sealed(self, record: SealedShard) -> bool:
        """Return whether the own buffer still holds this."""
        return read_record(self.fds[record.buffer]) == record

    def hold(self, owner: int, fds: Sequence[int]) -> None:
        """Take over descriptors of the buffers of another worker of this node.

        They keep its memory alive whatever becomes of that worker and its supervisor.
        """
        with self._lock:
            for fd in self._held.pop(owner, ()):
                os.close(fd)
            self._held[owner] = tuple(fds)

    def begin_copy(self, record: SealedShard, stop: Callable[[], None]) -> memoryview:
        """Return the bytes to be filled with a copy, as `HeldCopies.begin` does.

        Raises ConnectionAbortedError also where its owner may have been given up: another worker
        has sealed in its slot since.
        """
        with self._lock:
            if any(
                copy and one.owner == record.owner and one.epoch > record.epoch
                for _, one, copy in self._sealed()
            ):
                raise ConnectionAbortedError(f"worker {record.owner} sealed in a newer view")
            return self._copies.begin(record, stop)

    def end_copy(self, record: SealedShard, *, whole: bool) -> None:
        """A copy that has begun is whole, or is given up."""
        self._copies.end(record, whole=whole)

    def release(self, epoch: int) -> None:
        """Let go of what was sealed before `epoch` by others: it will not be asked for any more."""
        with self._lock:
            for owner, fds in list(self._held.items()):
                if all(_is_older(fd, epoch) for fd in fds):
                    del self._held[owner]
                    for fd in fds:
                        os.close(fd)
            self._copies.release(epoch)

    def inventory(self, address: str) -> list[SealedShard]:
        """Every sealed record here, with its holder and where to fetch it."""
        with self._lock:
            return [
                replace(one, holder=self.slot, holder_address=address, is_copy=copy)
                for _, one, copy in self._sealed()
            ]

    def open(self, *, owner: int, step: int, epoch: int) -> tuple[int, int] | None:
        """A descriptor of the memory (the caller closes it) and the length of its body in bytes.

        None where it is not here.
        """
        with self._lock:
            for fd, record, _ in self._sealed():
                if (record.owner, record.step, record.epoch) == (owner, step, epoch):
                    return os.dup(fd), record.length
        return None

    def close(self) -> None:
        """Give all memory back."""
        with self._lock:
            held = [fd for fds in self._held.values() for fd in fds]
            for fd in [*self.fds, *held]:
                os.close(fd)
            self._held.clear()
            self._copies.close()

    def _sealed(self) -> Iterator[tuple[int, SealedShard, bool]]:
        """(descriptor, record, whether it is another worker's) of every sealed memory."""
        memories = [(fd, False) for fd in self.fds]
        memories += [(fd, True) for _, fds in sorted(self._held.items()) for fd in fds]
        for fd, other in memories:
            record = read_record(fd)
            if record is not None:
                yield fd, record, other
        for fd, record in self._copies.whole():
            yield fd, record, True


def _is_older(fd: int, epoch: int) -> bool:
    record = read_record(fd)
    return record is None or record.epoch < epoch


def _new_memory(name: str) -> int:
    return os.memfd_create(name, os.MFD_CLOEXEC)
