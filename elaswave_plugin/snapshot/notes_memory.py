"""The memory of a worker's notes: sealed, copied and fetched as its snapshots are."""

import mmap
import os

from elaswave_plugin.core.layout.sealed_shard import SealedShard
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.ipc.snapshot_record import BODY_OFFSET, NOTES, clear_record, write_record
from elaswave_plugin.snapshot.snapshot_pool import capacity_of, write_body


class NotesMemory:
    """The memory of one worker; what it left before is overwritten."""

    def __init__(self, fd: int, *, slot: int) -> None:
        self._fd, self._slot = fd, slot

    def seal(
        self, notes: bytes, *, step: int, epoch: int, shard_group: tuple[int, int]
    ) -> SealedShard:
        """Seal notes as the capsule of a shard without elements; raises ConfigurationError."""
        size = capacity_of(len(notes))
        try:
            os.ftruncate(self._fd, size)
            os.posix_fallocate(self._fd, 0, size)
            whole = memoryview(mmap.mmap(self._fd, size))
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
            buffer=NOTES,
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
        return sealed

    def free(self) -> None:
        """Give the memory back: those that have entered know the loop themselves."""
        os.ftruncate(self._fd, 0)
