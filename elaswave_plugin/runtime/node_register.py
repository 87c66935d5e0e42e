"""Where the supervisors of a node keep what it has promised and accepted (`core/node_memory.py`).

A file in memory without a name: who comes later opens it by way of another one that has it open,
and with the last of them it is gone, however they end (standard library only).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import struct
import time
from collections.abc import Iterator

from elaswave_plugin.core.agreement import Agreement
from elaswave_plugin.core.agreement_wire import memory_from_wire, memory_to_wire
from elaswave_plugin.core.node_memory import NodeMemory
from elaswave_plugin.errors import AgreementError

_NAME = "elaswave-node"
# Version, and where the record is: written at once, after the record, so that whoever is killed in
# between leaves the one before.
_HEADER = struct.Struct("<QQQ")
_TURN_S = 10.0
_LOOK_S = 0.0001


class NodeRegister:
    """The memory of one node, as one of its supervisors has it open."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._version = 0
        self._memory = NodeMemory()

    @classmethod
    def create(cls) -> NodeRegister:
        """That of a node that remembers nothing yet."""
        fd = os.memfd_create(_NAME)
        os.pwrite(fd, _HEADER.pack(0, _HEADER.size, 0), 0)
        return cls(fd)

    @classmethod
    def of_process(cls, pid: int) -> NodeRegister:
        """That of another supervisor on this machine. Raises AgreementError where it has none."""
        folder = f"/proc/{pid}/fd"
        with contextlib.suppress(OSError):
            for number in os.listdir(folder):
                path = f"{folder}/{number}"
                with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                    if os.readlink(path).startswith(f"/memfd:{_NAME} "):
                        # Not a duplicate: locks belong to what was opened.
                        return cls(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        raise AgreementError(f"process {pid} is gone, or its open files cannot be read by this one")

    @contextlib.contextmanager
    def turn(self, agreement: Agreement) -> Iterator[None]:
        """What the agreement does in the block, no other supervisor of the node does meanwhile.

        It recalls what the node knows before, and the node remembers it after. Raises
        AgreementError where another one keeps it waiting without end.
        """
        self._lock()
        try:
            agreement.recall(self._read(), time.monotonic())
            yield
            self._write(agreement.memory)
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """Let go of it."""
        os.close(self._fd)

    def _lock(self) -> None:
        deadline_s = time.monotonic() + _TURN_S
        while True:
            with contextlib.suppress(BlockingIOError):
                return fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if time.monotonic() > deadline_s:
                raise AgreementError(
                    f"another supervisor of this node has been at its vote for {_TURN_S:g} s"
                )
            # A lock cannot be waited for with a limit, and a turn takes less than this.
            time.sleep(_LOOK_S)

    def _read(self) -> NodeMemory:
        version, offset, length = _HEADER.unpack(os.pread(self._fd, _HEADER.size, 0))
        if version != self._version:
            self._memory = memory_from_wire(json.loads(os.pread(self._fd, length, offset)))
            self._version = version
        return self._memory

    def _write(self, memory: NodeMemory) -> None:
        if memory is self._memory:
            return
        record = json.dumps(memory_to_wire(memory)).encode()
        version, offset, length = _HEADER.unpack(os.pread(self._fd, _HEADER.size, 0))
        # Beside the one before.
        fits = _HEADER.size + len(record) <= offset
        offset = _HEADER.size if fits else offset + length
        os.pwrite(self._fd, record, offset)
        self._version = version + 1
        os.pwrite(self._fd, _HEADER.pack(self._version, offset, len(record)), 0)
        self._memory = memory
