"""The place where a job of one name is known: a folder that all its nodes see, or their names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from elaswave_plugin.agent.peers.job_file import FolderLease
from elaswave_plugin.agent.peers.names import NamedLease
from elaswave_plugin.core.codec import from_json
from elaswave_plugin.ipc.secret import Secret
from elaswave_plugin.ipc.wire import Frame


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlace:
    """One of both: the job's `folder`; or `names`, of which `wanted` have to be part of the job."""

    folder: str = ""
    names: tuple[str, ...] = ()
    wanted: int = 0

    @classmethod
    def of_record(cls, record: Frame) -> JobPlace:
        """Read it as an agent tells it; raises ValueError."""
        place: JobPlace = from_json(cls, record)
        return place

    def lease(self, secret: Secret) -> Lease:
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
