"""The place where a job of one name is known: a folder that all its nodes see, or their names."""

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from elaswave_plugin.agent.peers.names import NamedLease
from elaswave_plugin.core.agreement.founding import JobRecord, ended, renewed
from elaswave_plugin.core.codec import UnreadableMessageError, from_json, to_json
from elaswave_plugin.ipc.progress_page import lease_clock_s
from elaswave_plugin.ipc.secret import Secret
from elaswave_plugin.ipc.wire import Frame

LOCKED_WITHIN_S = 4.0
_AGAIN_S = 0.02


class HeldRecord:
    """The record while it is locked; None is written where nothing changes.

    The folder's file system has to carry the locks of fcntl(2) between its machines, as NFS, Lustre
    and GPFS do where they are not switched off. A process that dies lets go of its lock.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "job.json"
        self._draft = folder / f".job.json.{os.uname().nodename}.{os.getpid()}"
        self._since_s = lease_clock_s()
        self.record = self._read()

    def _read(self) -> JobRecord:
        try:
            text = self._path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return JobRecord()
        try:
            record: JobRecord = from_json(JobRecord, json.loads(text))
        except (UnreadableMessageError, ValueError) as error:
            raise OSError(f"{str(self._path)!r} is no record of a job ({error})") from error
        return record

    def write(self, record: JobRecord | None) -> None:
        """Replace the record, whole; raises OSError."""
        if record is None or record == self.record:
            return
        try:
            with open(self._draft, "w", encoding="utf-8") as file:
                json.dump(record, file, default=to_json)
                file.flush()
                os.fsync(file.fileno())
            if lease_clock_s() - self._since_s > LOCKED_WITHIN_S:
                # A server that hears nothing of this machine for long gives the lock to others.
                raise TimeoutError(f"the lock in {str(self._path.parent)!r} was held for too long")
            self._draft.rename(self._path)
        finally:
            self._draft.unlink(missing_ok=True)  # there is one left on a full disk
        self.record = record


@contextlib.contextmanager
def held(folder: Path) -> Iterator[HeldRecord]:
    """Hold the record of the job in a folder, which is there; raises OSError.

    TimeoutError where others hold it for too long: one of them may be stopped.
    """
    fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline_s = time.monotonic() + LOCKED_WITHIN_S
        while True:
            try:
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline_s:
                    raise TimeoutError(
                        f"{str(folder / 'lock')!r} has been locked by another process for"
                        f" {LOCKED_WITHIN_S:g} s"
                    ) from error
                time.sleep(_AGAIN_S)  # a lock that frees itself has no event
        yield HeldRecord(folder)
    finally:
        os.close(fd)


class FolderLease:
    """The lease of a job in its folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.where = f"in {str(folder)!r}"

    def renew(self, life: int, contacts: tuple[str, ...]) -> bool:
        """Renew it; False: another life has begun, or this one has ended. Raises OSError."""
        with held(self._folder) as record:
            new = renewed(record.record, life, contacts)
            record.write(new)
        return new is not None

    def end(self, life: int, exit_code: int) -> None:
        """End the job's life in the record; raises OSError."""
        with held(self._folder) as record:
            record.write(ended(record.record, life, exit_code))


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlace:
    """One of both: the job's `folder`; or `names`, of which `wanted` have to be part of the job."""

    folder: str = ""
    names: tuple[str, ...] = ()
    wanted: int = 0

    @classmethod
    def of_record(cls, record: Frame) -> "JobPlace":
        """Read it as an agent tells it; raises ValueError."""
        place: JobPlace = from_json(cls, record)
        return place

    def lease(self, secret: Secret) -> "Lease":
        """Return the lease of the job, which has this secret."""
        if self.names:
            return NamedLease(self.names, self.wanted, secret)
        return FolderLease(Path(self.folder))


class Lease(Protocol):
    """The lease of a job; `where`: for people."""

    where: str

    def renew(self, life: int, contacts: tuple[str, ...]) -> bool:
        """Renew it; False: another life has begun. Raises OSError where it cannot be renewed."""

    def end(self, life: int, exit_code: int) -> None:
        """Tell of the job's end; raises OSError."""
