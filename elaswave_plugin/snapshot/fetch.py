"""Reads sealed snapshot bytes from a supervisor (standard library only)."""

from __future__ import annotations

import socket
import time
from collections import deque
from types import TracebackType

from elaswave_plugin.errors import LinkError
from elaswave_plugin.ipc.handshake import Kind, prove
from elaswave_plugin.ipc.secret import Secret
from elaswave_plugin.ipc.wire import Check, connect, receive_frame, receive_into, send_frame


class Fetcher:
    """One connection to the supervisor at `address` ("host:port"); many fetches, in their order.

    While anything is waited for, `check` is called every few milliseconds; what it raises ends the
    fetch, and the connection is of no more use.
    Raises LinkError where the supervisor cannot be reached.
    """

    def __init__(
        self, address: str, *, secret: Secret, timeout_s: float, check: Check | None = None
    ) -> None:
        self.address = address
        self._check = check
        # What was asked for ahead of its fetch.
        self._asked: deque[dict[str, int]] = deque()
        try:
            self._sock: socket.socket = connect(address, timeout_s, check)
            try:
                prove(self._sock, secret, Kind.SERVER, timeout_s=timeout_s, check=check)
            except BaseException:
                self._sock.close()
                raise
        except OSError as error:
            raise LinkError(f"supervisor at {address} cannot be reached: {error}") from error

    def ask(
        self, *, owner: int, step: int, epoch: int, offset: int, length: int, timeout_s: float
    ) -> None:
        """Ask for what a later fetch takes, so that it is on its way by then; raises LinkError."""
        request = {"owner": owner, "step": step, "epoch": epoch, "offset": offset}
        request["length"] = length
        try:
            self._sock.settimeout(timeout_s)
            send_frame(self._sock, {"t": "fetch", **request})
        except OSError as error:
            raise LinkError(
                f"the supervisor at {self.address} could not be asked for a snapshot of worker"
                f" {owner} at step {step} (view {epoch}): {error}"
            ) from error
        self._asked.append(request)

    def fetch(
        self, *, owner: int, step: int, epoch: int, offset: int, into: memoryview, timeout_s: float
    ) -> None:
        """Fill `into` with the bytes from `offset` of the snapshot of `owner` at (step, epoch).

        What was asked for ahead is fetched in the order in which it was asked for.
        Raises LinkError where the bytes are not there or the supervisor does not deliver in time.
        """
        what = f"snapshot of worker {owner} at step {step} (view {epoch})"
        deadline_s = time.monotonic() + timeout_s
        view = into.cast("B")
        wanted = {"owner": owner, "step": step, "epoch": epoch, "offset": offset}
        wanted["length"] = len(view)
        if not self._asked:
            self.ask(**wanted, timeout_s=timeout_s)
        asked = self._asked.popleft()
        if asked != wanted:
            raise AssertionError(f"asked for {asked}, fetched {wanted}")
        try:
            self._sock.settimeout(timeout_s)
            answer = receive_frame(self._sock, timeout_s, self._check)
            if "error" not in answer:
                receive_into(self._sock, view, deadline_s, self._check)
        except OSError as error:
            raise LinkError(
                f"{what} did not come from the supervisor at {self.address}: {error}"
            ) from error
        if "error" in answer:
            raise LinkError(f"{what}: supervisor at {self.address} answers: {answer['error']}")

    def close(self) -> None:
        """Close the connection."""
        self._sock.close()

    def __enter__(self) -> Fetcher:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
