"""An agent's end of the connections with its guardian: memory by name, trainers, notices."""

import json
import mmap
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from elaswave_plugin.agent.guardian import LONGEST_CALL_BYTES, PAGE, RECORD
from elaswave_plugin.ipc.environment import Program
from elaswave_plugin.ipc.reactor import Reactor

_TOUCH_EVERY_S = 0.2
_MOST_FDS = 250
_HEADER = struct.Struct("qqq")
Notice = dict[str, Any]


class Keeper:
    """The guardian, for its agent; safe to use from several threads.

    Raises ConnectionError where the guardian is gone, with which the agent ends.
    """

    def __init__(self, calls: socket.socket, notices: socket.socket) -> None:
        self._calls = calls
        self._notices = notices
        self._lock = threading.Lock()
        page = self.memory(PAGE)
        self._page = mmap.mmap(page, mmap.PAGESIZE)
        os.close(page)

    def memory(self, name: str) -> int:
        """Return a descriptor of the memory of this name, which is made where it is new."""
        _, (fd,) = self._call({"c": "memory", "name": name})
        return fd

    def drop(self, name: str) -> None:
        """Have the guardian let go of a memory."""
        self._call({"c": "drop", "name": name})

    def names(self) -> list[str]:
        """List the memory that the guardian holds."""
        answer, _ = self._call({"c": "names"})
        return list(answer["names"])

    def start(
        self,
        *,
        place: int,
        slot: int,
        incarnation: int,
        program: Program,
        env: Mapping[str, str],
        memory: Sequence[str],
    ) -> None:
        """Have a trainer started; a notice tells that it runs. `memory`: the names it inherits."""
        self._call(
            {
                "c": "start",
                "place": place,
                "slot": slot,
                "incarnation": incarnation,
                "program": asdict(program),
                "env": dict(env),
                "memory": list(memory),
            }
        )

    def trainers(self) -> list[tuple[Notice, int]]:
        """Return the trainers of this node, with a pidfd or -1: of an agent's earlier lives."""
        answer, fds = self._call({"c": "trainers"})
        left = iter(fds)
        return [(one, next(left) if one["pid"] else -1) for one in answer["trainers"]]

    def seen(self, slot: int, incarnation: int) -> None:
        """Nothing more is to be told of a trainer that has ended."""
        self._call({"c": "seen", "slot": slot, "incarnation": incarnation})

    def watch(self, reactor: Reactor, on_notice: Callable[[Notice, int], None]) -> None:
        """Have the reactor call `on_notice(notice, descriptor or -1)`, and show that it runs."""

        def read() -> None:
            data, fds, _, _ = socket.recv_fds(self._notices, LONGEST_CALL_BYTES, 4)
            if not data:  # the guardian is dead, and this process about to be
                reactor.unwatch(self._notices.fileno())
                return
            on_notice(json.loads(data), fds[0] if fds else -1)

        def touch() -> None:
            self._page[:8] = struct.pack("q", time.monotonic_ns())
            reactor.after(_TOUCH_EVERY_S, touch)

        reactor.watch(self._notices.fileno(), read)
        touch()

    # ---- the record of the agreement ----------------------------------------------------------

    def load(self) -> dict[str, Any] | None:
        """Return what was stored last; None where nothing was."""
        fd = self.memory(RECORD)
        try:
            if not os.fstat(fd).st_size:
                return None
            _, offset, length = _HEADER.unpack(os.pread(fd, _HEADER.size, 0))
            found: dict[str, Any] = json.loads(os.pread(fd, length, offset))
            return found
        finally:
            os.close(fd)

    def store(self, record: bytes) -> None:
        """Keep this in the place of what was stored; beside it first, so that one is whole."""
        fd = self.memory(RECORD)
        try:
            known = os.pread(fd, _HEADER.size, 0)
            number, offset, length = _HEADER.unpack(known) if known else (0, _HEADER.size, 0)
            fits = _HEADER.size + len(record) <= offset
            offset = _HEADER.size if fits else offset + length
            os.pwrite(fd, record, offset)
            os.pwrite(fd, _HEADER.pack(number + 1, offset, len(record)), 0)
        finally:
            os.close(fd)

    def _call(self, call: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
        with self._lock:
            self._calls.sendall(json.dumps(call).encode())
            data, fds, _, _ = socket.recv_fds(self._calls, LONGEST_CALL_BYTES, _MOST_FDS)
        if not data:
            raise ConnectionError("the guardian is gone")
        for fd in fds:
            os.set_inheritable(fd, False)
        answer: dict[str, Any] = json.loads(data)
        return answer, fds
