"""One thread's event loop: readable and writable files, timers, and calls from other threads."""

from __future__ import annotations

import heapq
import os
import selectors
import time
from collections import deque
from collections.abc import Callable

Action = Callable[[], None]
LONGEST_WAIT_S = 60.0


class Reactor:
    """Waits for files and timers and calls back; `after_round` runs once after each batch."""

    def __init__(self) -> None:
        self.after_round: Action = _nothing
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, Action]] = []
        self._sequence = 0
        self._posted: deque[Action] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._wake_fd, selectors.EVENT_READ, self._run_posted)
        self._running = False

    def watch(self, fd: int, on_readable: Action, on_writable: Action | None = None) -> None:
        """Call `on_readable` (and `on_writable`, if given) while the descriptor is ready."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if on_writable else 0)
        call = on_readable if on_writable is None else (on_readable, on_writable)
        if fd in self._selector.get_map():
            self._selector.modify(fd, events, call)
        else:
            self._selector.register(fd, events, call)

    def unwatch(self, fd: int) -> None:
        """Forget a descriptor; do this before closing it."""
        if fd in self._selector.get_map():
            self._selector.unregister(fd)

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
            for key, ready in self._selector.select(wait_s):
                self._dispatch(key, ready)
            self._run_timers()
            self.after_round()

    def close(self) -> None:
        """Release the loop's own descriptors."""
        self._selector.close()
        os.close(self._wake_fd)

    def _dispatch(self, key: selectors.SelectorKey, ready: int) -> None:
        # An earlier callback of this batch may have closed this file, or put another in its place.
        current = self._selector.get_map().get(key.fd)
        if current is None or current.data is not key.data:
            return
        if not isinstance(key.data, tuple):
            key.data()
            return
        on_readable, on_writable = key.data
        if ready & selectors.EVENT_WRITE:
            on_writable()
        if ready & selectors.EVENT_READ and key.fd in self._selector.get_map():
            on_readable()

    def _run_timers(self) -> None:
        now_s = time.monotonic()
        while self._timers and self._timers[0][0] <= now_s:
            heapq.heappop(self._timers)[2]()

    def _run_posted(self) -> None:
        os.eventfd_read(self._wake_fd)
        for _ in range(len(self._posted)):
            self._posted.popleft()()


def _nothing() -> None:
    pass
