"""Memory that the processes of a node share: one makes it, the others ask for its descriptor.

It is an anonymous file, so that nothing of it stays once the last process is gone. Each process
that has it hands descriptors to others of its user, over an abstract Unix socket (SCM_RIGHTS): to
those that prove the key, which members tell each other. On another node there is no such socket.
Standard library only.
"""

import contextlib
import mmap
import os
import secrets
import socket
import stat
import threading
from typing import NamedTuple, Self

from elaswave_plugin.ipc.secret import WITHIN_S, Kind, Secret, admit, is_same_user, prove


class Place(NamedTuple):
    """The name of a socket on the process's node, and the key that it asks for."""

    name: str
    key: str


class SharedMemory:
    """Shared memory of a fixed size; ``data`` is all of it."""

    def __init__(self, fd: int) -> None:
        """Take over an open descriptor."""
        self._fd = fd
        self.data = mmap.mmap(fd, os.fstat(fd).st_size)
        self._secret = Secret.new()
        self.place = Place(f"elaswave memory {secrets.token_hex(8)}", self._secret.value.decode())
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(f"\0{self.place.name}")
        self._listener.listen(256)
        threading.Thread(
            target=self._serve, args=(os.dup(fd),), name="shared-memory", daemon=True
        ).start()

    @classmethod
    def make(cls, what: str, num_bytes: int) -> Self:
        """Make one of ``num_bytes``, which are taken as they are written."""
        fd = os.memfd_create(f"elaswave-{what}", os.MFD_CLOEXEC)
        os.ftruncate(fd, num_bytes)
        return cls(fd)

    @classmethod
    def find(cls, place: Place) -> Self | None:
        """Ask another process for its memory; None where it cannot be reached from here."""
        fds: list[int] = []
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
                sock.settimeout(WITHIN_S)
                sock.connect(f"\0{place.name}")
                prove(sock, Secret(place.key.encode()), Kind.MEMORY)
                _, fds, _, _ = socket.recv_fds(sock, 1, 1)
        except OSError:
            return None
        if not fds or not stat.S_ISREG(os.fstat(fds[0]).st_mode):
            for fd in fds:
                os.close(fd)
            return None
        os.set_inheritable(fds[0], False)
        return cls(fds[0])

    def close(self) -> None:
        """Leave it to the others; what looks at ``data`` has to be gone."""
        # The thread that accepts is told by this, and closes the socket and its descriptor.
        self._listener.shutdown(socket.SHUT_RDWR)
        self.data.close()
        os.close(self._fd)

    def _serve(self, fd: int) -> None:
        """Hand a descriptor of its own over, since `close` may free the number of the other."""
        with self._listener, open(fd, "rb", buffering=0):
            while True:
                try:
                    sock, _ = self._listener.accept()
                except OSError:
                    return
                # A stranger goes away with nothing; so does a member that has gone meanwhile.
                with sock, contextlib.suppress(OSError):
                    if is_same_user(sock):
                        admit(sock, self._secret, Kind.MEMORY)
                        sock.settimeout(WITHIN_S)
                        socket.send_fds(sock, [b"\0"], [fd])
