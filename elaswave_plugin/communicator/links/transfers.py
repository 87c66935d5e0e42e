"""One message on its way: a Receive into memory that is owned elsewhere, or a Send out of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elaswave_plugin.communicator.links.frames import FRAME_BYTES, FrameHeader

if TYPE_CHECKING:
    from elaswave_plugin.communicator.links.operation import Operation

Key = tuple[int, int, int, int, int]
"""(peer slot, group id, kind, sequence or tag, part): what matches a message to its receive."""

ANY_SOURCE = -1


class Transfer:
    """Something that an operation can wait for."""

    __slots__ = ("done", "operation", "peer", "view")

    def __init__(self, view: memoryview, peer: int, operation: Operation | None) -> None:
        self.view = view
        self.peer = peer
        self.operation = operation
        self.done = False

    def complete(self) -> None:
        """Mark as done and resume the operation if it waits for this transfer."""
        self.done = True
        operation = self.operation
        self.operation = None
        if operation is not None and operation.waiting is self:
            operation.advance()


class Receive(Transfer):
    """A posted receive of exactly len(view) bytes."""

    __slots__ = ("inbound", "key", "whole")

    def __init__(self, view: memoryview, key: Key, whole: int, operation: Operation) -> None:
        super().__init__(view, key[0], operation)
        self.key = key
        self.whole = whole
        self.inbound: Inbound | None = None


class Inbound:
    """A message that is arriving; `view` is where it goes, None throws it away."""

    __slots__ = ("header", "key", "receive", "received", "view")

    def __init__(self, header: FrameHeader, key: Key, view: memoryview | None) -> None:
        self.header = header
        self.key = key
        self.view = view
        self.received = 0
        self.receive: Receive | None = None

    @property
    def complete(self) -> bool:
        """True when every byte is here."""
        return self.received == self.header.length


class Send(Transfer):
    """A message in the queue of a link, cut into frames as it leaves."""

    __slots__ = ("frame_end", "head", "header", "position")

    def __init__(
        self, view: memoryview, peer: int, header: FrameHeader, operation: Operation | None
    ) -> None:
        super().__init__(view, peer, operation)
        self.header = header
        self.position = 0
        self.frame_end = 0
        self.head: memoryview | None = None
        self._open_frame()

    def _open_frame(self) -> None:
        size = min(FRAME_BYTES, len(self.view) - self.position)
        self.frame_end = self.position + size
        self.head = memoryview(self.header.pack_frame(size, self.position))

    def buffers(self) -> list[memoryview]:
        """List the buffers to hand to sendmsg next."""
        payload = self.view[self.position : self.frame_end]
        return [payload] if self.head is None else [self.head, payload]

    def advance(self, count: int) -> bool:
        """Note that `count` more bytes have left; True when the message is finished."""
        if self.head is not None:
            if count < len(self.head):
                self.head = self.head[count:]
                return False
            count -= len(self.head)
            self.head = None
        self.position += count
        if self.position < self.frame_end:
            return False
        if self.position >= len(self.view):
            return True
        self._open_frame()
        return False

    @property
    def mid_frame(self) -> bool:
        """True when the peer has seen a part of the current frame, so that the rest must follow."""
        return self.head is None or len(self.head) < len(self.header.pack())

    def cut(self) -> None:
        """Keep only the rest of the current frame, in memory of our own, and forget the sender.

        The true bytes are kept: the peer may not know of the interruption yet and use them.
        """
        self.view = memoryview(bytes(self.view[self.position : self.frame_end]))
        self.position = 0
        self.frame_end = len(self.view)
        self.operation = None
