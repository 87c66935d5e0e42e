"""Matches arriving messages with posted receives, epoch by epoch; all calls under one lock."""

from collections import deque

from elaswave_plugin.communicator.links.frames import DTYPES, OPERATIONS, FrameHeader, Kind
from elaswave_plugin.communicator.links.transfers import ANY_SOURCE, Inbound, Key, Receive
from elaswave_plugin.errors import MismatchError


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
