"""The memories of a worker's notes: sealed, copied and fetched as its snapshots are."""

import mmap
import os
from collections.abc import Sequence

from elaswave_plugin.core.layout.sealed_shard import SealedShard
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.ipc.snapshot_record import BODY_OFFSET, NOTES, clear_record, write_record
from elaswave_plugin.snapshot.snapshot_pool import capacity_of, write_body


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
