"""One connection to a peer: a queue of messages going out, a parser for what comes in."""

import socket
import time
from collections import deque
from contextlib import suppress
from enum import Enum
from typing import Protocol

from elaswave_plugin.communicator.links.frames import (
    HEADER_BYTES,
    FrameHeader,
    Hello,
    Kind,
    control_header,
)
from elaswave_plugin.communicator.links.operation import Inbound, Send
from elaswave_plugin.errors import LinkError
from elaswave_plugin.ipc import silence
from elaswave_plugin.ipc.secret import (
    ANSWER_BYTES,
    OPENING_BYTES,
    PROOF_BYTES,
    Accepting,
    Dialling,
)

_STAGING_BYTES = 64 << 10
_DIRECT_BYTES = 16 << 10
_TURN_BYTES = 4 << 20
_DISCARD_BYTES = 256 << 10
# So much behind the rest of a large frame is read with the same call: the next header, mostly.
_PEEK_BYTES = 4 << 10


class State(Enum):
    """The life of a connection; only an OPEN one carries messages."""

    DIALLING = "dialling"
    PROVING = "proving"
    GREETING = "greeting"
    INCOMING = "incoming"
    PROVED = "proved"
    PARKED = "parked"
    OPEN = "open"
    CLOSED = "closed"


class HandshakeSide(Protocol):
    """The side that decides whether a connection becomes the link to its peer."""

    def proved(self, connection: "Connection") -> None:
        """The other end has proved the secret."""

    def answered(self, connection: "Connection") -> None:
        """The side that accepts has answered."""

    def greeted(self, connection: "Connection", hello: Hello) -> None:
        """The first message has come."""

    def accepted(self, connection: "Connection") -> None:
        """The other end uses this connection."""


class MessageSide(Protocol):
    """The side that takes the messages of a connection."""

    def arriving(self, connection: "Connection", header: FrameHeader) -> Inbound:
        """Return where a message goes that begins to arrive."""

    def arrived(self, inbound: Inbound) -> None:
        """All of a message is here."""

    def count(self, sent_bytes: int, received_bytes: int) -> None:
        """Count bytes that have gone and come."""


