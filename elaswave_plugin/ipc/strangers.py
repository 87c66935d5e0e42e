"""The connections that have not proved that they belong to the job: few, and not for long.

Standard library only.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

from elaswave_plugin.ipc.console import say
from elaswave_plugin.ipc.handshake import WITHIN_S

MOST = 64


class Strangers:
    """The strangers at one listener; where all places are taken, the oldest is sent away.

    So silent strangers keep no member of the job out. Any thread may call it.
    """

    def __init__(self, address: str, *, most: int = MOST, within_s: float = WITHIN_S) -> None:
        self._address, self._most, self._within_s = address, most, within_s
        self._lock = threading.Lock()
        self._came_s: dict[socket.socket, float] = {}
        # How many connections were closed since they did not prove, or did not speak, as they must.
        self.refused = 0

    def __len__(self) -> int:
        with self._lock:
            return len(self._came_s)

    @contextlib.contextmanager
    def one(self, sock: socket.socket) -> Iterator[None]:
        """Count a connection as a stranger while the block runs."""
        self.came(sock)
        try:
            yield
        finally:
            self.is_known(sock)

    def came(self, sock: socket.socket) -> None:
        """Count a new connection, and end the oldest stranger where there are too many."""
        with self._lock:
            oldest = next(iter(self._came_s), None) if len(self._came_s) >= self._most else None
            if oldest is not None:
                del self._came_s[oldest]
            self._came_s[sock] = time.monotonic()
        if oldest is not None:
            _end(oldest)

    def is_known(self, sock: socket.socket) -> None:
        """Count it no more: it has proved, or is closed."""
        with self._lock:
            self._came_s.pop(sock, None)

    def end_late(self) -> None:
        """End those that have taken longer than they may."""
        now_s = time.monotonic()
        with self._lock:
            late = [one for one, at_s in self._came_s.items() if now_s - at_s > self._within_s]
            for one in late:
                del self._came_s[one]
        for one in late:
            _end(one)

    def next_end_s(self) -> float | None:
        """Return the seconds until the next one is late; None where there is none."""
        with self._lock:
            first_s = next(iter(self._came_s.values()), None)
        return None if first_s is None else max(0.0, first_s + self._within_s - time.monotonic())

    def refuse(self, why: object) -> None:
        """Count a connection that was closed for what came; the first one is said."""
        with self._lock:
            self.refused += 1
            first = self.refused == 1
        if first:
            say(f"a connection to {self._address} was closed, others like it are counted: {why}")


def _end(sock: socket.socket) -> None:
    # Its owner notices, and closes it: a descriptor that is closed here could be another's by then.
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
