"""A running operation, and its messages: posted by a generator, matched as they arrive.

The generator is resumed when what it needs next is done.
"""

import threading
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Protocol

import torch

from elaswave_plugin.communicator.links.buffers import Scratch
from elaswave_plugin.communicator.links.frames import (
    DTYPES,
    FRAME_BYTES,
    OPERATIONS,
    FrameHeader,
    Kind,
)
from elaswave_plugin.errors import MismatchError

Key = tuple[int, int, int, int, int]
"""(peer slot, group id, kind, sequence or tag, part): what matches a message to its receive."""

ANY_SOURCE = -1


class Transfer:
    """Something that an operation can wait for."""

    __slots__ = ("done", "operation", "peer", "view")

    def __init__(self, view: memoryview, peer: int, operation: "Operation | None") -> None:
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

    def __init__(self, view: memoryview, key: Key, whole: int, operation: "Operation") -> None:
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
        self, view: memoryview, peer: int, header: FrameHeader, operation: "Operation | None"
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


_LARGEST_NUMBER = (1 << 63) - 1

Steps = Generator[Transfer, None, None]
"""What a collective is: it yields the transfer that it needs next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A group as one member sees it; `members` are slots in rank order.

    Frames carry `number`, by which all members know the group; `label` is for messages.
    """

    number: int
    label: str
    members: tuple[int, ...]
    rank: int

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.members)


class Engine(Protocol):
    """The part of the link table that an operation needs; every call is made under its lock."""

    epoch: int
    scratch: Scratch

    def post_send(self, send: Send) -> None:
        """Queue a message."""

    def post_receive(self, receive: Receive, sources: tuple[int, ...]) -> None:
        """Match a message that is to come; from any of `sources`, if there are some."""

    def withdraw(self, receive: Receive) -> None:
        """Expect it no more."""

    def recall(self, send: Send) -> None:
        """Send no more of it than the frame that is on its way."""

    def finished(self, operation: "Operation") -> None:
        """Forget an operation that has ended."""


