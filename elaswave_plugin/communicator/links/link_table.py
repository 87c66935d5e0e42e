"""The link table: operations of a worker over its links to the others, epoch by epoch."""

import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from elaswave_plugin.communicator.links import detached
from elaswave_plugin.communicator.links.body_calls import Body
from elaswave_plugin.communicator.links.buffers import Scratch
from elaswave_plugin.communicator.links.connection import Connection, State
from elaswave_plugin.communicator.links.connections import Connections
from elaswave_plugin.communicator.links.frames import FrameHeader, Kind
from elaswave_plugin.communicator.links.operation import (
    Inbound,
    Mailbox,
    Operation,
    Receive,
    Send,
    Steps,
)
from elaswave_plugin.core.agreement.hang import NOBODY, OUTSIDE
from elaswave_plugin.errors import EpochChanged, LinkError, PeerError
from elaswave_plugin.ipc import silence
from elaswave_plugin.ipc.progress_page import ProgressPage
from elaswave_plugin.ipc.secret import Secret

_LONGEST_POLL_S = 3600.0
_CLOSE_LIMIT_S = 30.0


class LinkTable:
    """All links of one worker.

    One lock guards all state. A thread that waits for an operation drives the sockets itself (no
    switch on the critical path); the progress thread drives them while none waits.
    """

    def __init__(
        self,
        slot: int,
        host: str = "127.0.0.1",
        *,
        secret: Secret,
        on_link_lost: Callable[[int, str, bool], None] | None = None,
        progress: ProgressPage | None = None,
    ) -> None:
        """Listen on an ephemeral port of `host`, and note the awaited workers in `progress`.

        Both ends of a link prove `secret` before a message is read.
        `on_link_lost(slot, reason, silent)` is a hint that a link broke which an operation needs,
        or that its other end answers nothing; it is called outside the lock, once a link. The
        operation goes on waiting.
        """
        self.slot = slot
        self.epoch = 0
        # Without an epoch, groups of several are answered by `detached.py` where this is set.
        self.detached = False
        # Called with the name and the members of each call of a group before it starts.
        self.watch: Callable[[str, Sequence[int]], None] | None = None
        # Called before that, and where the size of a group is asked for.
        self.asked: Callable[[], None] | None = None
        # Whose calls these are while a script is between two steps of a loop that we own.
        self.body: Body | None = None
        self.scratch = Scratch()
        self.sent_bytes = 0
        self.received_bytes = 0
        # How long operations have been waited for, by all threads together.
        self.waited_s = 0.0
        self._on_link_lost = on_link_lost
        self.page = progress or ProgressPage()
        """Where this worker tells how far it is."""
        self._lock = threading.Lock()
        self._mailbox = Mailbox()
        self._live: set[Operation] = set()
        self._awaited: list[Operation] = []
        self._sequences: dict[int, int] = {}
        self._after: list[Callable[[], None]] = []
        self._interrupted: tuple[int, str] | None = None
        self._closed = False
        self._poller = 0
        # How long the sockets may be left to themselves.
        self._look_again_s = silence.LOOK_EVERY_S
        self.connections = Connections(
            slot, host, secret=secret, messages=self, on_broken=self._broke
        )
        self.address = self.connections.address
        # The sockets sit in an epoll set of their own, which sits in the progress thread's set, so
        # that a waiting caller takes all of them over with a single system call.
        self._sockets = self.connections.sockets
        self._kick = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._sockets.register(self._kick, select.EPOLLIN)
        self._top = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._top.register(self._wake, select.EPOLLIN)
        self._top.register(self._sockets.fileno(), select.EPOLLIN)
        self._thread = threading.Thread(
            target=self._progress, name=f"elaswave-links-{slot}", daemon=True
        )
        self._thread.start()

    # ---- epochs ------------------------------------------------------------------------------

    @contextmanager
    def with_body(self, body: Body | None) -> Iterator[None]:
        """Inside, calls are those of this body."""
        before, self.body = self.body, body
        try:
            yield
        finally:
            self.body = before

    def open_epoch(self, epoch: int, addresses: Mapping[int, str]) -> None:
        """Enter a committed epoch whose members listen at `addresses` (slot -> "host:port").

        Links to other slots are closed, what is left of older epochs ends with EpochChanged.
        Raises LinkError when the epoch does not rise.
        """
        with self._locked():
            if epoch <= self.epoch:
                raise LinkError(f"view {epoch} cannot be opened after view {self.epoch}")
            self._abandon(EpochChanged(epoch, "the view was opened"))
            self.sent_bytes = self.received_bytes = 0
            self.epoch = epoch
            self.detached = False
            self._sequences.clear()
            # First: with those that came early, messages of this epoch come.
            self._mailbox.enter(epoch, set(addresses))
            self.connections.enter(epoch, addresses)
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

    def _abandon(self, error: BaseException) -> None:
        for operation in list(self._live):
            operation.fail(error)
        self.connections.drop_messages()

    def close(self) -> None:
        """End all operations with LinkError, close all sockets and join the thread. Idempotent.

        Raises LinkError where the thread goes on for longer than it takes to look once.
        """
        with self._locked():
            if self._closed:
                return
            self._closed = True
            self._abandon(LinkError("the link table was closed"))
            os.eventfd_write(self._wake, 1)
            os.eventfd_write(self._kick, 1)
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_LIMIT_S)  # it ends at its next look
            if self._thread.is_alive():
                raise LinkError(
                    f"the links of slot {self.slot} are not closed after {_CLOSE_LIMIT_S:g} s: "
                    f"their thread is held up at {_place_of(self._thread)}"
                )

    def _dispose(self) -> None:
        self.connections.close()
        self._top.close()
        os.close(self._wake)
        os.close(self._kick)

    # ---- operations --------------------------------------------------------------------------

    def run(self, operation: Operation, steps: Callable[[Operation], Steps]) -> None:
        """Start an operation: it runs here as far as it can. Raises EpochChanged, LinkError."""
        with self._locked():
            if self._closed:
                steps = self._after_the_end(operation)
            elif self._interrupted is not None:
                raise EpochChanged(*self._interrupted)
            if operation.size > 1 and not self.epoch and not self.detached:
                raise LinkError(f"{operation.describe()}: no view is open")
            if operation.tag is None:
                group = operation.group.number
                operation.sequence = self._sequences.get(group, 0)
                # What is answered here the other members have not begun.
                self._sequences[group] = operation.sequence + (not self.detached)
            operation.deadline_s = time.monotonic() + operation.timeout_s
            self._live.add(operation)
            self.page.count_operation()
            self._end_if_failed_elsewhere(operation)
            operation.begin(steps(operation))

    def _after_the_end(self, operation: Operation) -> Callable[[Operation], Steps]:
        """Complete barriers and refuse all else, as workers leave together."""
        if operation.name != "barrier":
            raise LinkError(
                f"{operation.describe()}: this worker has left the job, with all its links closed;"
                " make its last collective before the training loop ends"
            )
        return detached.barrier

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
            self._top.modify(self._sockets.fileno(), 0)
            return True

    def _hand_back(self, operation: Operation) -> None:
        with self._lock:
            self._poller = 0
            operation.kick = False
            self._awaits_no_more(operation)
            if not self._closed:
                self._top.modify(self._sockets.fileno(), select.EPOLLIN)

    def _awaits_no_more(self, operation: Operation) -> None:
        if operation in self._awaited:  # not where it was done before the wait began
            self._awaited.remove(operation)
            self._tell_whom_we_await()

    def _tell_whom_we_await(self) -> None:
        """Of several threads that wait the newest counts; every byte that moves is progress."""
        if not self._awaited:
            return self.page.waits_for(NOBODY)
        operation = self._awaited[-1]
        waiting = operation.waiting
        peer = OUTSIDE if waiting is None or waiting.peer < 0 else waiting.peer
        self.page.waits_for(peer, operation.number)

    def _drive(self, operation: Operation, deadline_s: float) -> None:
        while not operation.done:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or self._closed:
                return
            events = self._sockets.poll(min(left_s, self._look_again_s))
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
                link = self.connections.links.get(waiting.peer)
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
        link = self.connections.link_to(send.peer)
        idle = not link.outgoing
        link.outgoing.append(send)
        if link.state is State.CLOSED:
            self._report(link)
        if idle and link.state is State.OPEN:
            self.connections.write(link)

    def post_receive(self, receive: Receive, sources: tuple[int, ...]) -> None:
        """Ask for a message."""
        self._mailbox.post(receive, sources)
        link = self.connections.links.get(receive.peer)
        if link is not None and link.state is State.CLOSED and not receive.done:
            self._report(link)

    def withdraw(self, receive: Receive) -> None:
        """Never write into the memory of this receive again."""
        self._mailbox.withdraw(receive)

    def recall(self, send: Send) -> None:
        """Send no more of this message than the frame that has begun to leave."""
        link = self.connections.links.get(send.peer)
        if link is not None:
            link.recall(send)

    def finished(self, operation: Operation) -> None:
        """Wake the waiters of the operation; tell the other members if it failed here."""
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
        """Tell the members of an operation that one gave up, so that none waits for it."""
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
            if slot != self.slot and slot in self.connections.addresses:
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

    def _broke(self, link: Connection) -> None:
        """A broken link is only a hint: its operations go on waiting for the interruption."""
        if any(operation.needs(link.peer) for operation in self._live):
            self._report(link)

    def _report(self, link: Connection) -> None:
        """Tell once that a link is needed and broken; a worker that is done may close its own."""
        callback = self._on_link_lost
        if link.reported or callback is None or self._closed or self._interrupted is not None:
            return
        link.reported = True
        self._after.append(lambda: callback(link.peer, link.why_closed, link.was_silent))

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
            self._top.poll(self._look_again_s)
            with self._locked():
                if self._closed:
                    if not self._poller:
                        self._dispose()
                        return
                elif not self._poller:
                    self._handle(self._sockets.poll(0))

    def _handle(self, events: list[tuple[int, int]]) -> None:
        for descriptor, event in events:
            if descriptor == self._kick:
                os.eventfd_read(self._kick)
            else:
                self.connections.serve(descriptor, event)
        self._look_again_s = self.connections.end_late()
        # A look at silent links moves no byte: a wait goes on, and counts as one.
        if self._awaited and events:
            self._tell_whom_we_await()


def _place_of(thread: threading.Thread) -> str:
    """The call that a thread is in, as file:line."""
    frame = sys._current_frames().get(thread.ident or 0)
    return "its end" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
