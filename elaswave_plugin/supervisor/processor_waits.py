"""The time that a process waited for a processor: it made no progress then, and did not hang."""

from __future__ import annotations

import os
import time

_NS = 1_000_000_000
# Younger standstills are no concern of anybody's.
_SHORT_S = 0.1


class ProcessorWaits:
    """The waits of a process since it last made progress, as far as it has been watched."""

    def __init__(self) -> None:
        self._since_s = 0.0
        self._before: dict[int, int] = {}

    def since(self, since_s: float, pid: int) -> float:
        """Seconds that the thread that waited longest did; `since_s` on the monotonic clock.

        Counted from the first call with this `since_s` on.
        """
        if time.monotonic() - since_s < _SHORT_S:
            return 0.0
        waited = _waited_ns(pid)
        if since_s != self._since_s:
            self._since_s, self._before = since_s, waited
        longest = max((ns - self._before.get(tid, ns) for tid, ns in waited.items()), default=0)
        return longest / _NS


def _waited_ns(pid: int) -> dict[int, int]:
    """Return the waits by thread, as Linux counts them; nothing where the process ends.

    Nothing either where the kernel does not count them. Source: Linux,
    Documentation/scheduler/sched-stats.
    """
    found = {}
    try:
        for tid in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{tid}/schedstat", "rb") as file:
                found[int(tid)] = int(file.read().split()[1])
    except (FileNotFoundError, ProcessLookupError):
        pass  # a thread has ended meanwhile: those that were read count
    return found
