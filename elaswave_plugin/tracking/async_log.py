"""An event log for a thread that must not wait for a file system (standard library only)."""

import os
from collections.abc import Mapping
from queue import SimpleQueue
from threading import Thread
from typing import Any

from elaswave_plugin.tracking.events import EventLog

_MOST_LINES = 10_000
_FLUSH_S = 5.0


class AsyncLog(EventLog):
    """The same, in the same order, written by a thread of its own that starts with the first line.

    An agent that stood still with a file server would be taken for lost. Lines beyond a bound
    are dropped, and those that are not out within some seconds of `close`.
    """

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        super().__init__(path)
        # One without a lock of Python's: the agent would wait until a thread that has it is run
        # again, on a busy machine for long.
        self._lines: SimpleQueue[Mapping[str, Any] | None] = SimpleQueue()
        self._thread: Thread | None = None

    def write(self, record: Mapping[str, Any]) -> None:
        """Append the record in the end; must not be changed any more."""
        if self.path is None:
            return
        if self._thread is None:
            self._thread = Thread(target=self._write_all, name="event-log", daemon=True)
            self._thread.start()
        if self._lines.qsize() < _MOST_LINES:
            self._lines.put(record)
        else:
            self.lost_lines += 1

    def close(self) -> None:
        """Wait for what is queued, but no longer than some seconds."""
        if self._thread is not None:
            if self._lines.qsize() >= _MOST_LINES:
                return
            self._lines.put(None)
            self._thread.join(_FLUSH_S)
            if self._thread.is_alive():
                return  # it still has the file; the process ends soon
        super().close()

    def _write_all(self) -> None:
        while (record := self._lines.get()) is not None:
            super().write(record)