class Connection:
    """A non-blocking socket with its state; every call is made under the table's lock."""

    def __init__(
        self,
        handshake: HandshakeSide,
        messages: MessageSide,
        sock: socket.socket,
        state: State,
        proof: Accepting | Dialling,
        peer: int = -1,
    ) -> None:
        """``proof``: its side of the handshake."""
        self.sock = sock
        self.descriptor = sock.fileno()
        self.state = state
        self.peer = peer
        self.address = ""
        self.number = 0
        self.hello: Hello | None = None
        self.why_closed = ""
        # It was closed because the other machine answered nothing.
        self.was_silent = False
        self._since_s = time.monotonic()
        self.reported = False
        self.watched = 0
        self.outgoing: deque[Send] = deque()
        self.inbound: Inbound | None = None
        self._handshake = handshake
        self._proof = proof
        self._proof_left = OPENING_BYTES if isinstance(proof, Accepting) else ANSWER_BYTES
        self._messages = messages
        self._frame_left = 0
        self._greeting: FrameHeader | None = None
        self._staging = bytearray(_STAGING_BYTES)
        self._staged = memoryview(self._staging)
        self._start = 0
        self._end = 0

    def open(self) -> None:
        """Begin the handshake, as soon as the connection stands; raises OSError if it does not."""
        assert isinstance(self._proof, Dialling)
        error = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, "connect failed")
        self._say(self._proof.opening)
        self.state = State.PROVING

    @property
    def is_far(self) -> bool:
        """True if it stands, or is dialled, over a network."""
        return self.state is not State.CLOSED and self.sock.family is not socket.AF_UNIX

    @property
    def is_silent(self) -> bool:
        """True if the other machine has answered nothing for too long; of TCP connections only."""
        age_s = time.monotonic() - self._since_s
        if self.state is State.DIALLING:
            return age_s > silence.DIAL_LIMIT_S
        return age_s > silence.LIMIT_S and silence.answers(self.sock).silent_s > silence.LIMIT_S

    def greet(self, hello: Hello) -> None:
        """Say which worker dials."""
        self._say(hello.pack())
        self.state = State.GREETING

    def accept(self) -> None:
        """Tell the dialling side that this connection is the link."""
        self.state = State.OPEN
        self._say(control_header(Kind.ACCEPT, 0).pack())

    def _say(self, message: bytes) -> None:
        # The first bytes on a fresh connection always fit into the socket buffer.
        if self.sock.send(message) != len(message):
            raise OSError("the greeting did not fit into an empty socket buffer")

    def write(self) -> None:
        """Send as much as the socket takes. Raises OSError when the link is broken."""
        budget = _TURN_BYTES
        while self.outgoing and budget > 0:
            send = self.outgoing[0]
            try:
                count = self.sock.sendmsg(send.buffers())
            except (BlockingIOError, InterruptedError):
                return
            budget -= count
            self._messages.count(count, 0)
            if send.advance(count):
                self.outgoing.popleft()
                send.complete()

    def drop_outgoing(self) -> None:
        """Forget the queue, except the rest of a frame that the peer has begun to read."""
        head = self.outgoing[0] if self.outgoing else None
        self.outgoing.clear()
        if head is not None and head.mid_frame and self.state is State.OPEN:
            head.cut()
            self.outgoing.append(head)

    def recall(self, send: Send) -> None:
        """Take a message back; of what has begun to leave, the peer gets the current frame."""
        if send not in self.outgoing:
            return
        if send is self.outgoing[0] and send.mid_frame:
            send.cut()
        else:
            self.outgoing.remove(send)

    def unstarted(self) -> list[Send]:
        """The queued messages of which nothing has left."""
        return [s for s in self.outgoing if s.position == 0 and not s.mid_frame]

    def read(self) -> None:
        """Take in what has come. Raises OSError or LinkError when the link is broken."""
        budget = _TURN_BYTES
        while budget > 0 and self.state not in (State.CLOSED, State.PARKED):
            direct = self._frame_left >= _DIRECT_BYTES and self._start == self._end
            try:
                wanted, count = self._read_payload() if direct else self._read_staging()
            except (BlockingIOError, InterruptedError):
                return
            if count == 0:
                raise ConnectionResetError("closed by the peer")
            budget -= count
            self._messages.count(0, count)
            if count < wanted:
                return

    def _read_payload(self) -> tuple[int, int]:
        inbound = self.inbound
        wanted = self._frame_left
        if inbound is None or inbound.view is None:
            wanted = min(wanted, _DISCARD_BYTES)
            count = self.sock.recv_into(bytearray(wanted))
            self._took(count)
            return wanted, count
        at = inbound.received
        into = [inbound.view[at : at + wanted], self._staged[:_PEEK_BYTES]]
        count = self.sock.recvmsg_into(into)[0]
        self._took(min(count, wanted))
        if count > wanted:
            self._end = count - wanted
            self.parse()
        return wanted + _PEEK_BYTES, count

    def _read_staging(self) -> tuple[int, int]:
        room = self._staged[self._end :]
        count = self.sock.recv_into(room)
        self._end += count
        self.parse()
        return len(room), count

    def parse(self) -> None:
        """Work through the staged bytes."""
        while self.state not in (State.CLOSED, State.PARKED):
            available = self._end - self._start
            if self._proof_left:
                if available < self._proof_left:
                    break
                self._take_proof()
            elif self._greeting is not None:
                if available < self._greeting.size:
                    break
                self._control(self._greeting)
            elif self._frame_left:
                if not available:
                    break
                self._unstage(min(available, self._frame_left))
            elif available < HEADER_BYTES:
                break
            else:
                header = FrameHeader.unpack(self._staging, self._start)
                self._start += HEADER_BYTES
                self._begin(header)
        self._compact()

    def _take_proof(self) -> None:
        """The next part of the handshake is there. Raises HandshakeError."""
        part = self._staged[self._start : self._start + self._proof_left]
        self._start += self._proof_left
        if isinstance(self._proof, Dialling):
            self._proof_left = 0
            self._say(self._proof.answered(part))
            self._handshake.answered(self)
        elif self._proof_left == OPENING_BYTES:
            self._proof_left = PROOF_BYTES
            self._say(self._proof.opened(part))
        else:
            self._proof_left = 0
            self._proof.proved(part)
            self.state = State.PROVED
            self._handshake.proved(self)

    def _compact(self) -> None:
        rest = self._end - self._start
        if self._start and rest:
            self._staging[:rest] = self._staging[self._start : self._end]
        self._start, self._end = 0, rest

    def _unstage(self, count: int) -> None:
        inbound = self.inbound
        if inbound is not None and inbound.view is not None:
            at = inbound.received
            inbound.view[at : at + count] = self._staged[self._start : self._start + count]
        self._start += count
        self._took(count)

    def _took(self, count: int) -> None:
        self._frame_left -= count
        inbound = self.inbound
        if inbound is None:
            return
        inbound.received += count
        if self._frame_left == 0 and inbound.complete:
            self.inbound = None
            self._messages.arrived(inbound)

    def _begin(self, header: FrameHeader) -> None:
        if header.kind in (Kind.HELLO, Kind.ACCEPT):
            self._greeting = header
            return
        if self.state is not State.OPEN:
            raise LinkError(f"data on a connection that is {self.state.value}")
        if header.offset == 0:
            self.inbound = self._messages.arriving(self, header)
        elif self.inbound is None or header.offset != self.inbound.received:
            raise LinkError(f"a frame at offset {header.offset} continues no message")
        self._frame_left = header.size
        if header.size == 0:
            self._took(0)

    def _control(self, header: FrameHeader) -> None:
        if header.size > _STAGING_BYTES // 2:
            raise LinkError(f"a greeting of {header.size} bytes")
        payload = bytes(self._staged[self._start : self._start + header.size])
        self._start += header.size
        self._greeting = None
        if header.kind == Kind.ACCEPT and self.state is State.GREETING:
            self._handshake.accepted(self)
        elif header.kind == Kind.HELLO and self.state is State.PROVED:
            self._handshake.greeted(self, Hello.unpack(payload))
        else:
            raise LinkError(f"control frame {header.kind} while {self.state.value}")

    def _discard_unread(self) -> None:
        # Closed with unread bytes, a socket resets its peer, who then loses our last messages too.
        for _ in range(_TURN_BYTES // _STAGING_BYTES):
            if not self.sock.recv_into(self._staged):
                return

    def close(self, why: str) -> None:
        """Close the socket; the queue stays for the next connection, and what was sent arrives."""
        if self.state is not State.CLOSED:
            self.state = State.CLOSED
            self.why_closed = why
            # A forked child (a data loader) may hold the descriptor too: end the connection itself.
            with suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)
                self._discard_unread()
            self.sock.close()
            self.inbound = None
