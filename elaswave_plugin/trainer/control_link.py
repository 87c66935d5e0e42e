"""A trainer's end of the link to its supervisor: whichever thread waits for a frame receives it."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import traceback
from collections.abc import Callable, Iterator

from elaswave_plugin.core.codec import WireMessage
from elaswave_plugin.errors import JobStopped
from elaswave_plugin.ipc.wire import Frame, FrameBuffer, encode

_READ_BYTES = 1 << 16
# Long after the other supervisors have given up one that does not run.
_SEND_WITHIN_S = 300.0
_TIMEVAL = struct.Struct("ll")


class ControlLink:
    """Frames both ways; a thread of its own, the doorbell, listens while no other receives.

    Frames are taken in one after the other, by `on_frame` in the thread that received them.
    `on_end(why)`: nothing comes any more.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        slot: int,
        on_frame: Callable[[Frame], None],
        on_end: Callable[[str], None],
        send_within_s: float = _SEND_WITHIN_S,
    ) -> None:
        # The kernel's own limit, since others receive from this socket meanwhile.
        within = _TIMEVAL.pack(int(send_within_s), int(send_within_s % 1 * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, within)
        self._send_within_s = send_within_s
        self._sock = sock
        self._slot = slot
        self._on_frame = on_frame
        self._on_end = on_end
        self._buffer = FrameBuffer()
        self._sending = threading.Lock()
        self._receiving = threading.Lock()
        self._bell = select.epoll()
        self._bell.register(sock, select.EPOLLIN)
        self._waiter_receives = False
        self.closed = False

    def listen(
        self, *, silence_s: Callable[[], float | None], on_silence: Callable[[], None]
    ) -> None:
        """Start the doorbell; it calls `on_silence` whenever it hears nothing for `silence_s()`."""

        def run() -> None:
            try:
                self._listen_until_the_end(silence_s, on_silence)
            except Exception as error:
                self._on_end(f"its doorbell failed: {error!r}")
                traceback.print_exc()

        threading.Thread(target=run, name="elaswave-doorbell", daemon=True).start()

    def send(self, frame: Frame | WireMessage) -> None:
        """Send from any thread; raises JobStopped where the supervisor is gone or reads nothing."""
        try:
            with self._sending:
                self._sock.sendall(encode(frame))
        except BlockingIOError as error:
            raise JobStopped(
                f"the supervisor of worker {self._slot} has read nothing for"
                f" {self._send_within_s:g} s: is it stopped?"
            ) from error
        except OSError as error:
            raise JobStopped(f"the supervisor of worker {self._slot} is gone: {error}") from error

    @contextlib.contextmanager
    def receiving_here(self) -> Iterator[None]:
        """The calling thread receives: it waits for a frame, and to wake two threads takes time."""
        with self._receiving:
            here = not self.closed
            if here:
                self._waiter_receives = True
                self._bell.unregister(self._sock)
        try:
            yield
        finally:
            with self._receiving:
                self._waiter_receives = False
                if here:
                    self._bell.register(self._sock, select.EPOLLIN)

    def receive(self, timeout_s: float) -> bool:
        """Take in what comes next, `receiving_here`; False where nothing did within `timeout_s`."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        if timeout_s <= 0 or not poll.poll(1000 * timeout_s):
            return False
        self._take_in()
        return True

    def _listen_until_the_end(
        self, silence_s: Callable[[], float | None], on_silence: Callable[[], None]
    ) -> None:
        while True:
            if not self._bell.poll(silence_s()):
                on_silence()
                continue
            with self._receiving:
                if self._waiter_receives or self._take_in():
                    continue
                self.closed = True
                with self._sending:
                    self._sock.close()
                return

    def _take_in(self) -> bool:
        """Take in what has come; False where the supervisor is gone."""
        try:
            # A waiting thread may have taken in meanwhile what woke this one.
            data = self._sock.recv(_READ_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            data = b""
        if not data:
            self._on_end("the supervisor is gone")
            return False
        for frame in self._buffer.feed(data):
            self._on_frame(frame)
        return True