class Operation:
    """One collective or point-to-point call of one member."""

    def __init__(
        self,
        engine: Engine,
        group: Group,
        name: str,
        *,
        timeout_s: float,
        dtype: str = "any",
        tag: int | None = None,
        result: list[torch.Tensor] | None = None,
    ) -> None:
        self.group = group
        self.name = name
        self.timeout_s = timeout_s
        self.tag = tag
        self.kind = Kind.COLLECTIVE if tag is None else Kind.POINT
        self.sequence = 0 if tag is None else tag
        self.result: list[torch.Tensor] = [] if result is None else result
        self.done = False
        self.error: BaseException | None = None
        self.event: threading.Event | None = None
        self.kick = False
        self.waiting: Transfer | None = None
        self.source_rank = -1
        self.deadline_s = 0.0
        self.callbacks: list[Callable[[], None]] = []
        self._engine = engine
        self.code = OPERATIONS.index("send" if tag is not None else name)
        self.dtype = DTYPES.index(dtype)
        self._steps: Steps | None = None
        self._running = False
        self._receives: list[Receive] = []
        self._sends: list[Send] = []
        self._borrowed: list[memoryview] = []

    @property
    def rank(self) -> int:
        """Our rank in the group."""
        return self.group.rank

    @property
    def size(self) -> int:
        """Size of the group."""
        return self.group.size

    @property
    def number(self) -> int:
        """One for all members; almost never that of another operation."""
        return (self.group.number ^ (self.sequence << 8 | int(self.kind))) & _LARGEST_NUMBER

    def others(self) -> list[int]:
        """The other ranks, starting behind our own so that not all talk to rank 0 first."""
        size, rank = self.group.size, self.group.rank
        return [(rank + step) % size for step in range(1, size)]

    def send(self, rank: int, view: memoryview, *, part: int = 0, whole: int | None = None) -> Send:
        """Post a send to a member; the memory must stay unchanged until the operation is done."""
        length = len(view)
        header = FrameHeader(
            self.kind,
            self.code,
            self.dtype,
            part,
            0,
            self._engine.epoch,
            self.group.number,
            self.sequence,
            length if whole is None else whole,
            length,
            0,
        )
        send = Send(view, self.group.members[rank], header, self)
        self._engine.post_send(send)
        if not send.done:
            self._sends.append(send)
        return send

    def receive(
        self,
        rank: int,
        view: memoryview,
        *,
        part: int = 0,
        whole: int | None = None,
        tag: int | None = None,
    ) -> Receive:
        """Post a receive of exactly len(view) bytes from a member (ANY_SOURCE: from any).

        ``tag``: that of the sending operation, where it is not our own.
        """
        members = self.group.members
        slot = ANY_SOURCE if rank == ANY_SOURCE else members[rank]
        sequence = self.sequence if tag is None else tag
        key: Key = (slot, self.group.number, int(self.kind), sequence, part)
        receive = Receive(view, key, len(view) if whole is None else whole, self)
        self._receives.append(receive)
        self._engine.post_receive(receive, members if rank == ANY_SOURCE else ())
        if self.error is not None:
            raise self.error
        return receive

    def borrow(self, size_bytes: int) -> memoryview:
        """Scratch memory that is ours until the operation is done."""
        view = self._engine.scratch.take(size_bytes)
        self._borrowed.append(view)
        return view

    def begin(self, steps: Steps) -> None:
        """Run up to the first transfer that is not done yet."""
        self._steps = self._until_sent(steps)
        self.advance()

    def _until_sent(self, steps: Steps) -> Steps:
        yield from steps
        yield from self._sends

    def advance(self) -> None:
        """Run on until the next transfer that is not done, or to the end."""
        self.waiting = None
        steps = self._steps
        if self.done or steps is None:
            return
        self._running = True
        try:
            for transfer in steps:
                if not transfer.done:
                    self.waiting = transfer
                    return
        except Exception as error:  # the driver of the sockets does not wait for this
            self.fail(error)
            return
        finally:
            self._running = False
        if not self.done:
            for view in self._borrowed:
                self._engine.scratch.give_back(view)
            self._finish(None)

    def fail(self, error: BaseException) -> None:
        """End with an error: nothing is written into the caller's memory from here on."""
        if self.done:
            return
        for receive in self._receives:
            if not receive.done:
                self._engine.withdraw(receive)
        for send in self._sends:
            if not send.done:
                self._engine.recall(send)
        steps = self._steps
        self.result = []
        self._finish(error)
        if steps is not None and not self._running:
            steps.close()

    def _finish(self, error: BaseException | None) -> None:
        self.error = error
        self.waiting = None
        self._steps = None
        self._receives = []
        self._sends = []
        self._borrowed = []
        self.done = True
        self._engine.finished(self)

    def needs(self, slot: int) -> bool:
        """Return whether it still has to hear from this peer, or to be heard by it."""
        transfers: list[Transfer] = [*self._receives, *self._sends]
        return any(one.peer == slot and not one.done for one in transfers)

    def describe(self) -> str:
        """The operation in words, for messages."""
        number = f"#{self.sequence}" if self.tag is None else f"tag {self.tag}"
        group = self.group
        return (
            f"{self.name} {number} in group {group.label!r} "
            f"(slots {group.members}, this is rank {group.rank})"
        )


