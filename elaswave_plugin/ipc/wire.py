"""Framing for every control connection: a JSON object behind its length, blocking and not."""

import errno
import json
import os
import select
import socket
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from elaswave_plugin.core.codec import WireMessage, to_wire
from elaswave_plugin.ipc.reactor import Reactor
from elaswave_plugin.ipc.silence import Answers, answers

Frame = dict[str, Any]
Check = Callable[[], None]
CHECK_EVERY_S = 0.01
LENGTH = struct.Struct("!I")
LONGEST_FRAME_BYTES = 1 << 30
# The bytes that may wait behind a frame which the peer does not read.
MOST_UNSENT_BYTES = 1 << 26
PROBE_AFTER_S = 30
PROBE_EVERY_S = 10
PROBES = 9
_READ_BYTES = 1 << 16
# Frames of jobs of thousands of workers, which say the same of most of them.
_COMPRESSED_BYTES = 1 << 16
_COMPRESSED = b"\x78"


def encode(frame: Frame | WireMessage) -> bytes:
    """The bytes of a frame; a long one is compressed, which no object in JSON begins like."""
    body = json.dumps(frame, separators=(",", ":"), default=to_wire).encode()
    if len(body) > _COMPRESSED_BYTES:
        body = zlib.compress(body, level=1)
    return LENGTH.pack(len(body)) + body


class Encoder:
    """Encodes once what many are told one after the other, of parts that never change."""

    def __init__(self) -> None:
        self._last: tuple[WireMessage | None, bytes] = (None, b"")

    def __call__(self, message: WireMessage) -> bytes:
        """Return its bytes."""
        if message != self._last[0]:
            self._last = message, encode(message)
        return self._last[1]


