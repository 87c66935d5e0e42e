"""Memory that the processes of a node share: one makes it, the others find it (standard library).

It is an anonymous file, so that nothing of it stays once the last process is gone. Another process
of the same user opens it by /proc; on another node, or in another container, there is none.
"""

from __future__ import annotations

import mmap
import os
import secrets
from typing import NamedTuple


class Place(NamedTuple):
    """The process that has the memory, its descriptor there, and the name of the file."""

    pid: int
    fd: int
    name: str


class SharedMemory:
    """Shared memory of a fixed size; ``data`` is all of it."""

    def __init__(self, fd: int, name: str) -> None:
        """Take over an open descriptor."""
        self._fd = fd
        self.place = Place(os.getpid(), fd, name)
        self.data = mmap.mmap(fd, os.fstat(fd).st_size)

    @classmethod
    def make(cls, what: str, num_bytes: int) -> SharedMemory:
        """Make one of ``num_bytes``, which are taken as they are written."""
        name = f"elaswave-{what}-{secrets.token_hex(8)}"
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
        os.ftruncate(fd, num_bytes)
        return cls(fd, name)

    @classmethod
    def find(cls, place: Place) -> SharedMemory | None:
        """Open the memory of another process; None if it cannot be reached from here."""
        path, wanted = f"/proc/{place.pid}/fd/{place.fd}", f"/memfd:{place.name} (deleted)"
        try:
            # On another node the same numbers mean something else, which is not to be opened.
            if os.readlink(path) != wanted:
                return None
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None
        if os.readlink(f"/proc/self/fd/{fd}") != wanted:
            os.close(fd)
            return None
        return cls(fd, place.name)

    def close(self) -> None:
        """Leave it to the others; what looks at ``data`` has to be gone."""
        self.data.close()
        os.close(self._fd)
