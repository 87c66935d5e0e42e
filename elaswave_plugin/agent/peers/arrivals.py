"""The listener of a meeting: hears all callers at the same time, and lets in those of the job."""

import contextlib
import selectors
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from elaswave_plugin.errors import AgreementError
from elaswave_plugin.ipc.console import say
from elaswave_plugin.ipc.secret import (
    OPENING_BYTES,
    PROOF_BYTES,
    SECRET_FILE,
    Accepting,
    HandshakeError,
    Kind,
    Secret,
    Strangers,
    asks_for_secret,
)
from elaswave_plugin.ipc.wire import FrameBuffer, send_frame

# The greeting of an agent has less; it describes one process.
LONGEST_GREETING_BYTES = 64 << 10
_READ_BYTES = 4096
_LAST_WORDS_S = 0.5


@dataclass(slots=True)
class _Arrival:
    """One connection: what is left to prove, and what it has said since."""

    accepting: Accepting
    wanted: int = OPENING_BYTES
    data: bytearray = field(default_factory=bytearray)
    frames: FrameBuffer | None = None


class Arrivals:
    """Yields the greetings of those who prove the job's secret, each a first frame with its node.

    `opening` is sent to every caller, before any proof. A stranger (a port scan, another job) that
    says nothing keeps no other waiting.
    """

    def __init__(
        self,
        listener: socket.socket,
        secret: Secret,
        kind: Kind,
        *,
        opening: dict[str, Any] | None = None,
        hands_out: bool = False,
    ) -> None:
        """``hands_out``: the secret is given to who asks for it, and that is said once."""
        self._listener, self._secret, self._kind, self._opening = listener, secret, kind, opening
        self._hands_out, self._handed_out = hands_out, 0
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        host, port = listener.getsockname()[:2]
        self.strangers = Strangers(f"{host}:{port}")
        # Agents that have greeted, which say nothing more before all have come, by node.
        self.watched: dict[socket.socket, int] = {}

    def greetings(self, timeout_s: float) -> Iterator[tuple[socket.socket, dict[str, Any]]]:
        """Yield the greetings that have come, with their sockets, after at most `timeout_s`.

        Yields an empty greeting for one of the watched whose connection ended.
        """
        due_s = self.strangers.next_end_s()
        ready = self._selector.select(timeout_s if due_s is None else min(timeout_s, due_s))
        self.strangers.end_late()
        for key, _ in ready:
            sock = key.fileobj
            assert isinstance(sock, socket.socket)
            if sock is self._listener:
                self._let_in(sock.accept()[0])
            elif key.data is None:
                yield sock, {}
            else:
                try:
                    greeting = self._heard(sock, key.data)
                except (OSError, ValueError) as error:
                    self._close(sock)
                    if not isinstance(error, ConnectionResetError):
                        self.strangers.refuse(error)
                    continue
                if greeting is not None:
                    self._selector.unregister(sock)
                    self.strangers.is_known(sock)
                    sock.setblocking(True)
                    yield sock, greeting

    @property
    def refused_text(self) -> str:
        """The number of refused connections, for the end of a sentence."""
        count = self.strangers.refused
        return f"; {count} connections did not prove the job's secret" if count else ""

    def watch(self, node: int, sock: socket.socket) -> None:
        """Find out where the agent of `node`, which has come, ends before all have."""
        self._selector.register(sock, selectors.EVENT_READ, None)
        self.watched[sock] = node

    def _let_in(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        try:
            if self._opening is not None:
                send_frame(sock, self._opening)  # an empty buffer takes it
        except OSError:
            sock.close()
            return
        self.strangers.came(sock)
        arrival = _Arrival(Accepting(self._secret, self._kind))
        self._selector.register(sock, selectors.EVENT_READ, arrival)

    def _heard(self, sock: socket.socket, arrival: _Arrival) -> dict[str, Any] | None:
        """Take in what has come; the greeting once it is whole. Raises OSError, ValueError."""
        try:
            data = sock.recv(_READ_BYTES)
        except BlockingIOError:
            return None
        if not data:
            raise ConnectionResetError("closed by the peer")
        arrival.data += data
        while arrival.frames is None and len(arrival.data) >= arrival.wanted:
            taken = bytes(arrival.data[: arrival.wanted])
            del arrival.data[: arrival.wanted]
            if arrival.wanted == PROOF_BYTES:
                arrival.accepting.proved(taken)
                arrival.frames = FrameBuffer(longest_bytes=LONGEST_GREETING_BYTES)
            elif self._hands_out and asks_for_secret(taken):
                self._hand_out(sock)
            else:
                sock.sendall(arrival.accepting.opened(taken))
                arrival.wanted = PROOF_BYTES
        if arrival.frames is None:
            return None
        said, arrival.data = bytes(arrival.data), bytearray()
        greeting = next(arrival.frames.feed(said), None)
        if greeting is None:
            return None
        if type(greeting.get("node")) is not int:
            raise HandshakeError(f"a greeting names a node, not {greeting!r:.100}")
        return greeting

    def _hand_out(self, sock: socket.socket) -> None:
        send_frame(sock, {"secret": self._secret.value.decode()})
        self._handed_out += 1
        if self._handed_out == 1:
            host, port = sock.getsockname()[:2]
            say(
                f"the job's secret was handed out at {host}:{port} to a process that had no secret"
                f" file: any process that could reach that port until all had met may know it. Set"
                f" {SECRET_FILE} on every node, or --elaswave-require-secret"
            )

    def _close(self, sock: socket.socket) -> None:
        self._selector.unregister(sock)
        self.strangers.is_known(sock)
        sock.close()

    def __enter__(self) -> "Arrivals":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, AgreementError):
            self._tell_all({"over": str(error), "early": getattr(error, "early", False)})
        for key in list(self._selector.get_map().values()):
            sock = key.fileobj
            if not isinstance(sock, socket.socket) or sock is self._listener:
                continue
            if error is not None or key.data is not None:  # the others have met
                sock.close()
        self._selector.close()

    def _tell_all(self, over: dict[str, Any]) -> None:
        """Tell those who have come why there is no meeting, and who is just proving that it may."""
        for sock in self.watched:
            with contextlib.suppress(OSError):
                send_frame(sock, over)
        deadline_s = time.monotonic() + _LAST_WORDS_S
        while len(self.strangers) and (left_s := deadline_s - time.monotonic()) > 0:
            for sock, greeting in self.greetings(left_s):
                if greeting:
                    with sock, contextlib.suppress(OSError):
                        send_frame(sock, over)
                else:
                    self._selector.unregister(sock)  # it has ended by now
