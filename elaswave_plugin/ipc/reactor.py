"""One thread's event loop: readable and writable files, timers, and calls from other threads."""

import heapq
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable

Action = Callable[[], None]
LONGEST_WAIT_S = 60.0
_READ = select.EPOLLIN
_WRITE = select.EPOLLOUT


class Reactor:
    """Waits for files and timers and calls back; `after_round` runs once after each batch."""

    def __init__(self) -> None:
        self.after_round: Action = lambda: None
        self._poller = select.epoll()
        self._calls: dict[int, tuple[Action, Action | None]] = {}
        self._timers: list[tuple[float, int, Action]] = []
        self._sequence = 0
        self._posted: deque[Action] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.watch(self._wake_fd, self._run_posted)
        self._running = False

    def watch(self, fd: int, on_readable: Action, on_writable: Action | None = None) -> None:
        """Call `on_readable` (and `on_writable`, if given) while the descriptor is ready."""
        known = self._calls.get(fd)
        self._calls[fd] = on_readable, on_writable
        events = _READ if on_writable is None else _READ | _WRITE
        if known is None:
            self._poller.register(fd, events)
        elif (known[1] is None) is not (on_writable is None):
            self._poller.modify(fd, events)

    def unwatch(self, fd: int) -> None:
        """Forget a descriptor; do this before closing it."""
        if self._calls.pop(fd, None) is not None:
            self._poller.unregister(fd)

    def after(self, delay_s: float, action: Action) -> None:
        """Call `action` once, `delay_s` seconds from now."""
        self._sequence += 1
        heapq.heappush(self._timers, (time.monotonic() + delay_s, self._sequence, action))

    def post(self, action: Action) -> None:
        """Call `action` soon in the loop's thread; may be called from any thread or a signal."""
        self._posted.append(action)
        os.eventfd_write(self._wake_fd, 1)

    def stop(self) -> None:
        """Leave `run` after this batch."""
        self._running = False

    def run(self) -> None:
        """Serve until `stop`."""
        self._running = True
        self.after_round()
        while self._running:
            wait_s = LONGEST_WAIT_S
            if self._timers:
                wait_s = max(0.0, min(wait_s, self._timers[0][0] - time.monotonic()))
            batch = [(fd, ready, self._calls[fd]) for fd, ready in self._poller.poll(wait_s)]
            for fd, ready, calls in batch:
                self._dispatch(fd, ready, calls)
            self._run_timers()
            self.after_round()

    def close(self) -> None:
        """Release the loop's own descriptors."""
        self._poller.close()
        os.close(self._wake_fd)

    def _dispatch(self, fd: int, ready: int, calls: tuple[Action, Action | None]) -> None:
        # An earlier callback of this batch may have closed this file, or put another in its place.
        if self._calls.get(fd) is not calls:
            return
        on_readable, on_writable = calls
        if on_writable is not None and ready & ~_READ:
            on_writable()
        if ready & ~_WRITE and fd in self._calls:
            on_readable()

    def _run_timers(self) -> None:
        now_s = time.monotonic()
        while self._timers and self._timers[0][0] <= now_s:
            heapq.heappop(self._timers)[2]()

    def _run_posted(self) -> None:
        os.eventfd_read(self._wake_fd)
        for _ in range(len(self._posted)):
            self._posted.popleft()()


def is_readable(source: int | socket.socket, within_s: float) -> bool:
    """Return whether it can be read, or has ended, within this time; also the fd of a process.

    Of any number: ``select.select`` refuses 1024 and more, as a process with many open files has.
    """
    poll = select.poll()
    poll.register(source, select.POLLIN)
    return bool(poll.poll(1000 * max(0.0, within_s)))
