"""The snapshot memory of one supervisor: its trainer's two buffers, and what it holds for others.

What a memory holds is written in the memory (`ipc/snapshot_record.py`): sealing needs no message.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

from elaswave_plugin.core.layout.sealed_shard import SealedShard
from elaswave_plugin.ipc.snapshot_record import pack_record, read_record


class SnapshotStore:
    """The anonymous memory of sealed snapshots; safe to use from several threads."""

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.fds = (_new_memory(f"elaswave-{slot}-0"), _new_memory(f"elaswave-{slot}-1"))
        self._lock = threading.Lock()
        self._held: dict[int, tuple[int, ...]] = {}
        self._copies: dict[tuple[int, int], int] = {}

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

    def make_room(self, record: SealedShard) -> bool:
        """Drop the copy in whose place a newer one is about to come; false where it is none.

        Its owner may have been given up, and another worker have sealed in its slot since.
        """
        with self._lock:
            known = [one for _, one, copy in self._sealed() if copy and one.owner == record.owner]
            if any(one.epoch > record.epoch for one in known):
                return False
            fd = self._copies.pop((record.owner, record.buffer), None)
            if fd is not None:
                os.close(fd)
        return True

    def add_copy(self, record: SealedShard, fd: int) -> None:
        """Take over the memory `fd`, whose body holds all of the record's bytes, and seal it.

        A record that is older than the one here comes from a connection that was given up.
        """
        os.pwrite(fd, pack_record(record), 0)
        key = record.owner, record.buffer
        with self._lock:
            old = self._copies.get(key)
            there = None if old is None else read_record(old)
            if there is not None and record.age < there.age:
                os.close(fd)
                return
            self._copies[key] = fd
            if old is not None:
                os.close(old)

    def release(self, epoch: int) -> None:
        """Let go of what was sealed before `epoch` by others: it will not be asked for any more."""
        with self._lock:
            for owner, fds in list(self._held.items()):
                if all(_is_older(fd, epoch) for fd in fds):
                    del self._held[owner]
                    for fd in fds:
                        os.close(fd)
            for key, fd in list(self._copies.items()):
                if _is_older(fd, epoch):
                    del self._copies[key]
                    os.close(fd)

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
            for fd in [*self.fds, *held, *self._copies.values()]:
                os.close(fd)
            self._held.clear()
            self._copies.clear()

    def _sealed(self) -> Iterator[tuple[int, SealedShard, bool]]:
        """(descriptor, record, whether it is another worker's) of every sealed memory."""
        memories = [(fd, False) for fd in self.fds]
        memories += [(fd, True) for _, fds in sorted(self._held.items()) for fd in fds]
        memories += [(fd, True) for _, fd in sorted(self._copies.items())]
        for fd, other in memories:
            record = read_record(fd)
            if record is not None:
                yield fd, record, other


def _is_older(fd: int, epoch: int) -> bool:
    record = read_record(fd)
    return record is None or record.epoch < epoch


def _new_memory(name: str) -> int:
    return os.memfd_create(name, os.MFD_CLOEXEC)
