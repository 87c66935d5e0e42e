"""The link table: framed messages between workers, one connection a pair, one thread."""

from __future__ import annotations

import os
import secrets
import select
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from elaswave_plugin.core.hang import NOBODY, OUTSIDE
from elaswave_plugin.errors import EpochChanged, LinkError, PeerError
from elaswave_plugin.runtime.buffers import Scratch
from elaswave_plugin.runtime.connection import Connection, State
from elaswave_plugin.runtime.doors import Doors
from elaswave_plugin.runtime.frames import FrameHeader, Hello, Kind
from elaswave_plugin.runtime.mailbox import Mailbox
from elaswave_plugin.runtime.operation import Operation, Steps
from elaswave_plugin.runtime.progress import ProgressPage
from elaswave_plugin.runtime.transfers import Inbound, Receive, Send

_READ = select.EPOLLIN
_WRITE = select.EPOLLOUT
_LONGEST_POLL_S = 3600.0


class LinkTable:
    """All links of one worker.

    One lock guards all state.  Whoever waits for an operation drives the sockets itself (no thread
    switch on the critical path); the progress thread drives them while nobody waits.
    """

    def __init__(
        self,
        slot: int,
        host: str = "127.0.0.1",
        on_link_lost: Callable[[int, str], None] | None = None,
        progress: ProgressPage | None = None,
    ) -> None:
        """Listen on an ephemeral port of `host`, and say in `progress` who is waited for.

        `on_link_lost(slot, reason)` is a hint that a link broke which an operation needs; it is
        called outside the lock, once a link. The operation goes on waiting.
        """
        self.slot = slot
        self.epoch = 0
        # Without an epoch, groups of several are answered by `alone.py` where this is set.
        self.alone = False
        self.scratch = Scratch()
        self.sent_bytes = 0
        self.received_bytes = 0
        # How long operations have been waited for, by all threads together.
        self.waited_s = 0.0
        self.traffic_bytes: dict[int, tuple[int, int]] = {}
        self._on_link_lost = on_link_lost
        self._page = progress or ProgressPage()
        self._lock = threading.Lock()
        self._mailbox = Mailbox()
        self._addresses: dict[int, str] = {}
        self._links: dict[int, Connection] = {}
        self._by_descriptor: dict[int, Connection] = {}
        self._parked: list[Connection] = []
        self._last_link: dict[int, int] = {}
        self._live: set[Operation] = set()
        self._awaited: list[Operation] = []
        self._sequences: dict[int, int] = {}
        self._after: list[Callable[[], None]] = []
        self._interrupted: tuple[int, str] | None = None
        self._closed = False
        self._poller = 0
        self._doors = Doors(host)
        self.address = self._doors.address
        # The sockets sit in an epoll set of their own, which sits in the progress thread's set, so
        # that a waiting caller takes all of them over with a single system call.
        self._data = select.epoll()
        self._kick = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._data.register(self._kick, _READ)
        for descriptor in self._doors.descriptors:
            self._data.register(descriptor, _READ)
        self._top = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._top.register(self._wake, _READ)
        self._top.register(self._data.fileno(), _READ)
        self._thread = threading.Thread(
            target=self._progress, name=f"elaswave-links-{slot}", daemon=True
        )
        self._thread.start()

    # ---- epochs ------------------------------------------------------------------------------

    def open_epoch(self, epoch: int, addresses: Mapping[int, str]) -> None:
        """Enter a committed epoch whose members listen at `addresses` (slot -> "host:port").

        Links to other slots are closed, what is left of older epochs ends with EpochChanged.
        Raises LinkError when the epoch does not rise.
        """
        with self._locked():
            if epoch <= self.epoch:
                raise LinkError(f"epoch {epoch} cannot be opened after epoch {self.epoch}")
            self._abandon(EpochChanged(epoch, "the epoch was opened"))
            self.traffic_bytes[self.epoch] = (self.sent_bytes, self.received_bytes)
            self.sent_bytes = self.received_bytes = 0
            self.epoch = epoch
            self.alone = False
            self._sequences.clear()
            self._addresses = dict(addresses)
            for slot, link in list(self._links.items()):
                if self._addresses.get(slot) != link.address or link.state is State.CLOSED:
                    self._retire(link, "not a member of the epoch")
                    del self._links[slot]
            self._mailbox.enter(epoch, set(self._addresses))
            parked, self._parked = self._parked, []
            for connection in parked:
                if connection.hello is not None and connection.state is State.PARKED:
                    self._welcome(connection, connection.hello)
            if self._interrupted is not None:
                if self._interrupted[0] <= epoch:
                    self._interrupted = None
                else:
                    self._mailbox.shut()

    def interrupt(self, epoch: int, reason: str) -> None:
        """Make every wait and every later operation raise EpochChanged until `epoch` is opened.

        From any thread; returns when nothing of the interrupted epoch can be written any more.
        """
        with self._locked():
            newest = self.epoch if self._interrupted is None else self._interrupted[0]
            if epoch <= newest:
                return
            self._interrupted = (epoch, reason)
            self._mailbox.shut()
            self._abandon(EpochChanged(epoch, reason))

    @property
    def interrupted(self) -> tuple[int, str] | None:
        """The (epoch, reason) of an interruption that has not been answered by open_epoch."""
        return self._interrupted

    def sequence(self, group: int) -> int:
        """Number of collectives that a group (by id) has begun in this epoch."""
        return self._sequences.get(group, 0)

    def forget(self, group: int) -> None:
        """A group (by id) has ended: another one under its name begins at 0."""
        with self._lock:
            self._sequences.pop(group, None)

    @property
    def connected(self) -> tuple[int, ...]:
        """The slots to which a link stands, sorted."""
        with self._lock:
            return tuple(sorted(s for s, c in self._links.items() if c.state is State.OPEN))

    def _abandon(self, error: BaseException) -> None:
        for operation in list(self._live):
            operation.fail(error)
        for link in self._links.values():
            link.drop_outgoing()
            if link.inbound is not None and link.inbound.header.epoch <= self.epoch:
                link.inbound.view = None

    def close(self) -> None:
        """End all operations with LinkError, close all sockets and join the thread. Idempotent."""
        with self._locked():
            if self._closed:
                return
            self._closed = True
            self._abandon(LinkError("the link table was closed"))
            os.eventfd_write(self._wake, 1)
            os.eventfd_write(self._kick, 1)
        if threading.current_thread() is not self._thread:
            self._thread.join(30.0)  # it ends at its next look

    def _dispose(self) -> None:
        for connection in list(self._by_descriptor.values()):
            connection.close("the link table was closed")
        self._by_descriptor.clear()
        self._links.clear()
        self._parked.clear()
        self._doors.close()
        self._data.close()
        self._top.close()
        os.close(self._wake)
        os.close(self._kick)

    # ---- operations --------------------------------------------------------------------------

    def run(self, operation: Operation, steps: Callable[[Operation], Steps]) -> None:
        """Start an operation: it runs here as far as it can. Raises EpochChanged, LinkError."""
        with self._locked():
            if self._interrupted is not None:
                raise EpochChanged(*self._interrupted)
            if self._closed:
                raise LinkError(f"{operation.describe()}: the link table is closed")
            if operation.size > 1 and not self.epoch and not self.alone:
                raise LinkError(f"{operation.describe()}: no epoch is open")
            if operation.tag is None:
                group = operation.group.number
                operation.sequence = self._sequences.get(group, 0)
                self._sequences[group] = operation.sequence + 1
            operation.deadline_s = time.monotonic() + operation.timeout_s
            self._live.add(operation)
            self._page.count_operation()
            self._end_if_failed_elsewhere(operation)
            operation.begin(steps(operation))

    def wait(self, operation: Operation, timeout_s: float | None = None) -> None:
        """Block until the operation is done. Raises its error; LinkError after the timeout."""
        deadline_s = operation.deadline_s
        began_s = time.monotonic()
        if timeout_s is not None:
            deadline_s = min(deadline_s, began_s + timeout_s)
        while not operation.done:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                self._expire(operation)
            elif self._take_over(operation):
                try:
                    self._drive(operation, deadline_s)
                finally:
                    self._hand_back(operation)
            elif operation.event is not None:
                try:
                    operation.event.wait(min(left_s, _LONGEST_POLL_S))
                finally:
                    with self._lock:
                        self._awaits_no_more(operation)
        self.waited_s += time.monotonic() - began_s
        error = operation.error
        if isinstance(error, EpochChanged):
            raise EpochChanged(error.epoch, error.reason)
        if error is not None:
            raise error

    def when_done(self, operation: Operation, callback: Callable[[], None]) -> None:
        """Call back once, outside the lock, when the operation is done."""
        with self._locked():
            if operation.done:
                self._after.append(callback)
            else:
                operation.callbacks.append(callback)

    def _take_over(self, operation: Operation) -> bool:
        with self._lock:
            if operation.done or self._closed:
                return False
            self._awaited.append(operation)
            self._tell_whom_we_await()
            if self._poller:
                if operation.event is None:
                    operation.event = threading.Event()
                return False
            self._poller = threading.get_ident()
            operation.kick = True
            self._top.modify(self._data.fileno(), 0)
            return True

    def _hand_back(self, operation: Operation) -> None:
        with self._lock:
            self._poller = 0
            operation.kick = False
            self._awaits_no_more(operation)
            if not self._closed:
                self._top.modify(self._data.fileno(), _READ)

    def _awaits_no_more(self, operation: Operation) -> None:
        if operation in self._awaited:  # not where it was done before the wait began
            self._awaited.remove(operation)
            self._tell_whom_we_await()

    def _tell_whom_we_await(self) -> None:
        """Of several threads that wait the newest counts; every byte that moves is progress."""
        peer = NOBODY
        if self._awaited:
            waiting = self._awaited[-1].waiting
            peer = OUTSIDE if waiting is None or waiting.peer < 0 else waiting.peer
        self._page.waits_for(peer)

    def _drive(self, operation: Operation, deadline_s: float) -> None:
        while not operation.done:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or self._closed:
                return
            events = self._data.poll(min(left_s, _LONGEST_POLL_S))
            with self._locked():
                self._handle(events)

    def _expire(self, operation: Operation) -> None:
        with self._locked():
            if operation.done:
                return
            waiting = operation.waiting
            what = "its turn"
            if waiting is not None:
                verb = "send to" if isinstance(waiting, Send) else "receive from"
                link = self._links.get(waiting.peer)
                state = "not connected" if link is None else link.why_closed or link.state.value
                what = f"{verb} slot {waiting.peer} ({len(waiting.view)} bytes; link {state})"
            operation.fail(
                LinkError(
                    f"{operation.describe()}: timed out ({operation.timeout_s:g} s for the "
                    f"operation) while it waited to {what}"
                )
            )

    # ---- what operations call, under the lock ------------------------------------------------

    def post_send(self, send: Send) -> None:
        """Queue a message; it leaves at once where the socket takes it."""
        if send.peer == self.slot:
            self._to_self(send)
            return
        link = self._links.get(send.peer) or self._dial(send.peer)
        idle = not link.outgoing
        link.outgoing.append(send)
        if link.state is State.CLOSED:
            self._report(link)
        if idle and link.state is State.OPEN:
            self._write(link)

    def post_receive(self, receive: Receive, sources: tuple[int, ...]) -> None:
        """Ask for a message."""
        self._mailbox.post(receive, sources)
        link = self._links.get(receive.peer)
        if link is not None and link.state is State.CLOSED and not receive.done:
            self._report(link)

    def withdraw(self, receive: Receive) -> None:
        """Never write into the memory of this receive again."""
        self._mailbox.withdraw(receive)

    def recall(self, send: Send) -> None:
        """Send no more of this message than the frame that has begun to leave."""
        link = self._links.get(send.peer)
        if link is not None:
            link.recall(send)

    def finished(self, operation: Operation) -> None:
        """Wake whoever waits for the operation; tell the other members if it failed here."""
        self._live.discard(operation)
        error = operation.error
        if isinstance(error, LinkError) and not isinstance(error, PeerError) and not self._closed:
            self._tell_failure(operation, str(error))
        if operation.event is not None:
            operation.event.set()
        if operation.kick and self._poller != threading.get_ident():
            os.eventfd_write(self._kick, 1)
        self._after.extend(operation.callbacks)
        operation.callbacks = []

    def _tell_failure(self, operation: Operation, text: str) -> None:
        """Nobody shall wait until a timeout for a member that has given up."""
        if operation.kind is not Kind.COLLECTIVE:
            return
        view = memoryview(text.encode())
        group, sequence = operation.group.number, operation.sequence
        header = FrameHeader(
            Kind.FAILURE,
            operation.code,
            0,
            0,
            0,
            self.epoch,
            group,
            sequence,
            len(view),
            len(view),
            0,
        )
        for slot in operation.group.members:
            if slot != self.slot and slot in self._addresses:
                self.post_send(Send(view, slot, header, None))

    def _end_if_failed_elsewhere(self, operation: Operation) -> None:
        if operation.kind is not Kind.COLLECTIVE:
            return
        group = operation.group
        failure = self._mailbox.failure_elsewhere(group.number, operation.sequence)
        if failure is not None:
            slot, text = failure
            rank = group.members.index(slot) if slot in group.members else "?"
            operation.fail(
                PeerError(f"{operation.describe()}: rank {rank} (slot {slot}) gave up: {text}")
            )

    def _to_self(self, send: Send) -> None:
        inbound = self._mailbox.arriving(self.slot, send.header)
        if inbound.view is not None:
            inbound.view[:] = send.view
        inbound.received = len(send.view)
        self._mailbox.arrived(inbound)
        send.complete()

    # ---- what connections call, under the lock -----------------------------------------------

    def arriving(self, connection: Connection, header: FrameHeader) -> Inbound:
        """A message begins."""
        return self._mailbox.arriving(connection.peer, header)

    def arrived(self, inbound: Inbound) -> None:
        """A message is complete."""
        self._mailbox.arrived(inbound)
        if inbound.header.kind == Kind.FAILURE:
            for operation in list(self._live):
                self._end_if_failed_elsewhere(operation)

    def count(self, sent_bytes: int, received_bytes: int) -> None:
        """Account for traffic, headers included."""
        self.sent_bytes += sent_bytes
        self.received_bytes += received_bytes

    def greeted(self, connection: Connection, hello: Hello) -> None:
        """Somebody dialled us and says who it is."""
        self._welcome(connection, hello)

    def accepted(self, connection: Connection) -> None:
        """The peer took our connection as the link."""
        connection.state = State.OPEN
        self._last_link[connection.peer] = connection.number
        self._write(connection)

    # ---- connections -------------------------------------------------------------------------

    def _dial(self, slot: int) -> Connection:
        address = self._addresses.get(slot)
        if address is None:
            raise LinkError(
                f"slot {slot} is not a member of epoch {self.epoch} "
                f"(members {sorted(self._addresses)})"
            )
        sock, error = self._doors.dial(address)
        link = Connection(self, sock, State.DIALLING, slot)
        link.address = address
        link.number = secrets.randbits(62) | 1
        self._links[slot] = link
        self._admit(link, _READ | _WRITE)
        if error is not None:
            self._lost(link, error)
        return link

    def _admit(self, connection: Connection, events: int) -> None:
        self._by_descriptor[connection.descriptor] = connection
        self._data.register(connection.descriptor, events)
        connection.watched = events

    def _watch(self, connection: Connection, events: int) -> None:
        if connection.watched != events:
            self._data.modify(connection.descriptor, events)
            connection.watched = events

    def _greet(self, link: Connection) -> None:
        replaces = self._last_link.get(link.peer, 0)
        hello = Hello(self.slot, self.address, self.epoch, link.number, replaces)
        try:
            link.greet(hello)
        except BlockingIOError:
            return  # an old event of another socket with this descriptor: not connected yet
        self._watch(link, _READ)

    def _accept_all(self) -> None:
        for sock in self._doors.accept_all():
            self._admit(Connection(self, sock, State.INCOMING), _READ)

    def _welcome(self, connection: Connection, hello: Hello) -> None:
        """Take a greeted connection as the link to its slot, keep it for later, or refuse it."""
        connection.hello = hello
        if self._addresses.get(hello.slot) != hello.address:
            if hello.epoch > self.epoch:
                connection.state = State.PARKED
                self._watch(connection, 0)
                self._parked.append(connection)
            else:
                self._retire(connection, f"slot {hello.slot} is not a member")
            return
        old = self._links.get(hello.slot)
        if old is not None and self._overtaken(old, hello):
            self._retire(connection, "crossed with our own")
            return
        connection.peer = hello.slot
        connection.number = self._last_link[hello.slot] = hello.link
        connection.address = hello.address
        self._links[hello.slot] = connection
        if old is not None:
            connection.outgoing.extend(old.unstarted())
            old.outgoing.clear()
            self._retire(old, "replaced")
        try:
            connection.accept()
            self._watch(connection, _READ)
            self._write(connection)
            connection.parse()
        except (OSError, LinkError) as error:
            self._lost(connection, error)

    def _overtaken(self, old: Connection, hello: Hello) -> bool:
        """Both sides dialled: the connection of the lower slot becomes (or is) the link."""
        if old.state is State.OPEN:
            return hello.replaces != old.number
        return old.state is not State.CLOSED and self.slot < hello.slot

    def _write(self, link: Connection) -> None:
        try:
            link.write()
        except (BrokenPipeError, ConnectionResetError):
            # The peer has gone. What it sent before is still to be read, and its end comes after.
            self._watch(link, _READ)
            return
        except OSError as error:
            self._lost(link, error)
            return
        self._watch(link, _READ | _WRITE if link.outgoing else _READ)

    def _retire(self, connection: Connection, why: str) -> None:
        if connection.state is not State.CLOSED:
            self._by_descriptor.pop(connection.descriptor, None)
            self._data.unregister(connection.descriptor)
            connection.close(why)

    def _lost(self, connection: Connection, error: Exception) -> None:
        """A broken link is only a hint: its operations go on waiting for the interruption."""
        # A connection that ends while it greets may merely have crossed with the peer's own.
        broken = connection.state in (State.DIALLING, State.OPEN)
        self._retire(connection, f"broken: {error}")
        peer = connection.peer
        stands = broken and self._links.get(peer) is connection
        if stands and any(operation.needs(peer) for operation in self._live):
            self._report(connection)

    def _report(self, link: Connection) -> None:
        """Tell once that a link is needed and broken; a worker that is done may close its own."""
        callback = self._on_link_lost
        if link.reported or callback is None or self._closed or self._interrupted is not None:
            return
        link.reported = True
        self._after.append(lambda: callback(link.peer, link.why_closed))

    # ---- progress ----------------------------------------------------------------------------

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock; what was put off until it is free (callbacks) runs afterwards."""
        after: list[Callable[[], None]] = []
        try:
            with self._lock:
                try:
                    yield
                finally:
                    after, self._after = self._after, after
        finally:
            for callback in after:
                callback()

    def _progress(self) -> None:
        try:
            self._progress_until_closed()
        except BaseException as error:
            with self._locked():
                self._abandon(LinkError(f"the progress thread of slot {self.slot} died: {error!r}"))
            raise

    def _progress_until_closed(self) -> None:
        while True:
            self._top.poll()
            with self._locked():
                if self._closed:
                    if not self._poller:
                        self._dispose()
                        return
                elif not self._poller:
                    self._handle(self._data.poll(0))

    def _handle(self, events: list[tuple[int, int]]) -> None:
        for descriptor, event in events:
            connection = self._by_descriptor.get(descriptor)
            if connection is not None:
                self._serve(connection, event)
            elif descriptor == self._kick:
                os.eventfd_read(self._kick)
            elif descriptor in self._doors.descriptors:
                self._accept_all()
        if self._awaited:
            self._tell_whom_we_await()

    def _serve(self, connection: Connection, event: int) -> None:
        try:
            if connection.state is State.DIALLING:
                self._greet(connection)
            elif event & ~_WRITE:
                if connection.state is State.PARKED:
                    self._retire(connection, "gone before its epoch")
                else:
                    connection.read()
            if event & _WRITE and connection.state is State.OPEN:
                self._write(connection)
        except (OSError, LinkError) as error:
            self._lost(connection, error)
