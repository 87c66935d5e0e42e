"""Reads sealed snapshot bytes that an agent has: in place on its node, else over the network.

On the same node the agent hands over a descriptor of the memory, and nothing goes through a
socket; what is overwritten while it is read fails its checksum. Standard library only.
"""

import math
import os
import socket
import time
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

from elaswave_plugin.errors import LinkError
from elaswave_plugin.ipc.peer import near_name
from elaswave_plugin.ipc.relay import connect_by
from elaswave_plugin.ipc.secret import Kind, Secret, prove
from elaswave_plugin.ipc.snapshot_record import BODY_OFFSET
from elaswave_plugin.ipc.wire import (
    Check,
    receive_descriptor,
    receive_frame,
    receive_into,
    send_frame,
)

# So much has to come before the next wait begins.
_PIECE_BYTES = 1 << 20


class _Sealed(NamedTuple):
    """The names of a sealed snapshot, as requests have them."""

    owner: int
    step: int
    epoch: int
    notes: bool


class _Memory(NamedTuple):
    """A descriptor of its memory, and the bytes that may be asked for."""

    fd: int
    length: int


class Fetcher(AbstractContextManager["Fetcher"]):
    """One connection to the agent at `address` ("host:port"); many fetches, in their order.

    While anything is waited for, `check` is called every few milliseconds; what it raises ends the
    fetch, and the connection is of no more use.
    Raises LinkError where the agent cannot be reached.
    """

    def __init__(
        self,
        address: str,
        *,
        secret: Secret,
        timeout_s: float,
        stall_s: float = math.inf,
        relays: Sequence[str] = (),
        unheard: set[str] | None = None,
        check: Check | None = None,
    ) -> None:
        """``stall_s``: the longest that nothing may come while something is awaited.

        ``relays``: agents by which to go where this one cannot be heard from here, as those in
        ``unheard`` could not before.
        """
        self.address = address
        self._stall_s = stall_s
        self._check = check
        # What was asked for ahead of its fetch.
        self._asked: deque[dict[str, int]] = deque()
        self._memory: dict[_Sealed, _Memory] = {}
        try:
            first_s = min(timeout_s, stall_s)
            self._sock: socket.socket = _connect_near(address) or connect_by(
                address, relays, secret=secret, timeout_s=first_s, unheard=unheard, check=check
            )
            try:
                prove(self._sock, secret, Kind.SERVER, timeout_s=first_s, check=check)
            except BaseException:
                self._sock.close()
                raise
        except OSError as error:
            raise LinkError(f"agent at {address} cannot be reached: {error}") from error

    def ask(
        self,
        *,
        owner: int,
        step: int,
        epoch: int,
        offset: int,
        length: int,
        timeout_s: float,
        notes: bool = False,
    ) -> None:
        """Ask for what a later fetch takes, so that it is on its way by then; raises LinkError."""
        if self._is_near:
            return
        request = {**_Sealed(owner, step, epoch, notes)._asdict(), "offset": offset}
        request["length"] = length
        try:
            self._sock.settimeout(timeout_s)
            send_frame(self._sock, {"t": "fetch", **request})
        except OSError as error:
            raise LinkError(
                f"the agent at {self.address} could not be asked for a snapshot of worker"
                f" {owner} at step {step} (view {epoch}): {error}"
            ) from error
        self._asked.append(request)

    def fetch(
        self,
        *,
        owner: int,
        step: int,
        epoch: int,
        offset: int,
        into: memoryview,
        timeout_s: float,
        notes: bool = False,
    ) -> None:
        """Fill `into` with the bytes from `offset` of the snapshot of `owner` at (step, epoch).

        ``notes``: of its notes, not of its state. What was asked for ahead is fetched in the order
        in which it was asked for.
        Raises LinkError where the bytes are not there or the agent does not deliver in time.
        """
        sealed, view = _Sealed(owner, step, epoch, notes), into.cast("B")
        what = f"snapshot of worker {owner} at step {step} (view {epoch})"
        take = self._read if self._is_near else self._receive
        try:
            refusal = take(sealed, offset, view, timeout_s)
        except OSError as error:
            raise LinkError(
                f"{what} did not come from the agent at {self.address}: {error}"
            ) from error
        if refusal is not None:
            raise LinkError(f"{what}: agent at {self.address} answers: {refusal}")

    @property
    def _is_near(self) -> bool:
        return self._sock.family is socket.AF_UNIX

    def _receive(
        self, sealed: _Sealed, offset: int, view: memoryview, timeout_s: float
    ) -> str | None:
        """Take the bytes from the connection; returns the refusal that came in their place."""
        deadline_s = time.monotonic() + timeout_s
        wanted = {**sealed._asdict(), "offset": offset, "length": len(view)}
        if not self._asked:
            self.ask(**wanted, timeout_s=timeout_s)
        asked = self._asked.popleft()
        if asked != wanted:
            raise AssertionError(f"asked for {asked}, fetched {wanted}")
        self._sock.settimeout(timeout_s)
        answer = receive_frame(self._sock, min(timeout_s, self._stall_s), self._check)
        if "error" in answer:
            return str(answer["error"])
        for start in range(0, len(view), _PIECE_BYTES):
            stalled_s = min(deadline_s, time.monotonic() + self._stall_s)
            receive_into(self._sock, view[start : start + _PIECE_BYTES], stalled_s, self._check)
        return None

    def _read(self, sealed: _Sealed, offset: int, view: memoryview, timeout_s: float) -> str | None:
        """Read the bytes from the memory; returns the refusal of one that does not share it."""
        if sealed not in self._memory:
            timeout_s = min(timeout_s, self._stall_s)
            self._sock.settimeout(timeout_s)
            send_frame(self._sock, {"t": "share", **sealed._asdict()})
            answer = receive_frame(self._sock, timeout_s, self._check)
            if "error" in answer:
                return str(answer["error"])
            fd = receive_descriptor(self._sock, timeout_s, self._check)
            self._memory[sealed] = _Memory(fd, int(answer["length"]))
        fd, length = self._memory[sealed]
        if (end := offset + len(view)) > length:
            return f"bytes {offset}..{end} of a snapshot of {length} bytes"
        if self._check is not None:
            self._check()
        while len(view):
            count = os.preadv(fd, [view], BODY_OFFSET + end - len(view))
            if not count:
                raise ConnectionError(f"snapshot memory ends {len(view)} bytes before byte {end}")
            view = view[count:]
        return None

    def close(self) -> None:
        """Close the connection, and let go of the memory."""
        self._sock.close()
        for memory in self._memory.values():
            os.close(memory.fd)
        self._memory.clear()

    def __exit__(self, *error: object) -> None:
        self.close()


def _connect_near(address: str) -> socket.socket | None:
    """A connection by the Unix socket that an agent of this node has beside its address."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        sock.connect(near_name(address))
    except OSError:  # none is there, or its queue is full: by its address, which is waited for
        sock.close()
        return None
    sock.setblocking(True)
    return sock
