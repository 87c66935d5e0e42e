"""The memory in which the supervisors of a node keep what it has promised and accepted.

It is a file in memory without a name. A supervisor that comes later is handed its descriptor by one
that has it open. With the last of them it is gone, however they end (standard library only).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator

from elaswave_plugin.core.agreement.acceptor_state import NodeMemory
from elaswave_plugin.core.agreement.leader import Agreement
from elaswave_plugin.core.codec import from_json, to_json
from elaswave_plugin.errors import AgreementError
from elaswave_plugin.ipc.handshake import Kind, prove
from elaswave_plugin.ipc.peer import near_name
from elaswave_plugin.ipc.secret import Secret
from elaswave_plugin.ipc.wire import Frame, send_frame

# The request of a supervisor that wants the memory of its node.
REGISTER = "register"
_HAND_S = 30.0
# Version, and where the record is: written at once, after the record, so that a process killed in
# between leaves the one before.
_HEADER = struct.Struct("<QQQ")
# Linux' struct flock: type, whence, start, length, pid.
_FLOCK = struct.Struct("@hhqqi0q")
_LOOK_S = 0.0001
# A look that comes later than this: it was this process that did not run.
_LATE_S = 0.05


class NodeRegister:
    """The memory of one node, as one of its supervisors has it open."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._version = 0
        self._memory = NodeMemory()

    @classmethod
    def create(cls) -> NodeRegister:
        """That of a node that remembers nothing yet."""
        fd = os.memfd_create("elaswave-node")
        os.pwrite(fd, _HEADER.pack(0, _HEADER.size, 0), 0)
        return cls(fd)

    def hand(self, request: Frame, sock: socket.socket) -> None:
        """Hand the descriptor to a supervisor of the node that has asked for it."""
        with sock, contextlib.suppress(OSError):  # it has gone meanwhile, and asks no more
            sock.settimeout(_HAND_S)
            socket.send_fds(sock, [b"\0"], [self._fd])

    def take_from(self, address: str, secret: Secret) -> None:
        """Have the memory of another supervisor on this machine in the place of this one.

        ``address``: of its server, whose Unix socket is asked. Raises AgreementError.
        """
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
                sock.settimeout(_HAND_S)
                sock.connect(near_name(address))
                prove(sock, secret, Kind.SERVER, timeout_s=_HAND_S)
                send_frame(sock, {"t": REGISTER})
                _, fds, _, _ = socket.recv_fds(sock, 1, 1)
        except OSError as error:
            raise AgreementError(f"it cannot be asked for them here: {error}") from error
        if not fds:
            raise AgreementError("it ended when it was asked for them")
        os.set_inheritable(fds[0], False)
        os.close(self._fd)
        self._fd = fds[0]

    @contextlib.contextmanager
    def turn(
        self, agreement: Agreement, *, limit_s: float, on_stuck: Callable[[int], None]
    ) -> Iterator[None]:
        """Let no other supervisor of the node use its agreement while the block runs.

        The agreement recalls what the node knows before the block, and the node remembers what it
        knows after. Where another process has kept this one waiting for `limit_s` (it was stopped
        in its turn), `on_stuck` gets that process's id, and is to end the process. Raises
        AgreementError where the wait goes on for as long again.
        """
        self._lock(limit_s, on_stuck)
        try:
            agreement.recall(self._read(), time.monotonic())
            yield
            self._write(agreement.memory)
        finally:
            fcntl.lockf(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """Let go of it."""
        os.close(self._fd)

    def _lock(self, limit_s: float, on_stuck: Callable[[int], None]) -> None:
        """Take the lock, which is this process's: it ends with it, and all can see whose it is."""
        if self._locked_within(limit_s):
            return
        pid = self._holder()
        if pid:
            on_stuck(pid)
        if not self._locked_within(limit_s):
            raise AgreementError(
                f"process {self._holder()}, another supervisor of this node, has been at its vote "
                f"for {2 * limit_s:g} s and cannot be ended; look what holds it (a debugger?)"
            )

    def _locked_within(self, limit_s: float) -> bool:
        waited_s, last_s = 0.0, time.monotonic()
        while waited_s <= limit_s:
            with contextlib.suppress(BlockingIOError):
                fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            # A lock cannot be waited for with a limit, and a turn takes less than this.
            time.sleep(_LOOK_S)
            now_s = time.monotonic()
            waited_s += min(now_s - last_s, _LATE_S)
            last_s = now_s
        return False

    def _holder(self) -> int:
        """The process that has the lock, 0 where none has."""
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, *_, pid = _FLOCK.unpack(fcntl.fcntl(self._fd, fcntl.F_GETLK, asked))
        return 0 if kind == fcntl.F_UNLCK else int(pid)

    def _read(self) -> NodeMemory:
        version, offset, length = _HEADER.unpack(os.pread(self._fd, _HEADER.size, 0))
        if version != self._version:
            self._memory = from_json(NodeMemory, json.loads(os.pread(self._fd, length, offset)))
            self._version = version
        return self._memory

    def _write(self, memory: NodeMemory) -> None:
        if memory is self._memory:
            return
        record = json.dumps(memory, default=to_json).encode()
        version, offset, length = _HEADER.unpack(os.pread(self._fd, _HEADER.size, 0))
        # Beside the one before.
        fits = _HEADER.size + len(record) <= offset
        offset = _HEADER.size if fits else offset + length
        os.pwrite(self._fd, record, offset)
        self._version = version + 1
        os.pwrite(self._fd, _HEADER.pack(self._version, offset, len(record)), 0)
        self._memory = memory