class Mailbox:
    """The receives that were asked for, and the messages that have come unasked.

    Messages of an older epoch are thrown away, of a newer one kept until that epoch is opened.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.open = False
        self._posted: dict[Key, deque[Receive]] = {}
        self._unexpected: dict[Key, deque[Inbound]] = {}
        self._future: dict[int, list[Inbound]] = {}
        self._failures: dict[tuple[int, int], Inbound] = {}

    def shut(self) -> None:
        """Leave the epoch: forget its receives and messages, drop what still arrives of it."""
        self.open = False
        self._posted.clear()
        self._unexpected.clear()
        self._failures.clear()

    def enter(self, epoch: int, slots: set[int]) -> None:
        """Open an epoch: deliver what came early from `slots`, forget older epochs."""
        self.shut()
        self.epoch = epoch
        self.open = True
        for inbound in self._future.pop(epoch, []):
            if inbound.header.kind == Kind.FAILURE:
                if inbound.complete:
                    self.arrived(inbound)
            elif inbound.key[0] in slots:
                self._unexpected.setdefault(inbound.key, deque()).append(inbound)
        for old in [e for e in self._future if e < epoch]:
            del self._future[old]

    def arriving(self, slot: int, header: FrameHeader) -> Inbound:
        """Decide where a message goes that begins with this header."""
        key: Key = (slot, header.group, header.kind, header.sequence, header.part)
        if header.epoch < self.epoch or (header.epoch == self.epoch and not self.open):
            return Inbound(header, key, None)
        if header.epoch > self.epoch:
            inbound = Inbound(header, key, _fresh(header.length))
            self._future.setdefault(header.epoch, []).append(inbound)
            return inbound
        if header.kind == Kind.FAILURE:
            return Inbound(header, key, _fresh(header.length))
        receive = self._posted_for(key)
        if receive is None:
            inbound = Inbound(header, key, _fresh(header.length))
            self._unexpected.setdefault(key, deque()).append(inbound)
            return inbound
        if _mismatch(receive, header, slot):
            return Inbound(header, key, None)
        inbound = Inbound(header, key, receive.view)
        self._bind(receive, inbound)
        return inbound

    def arrived(self, inbound: Inbound) -> None:
        """A message is complete."""
        header = inbound.header
        if header.kind == Kind.FAILURE and header.epoch == self.epoch and self.open:
            self._failures[header.group, header.sequence] = inbound
        receive = inbound.receive
        if receive is not None and inbound.view is not None:
            inbound.receive = None
            receive.inbound = None
            receive.complete()

    def failure_elsewhere(self, group: int, sequence: int) -> tuple[int, str] | None:
        """The slot of a peer whose part of this collective has failed, and why, if one has."""
        inbound = self._failures.get((group, sequence))
        if inbound is None or inbound.view is None:
            return None
        return inbound.key[0], bytes(inbound.view).decode(errors="replace")

    def post(self, receive: Receive, sources: tuple[int, ...]) -> None:
        """Ask for a message; `sources` are the candidates of an any-source receive."""
        for slot in sources or (receive.key[0],):
            key = (slot, *receive.key[1:])
            queue = self._unexpected.get(key)
            if queue:
                inbound = queue.popleft()
                if not queue:
                    del self._unexpected[key]
                self._adopt(receive, inbound)
                return
        self._posted.setdefault(receive.key, deque()).append(receive)

    def withdraw(self, receive: Receive) -> None:
        """The receive's memory is no longer ours to write."""
        queue = self._posted.get(receive.key)
        if queue is not None and receive in queue:
            queue.remove(receive)
        inbound = receive.inbound
        if inbound is not None:
            inbound.view = None
            inbound.receive = None
            receive.inbound = None

    def _posted_for(self, key: Key) -> Receive | None:
        for candidate in (key, (ANY_SOURCE, *key[1:])):
            queue = self._posted.get(candidate)
            if queue:
                receive = queue.popleft()
                if not queue:
                    del self._posted[candidate]
                return receive
        return None

    def _adopt(self, receive: Receive, inbound: Inbound) -> None:
        """Hand an unexpected message over, in the middle of its arrival if need be."""
        if _mismatch(receive, inbound.header, inbound.key[0]):
            inbound.view = None
            return
        arrived = inbound.view
        if arrived is not None:
            receive.view[: inbound.received] = arrived[: inbound.received]
        inbound.view = receive.view
        self._bind(receive, inbound)
        if inbound.complete:
            self.arrived(inbound)

    @staticmethod
    def _bind(receive: Receive, inbound: Inbound) -> None:
        receive.inbound = inbound
        receive.peer = inbound.key[0]
        inbound.receive = receive


def _fresh(length: int) -> memoryview:
    return memoryview(bytearray(length))


def _mismatch(receive: Receive, header: FrameHeader, slot: int) -> bool:
    """Fail the operation when the two sides do not mean the same thing."""
    operation = receive.operation
    if operation is None:
        return True
    ours, size = operation.group.rank, len(receive.view)
    members = operation.group.members
    there = f"rank {members.index(slot) if slot in members else '?'} (slot {slot})"
    if header.op != operation.code:
        what = (
            f"{there} runs {OPERATIONS[header.op]} there; all members must call the same "
            "operations in the same order"
        )
    elif header.dtype and operation.dtype and header.dtype != operation.dtype:
        what = (
            f"{there} has a tensor of {DTYPES[header.dtype]}, rank {ours} one of "
            f"{DTYPES[operation.dtype]}; the tensors must have the same dtype"
        )
    elif header.length != size or header.whole != receive.whole:
        what = (
            f"{there} sends {header.length} of its {header.whole} bytes, rank {ours} expects "
            f"{size} of its {receive.whole} bytes; the tensors must have equal sizes"
        )
    else:
        return False
    operation.fail(MismatchError(f"{operation.describe()}: {what}"))
    return True