class FrameBuffer:
    """Cuts a stream into frames; what is left of an unfinished one stays inside."""

    def __init__(self, longest_bytes: int = LONGEST_FRAME_BYTES) -> None:
        self._data = bytearray()
        self._longest_bytes = longest_bytes

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames that are complete now; raises ValueError at bytes that are no frame."""
        self._data += data
        while len(self._data) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._data)
            if length > self._longest_bytes:
                raise ValueError(f"frame of {length} bytes, wanted at most {self._longest_bytes}")
            end = LENGTH.size + length
            if len(self._data) < end:
                return
            body = self._data[LENGTH.size : end]
            del self._data[:end]
            yield _object(body, self._longest_bytes)


class Channel:
    """A control connection on a reactor: sends without blocking, calls back for each frame.

    `on_bytes` is called whenever anything arrives: a long frame is a sign of life before its end.
    """

    def __init__(
        self,
        reactor: Reactor,
        sock: socket.socket,
        *,
        on_frame: Callable[[Frame], None],
        on_close: Callable[[str], None],
        on_bytes: Callable[[], None] = lambda: None,
    ) -> None:
        self._reactor = reactor
        self._sock = sock
        self._on_frame = on_frame
        self._on_close = on_close
        self._on_bytes = on_bytes
        self._buffer = FrameBuffer()
        self._unsent = bytearray()
        self._waits_to_write = False
        self.closed = False
        sock.setblocking(False)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        probe_when_silent(sock)
        reactor.watch(sock.fileno(), self._read)

    def send(self, frame: Frame | WireMessage) -> None:
        """Send a frame, or drop it where the connection is closed (its end is reported anyway)."""
        self.send_encoded(encode(frame))

    def send_encoded(self, data: bytes) -> None:
        """The same, for a frame that goes to several and was encoded once."""
        if self.closed:
            return
        first = not self._unsent
        if not first and len(self._unsent) + len(data) > MOST_UNSENT_BYTES:
            waits = f"it does not read: {len(self._unsent) >> 20} MiB wait for it"
            self._reactor.after(0, partial(self._lose, waits))
            return
        self._unsent += data
        if first:
            self._write()

    @property
    def answers(self) -> Answers:
        """The answers of the other machine; it is there at once where it is this one."""
        is_far = not self.closed and self._sock.family in (socket.AF_INET, socket.AF_INET6)
        return answers(self._sock) if is_far else Answers(0.0, 0)

    def close(self) -> None:
        """Close without calling back; what was not sent is lost."""
        if not self.closed:
            self.closed = True
            self._reactor.unwatch(self._sock.fileno())
            self._sock.close()

    def drain(self) -> None:
        """Deliver everything that has arrived, for a peer that is known to have died."""
        if self.closed:
            return
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        while not self.closed and poll.poll(0):
            self._read()

    def half_close(self, timeout_s: float) -> None:
        """Flush, and tell the peer that nothing follows.

        A plain close with unread bytes would reset the connection and may swallow our last frame.
        """
        if self.closed:
            return
        self._reactor.unwatch(self._sock.fileno())
        try:
            self._sock.settimeout(timeout_s)
            self._sock.sendall(self._unsent)
            self._sock.shutdown(socket.SHUT_WR)
        except OSError:
            self.close()  # the peer is gone already: nothing is left to tell it

    def await_end(self, deadline_s: float) -> None:
        """After `half_close`: wait (monotonic clock) until the peer has nothing more to say."""
        if self.closed:
            return
        try:
            while (left_s := deadline_s - time.monotonic()) > 0:
                self._sock.settimeout(left_s)
                if not self._sock.recv(_READ_BYTES):
                    break
        except OSError:
            pass  # it is gone, or too slow: both end the wait
        self.close()

    def _read(self) -> None:
        try:
            data = self._sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(f"its connection broke ({error.strerror})")
            return
        if not data:
            self._lose("its connection closed")
            return
        self._on_bytes()
        self._take(data)

    def _write(self) -> None:
        try:
            sent = self._sock.send(self._unsent)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            # Frames may still be readable; the reading side reports the end once they are.
            self._unsent.clear()
            self._waits_to_write = False
            self._reactor.watch(self._sock.fileno(), self._read)
            self._reactor.after(0, partial(self._lose, f"its connection broke ({error.strerror})"))
            return
        del self._unsent[:sent]
        if bool(self._unsent) is self._waits_to_write:
            return  # most messages leave at once, and there is nothing to change
        self._waits_to_write = bool(self._unsent)
        self._reactor.watch(self._sock.fileno(), self._read, self._write if self._unsent else None)

    def _take(self, data: bytes) -> None:
        frames = self._buffer.feed(data)
        while not self.closed:
            try:
                frame = next(frames, None)
            except ValueError as error:
                self.close()
                self._on_close(f"it sent what is no frame ({error})")
                return
            if frame is None:
                return
            self._on_frame(frame)

    def _lose(self, evidence: str) -> None:
        if not self.closed:
            self._deliver_rest()
        if not self.closed:
            self.close()
            self._on_close(evidence)

    def _deliver_rest(self) -> None:
        """Deliver frames that arrived before the connection broke."""
        while True:
            try:
                data = self._sock.recv(_READ_BYTES)
            except OSError:
                return
            if not data or self.closed:
                return
            self._take(data)


def send_frame(sock: socket.socket, frame: Frame) -> None:
    """Send one frame on a blocking socket."""
    sock.sendall(encode(frame))


def receive_frame(
    sock: socket.socket,
    timeout_s: float,
    check: Check | None = None,
    *,
    longest_bytes: int = LONGEST_FRAME_BYTES,
) -> Frame:
    """The next frame of a blocking socket; reads not a byte more.

    Raises TimeoutError, ConnectionError where the peer closes or announces a longer one, ValueError
    where the bytes are no frame, and what `check` raises.
    """
    deadline_s = time.monotonic() + timeout_s
    (length,) = LENGTH.unpack(_receive(sock, LENGTH.size, deadline_s, check))
    if length > longest_bytes:
        raise ConnectionError(f"frame of {length} bytes on a control connection")
    return _object(_receive(sock, length, deadline_s, check), longest_bytes)


def receive_into(
    sock: socket.socket, view: memoryview, deadline_s: float, check: Check | None = None
) -> None:
    """Fill `view` from a blocking socket; `deadline_s` is on the monotonic clock.

    `check` is called all the time, at least every CHECK_EVERY_S seconds.
    Raises TimeoutError, ConnectionError where the peer closes, and what `check` raises.
    """
    while len(view):
        wait_s = deadline_s - time.monotonic()
        if wait_s <= 0:
            raise TimeoutError("timed out")
        if check is not None:
            check()
            wait_s = min(wait_s, CHECK_EVERY_S)
        sock.settimeout(wait_s)
        try:
            count = sock.recv_into(view)
        except TimeoutError:
            continue
        if not count:
            raise ConnectionError("the connection closed")
        view = view[count:]


def connect(address: str, timeout_s: float, check: Check | None = None) -> socket.socket:
    """A blocking connection to "host:port", the host in numbers.

    Raises TimeoutError, OSError where none answers, and what `check` raises.
    """
    host, _, port = address.rpartition(":")
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)
        code = sock.connect_ex((host, int(port)))
        if code == errno.EINPROGRESS:
            _await(sock, select.POLLOUT, time.monotonic() + timeout_s, check)
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))
        sock.setblocking(True)
    except BaseException:
        sock.close()
        raise
    return sock


def probe_when_silent(sock: socket.socket) -> None:
    """Have the kernel ask a silent peer whether it is there; one that vanished ends in two minutes.

    It also keeps an idle connection known to firewalls on the way.
    """
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_AFTER_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_EVERY_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)


def _object(data: bytearray, longest_bytes: int) -> Frame:
    if data[:1] == _COMPRESSED:
        data = _whole(data, longest_bytes)
    try:
        frame = json.loads(data)
    except RecursionError as error:  # brackets in brackets
        raise ValueError("a frame that is nested too deep") from error
    if not isinstance(frame, dict):
        raise ValueError(f"a frame is an object, not {frame!r:.100}")
    return frame


def _whole(data: bytearray, longest_bytes: int) -> bytearray:
    reader = zlib.decompressobj()
    try:
        whole = reader.decompress(data, longest_bytes)
    except zlib.error as error:
        raise ValueError(f"a compressed frame that is damaged ({error})") from error
    if not reader.eof:
        raise ValueError(f"frame of more than {longest_bytes} bytes once it is decompressed")
    return bytearray(whole)


def receive_descriptor(sock: socket.socket, timeout_s: float, check: Check | None = None) -> int:
    """Take the descriptor that the peer of a Unix socket sends with a byte of its own.

    Raises TimeoutError, ConnectionError where none comes, and what `check` raises.
    """
    _await(sock, select.POLLIN, time.monotonic() + timeout_s, check)
    _, fds, _, _ = socket.recv_fds(sock, 1, 1)
    if not fds:
        raise ConnectionError("no descriptor came")
    os.set_inheritable(fds[0], False)
    return fds[0]


def _await(sock: socket.socket, event: int, deadline_s: float, check: Check | None) -> None:
    poll = select.poll()
    poll.register(sock, event)
    while (wait_s := deadline_s - time.monotonic()) > 0:
        if check is not None:
            check()
            wait_s = min(wait_s, CHECK_EVERY_S)
        if poll.poll(1000 * wait_s):
            return
    raise TimeoutError("timed out")


def _receive(sock: socket.socket, length: int, deadline_s: float, check: Check | None) -> bytearray:
    """Memory grows with what comes: a length alone costs its receiver nothing."""
    data = bytearray(min(length, _READ_BYTES))
    receive_into(sock, memoryview(data), deadline_s, check)
    while len(data) < length:
        piece = bytearray(min(length - len(data), len(data)))
        receive_into(sock, memoryview(piece), deadline_s, check)
        data += piece
    return data
