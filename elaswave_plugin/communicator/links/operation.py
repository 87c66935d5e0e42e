"""A running operation: a generator that posts transfers and is resumed when they are done."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from elaswave_plugin.communicator.links.frames import DTYPES, OPERATIONS, FrameHeader, Kind
from elaswave_plugin.communicator.links.transfers import ANY_SOURCE, Key, Receive, Send, Transfer

if TYPE_CHECKING:
    import torch

    from elaswave_plugin.communicator.links.buffers import Scratch

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

    def post_send(self, send: Send) -> None: ...
    def post_receive(self, receive: Receive, sources: tuple[int, ...]) -> None: ...
    def withdraw(self, receive: Receive) -> None: ...
    def recall(self, send: Send) -> None: ...
    def finished(self, operation: Operation) -> None: ...


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
