"""One life of an agent, as its guardian has it: a process, its page, and two connections.

Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import signal
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from elaswave_plugin.agent.process_states import ProcessorWaits
from elaswave_plugin.ipc.reactor import Reactor

LONGEST_CALL_BYTES = 1 << 18
_AGAIN_S = 0.01
Call = dict[str, Any]
Begin = Callable[[socket.socket, socket.socket, int], int]


class AgentLife:
    """An agent that `begin(calls, notices, number)` has forked.

    `page`: it shows there that it runs; `calls`: the connection on which it asks; `on_end()`: its
    process has ended.
    """

    def __init__(
        self,
        reactor: Reactor,
        begin: Begin,
        number: int,
        page: mmap.mmap,
        *,
        on_end: Callable[[], None],
    ) -> None:
        self.calls, theirs = _pair()
        self._notices, their_notices = _pair()
        self._notices.setblocking(False)
        self._reactor = reactor
        self._page = page
        page[:8] = bytes(8)
        self.pid = begin(theirs, their_notices, number)
        theirs.close()
        their_notices.close()
        self._pidfd = os.pidfd_open(self.pid)
        self._untold: deque[tuple[bytes, list[int]]] = deque()
        self._waits = ProcessorWaits()
        reactor.watch(self._pidfd, on_end)

    def tell(self, notice: Call, fds: Sequence[int]) -> None:
        """Tell it something; where it is dead, the next one asks for what has happened."""
        self._untold.append((json.dumps(notice).encode(), list(fds)))
        self._send()

    def signal(self, number: int) -> None:
        """Signal its process, if that is still there."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def stands_still_s(self) -> float:
        """For how long it has not touched its page, though it could have run."""
        touched_s: float = struct.unpack("q", self._page[:8])[0] / 1e9
        if not touched_s:
            return 0.0
        return time.monotonic() - touched_s - self._waits.since(touched_s, self.pid)

    def forgive(self) -> None:
        """Count from now on: until now it may have done anything."""
        if any(self._page[:8]):
            self._page[:8] = struct.pack("q", time.monotonic_ns())

    def close(self) -> int:
        """Wait for its end, and let go of it; returns its exit code, negative after a signal."""
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        for fd in (self._pidfd, self.calls.fileno()):
            self._reactor.unwatch(fd)
        os.close(self._pidfd)
        self.calls.close()
        self._notices.close()
        self._untold.clear()
        return code

    def _send(self) -> None:
        while self._untold:
            data, fds = self._untold[0]
            try:
                socket.send_fds(self._notices, [data], fds)
            except BlockingIOError:
                self._reactor.after(_AGAIN_S, self._send)
                return
            except OSError:  # it is dead
                return
            self._untold.popleft()


def _pair() -> tuple[socket.socket, socket.socket]:
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for sock in pair:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, LONGEST_CALL_BYTES)
    return pair
