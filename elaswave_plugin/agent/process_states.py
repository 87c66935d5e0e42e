"""The times for which a trainer did not run: stopped, in the kernel, or without a processor."""

import os
import time
from typing import NamedTuple

from elaswave_plugin.ipc.process_tree import IN_KERNEL, RUNNABLE, STOPPED, state_of

_NS = 1_000_000_000
# Younger standstills are no concern of anybody's.
_SHORT_S = 0.1


class ProcessStates:
    """The state of one process, as far as it is looked at."""

    def __init__(self) -> None:
        self._state = ""
        self._since_s = self._looked_s = 0.0
        self._progress_s = 0.0
        self.held_s = 0.0
        """Seconds since its last progress in which no signal could have ended it."""

    def look(self, pid: int, *, progress_s: float, awake_s: float) -> None:
        """Look again; `progress_s`: when it last made progress, `awake_s`: when this process ran.

        Both on the monotonic clock. What was before `awake_s` does not count.
        """
        now_s, state, before = time.monotonic(), state_of(pid), self._state
        if progress_s != self._progress_s:
            self._progress_s, self.held_s = progress_s, 0.0
        if state != before:
            self._state, self._since_s = state, now_s
        elif state == IN_KERNEL:
            self.held_s += now_s - max(self._looked_s, awake_s)
        self._since_s = max(self._since_s, awake_s)
        self._looked_s = now_s

    @property
    def stopped_s(self) -> float | None:
        """The seconds for which a signal has stopped it; None: it has not."""
        return self._looked_s - self._since_s if self._state == STOPPED else None

    @property
    def in_kernel_s(self) -> float | None:
        """The seconds for which it sleeps where no signal wakes it; None: it does not."""
        return self._looked_s - self._since_s if self._state == IN_KERNEL else None


class _Scheduled(NamedTuple):
    """Counts that Linux keeps of a thread: times on a processor and in line for one, and turns."""

    ran_ns: int
    waited_ns: int
    turns: int


class ProcessorWaits:
    """The waits of a process since it last made progress, as far as it has been watched."""

    def __init__(self) -> None:
        self._since_s = self._total_s = 0.0
        # By thread, all its waits at the last call.
        self._waited_s: dict[int, float] = {}
        # By thread, what was counted last, and since when it stands in line with that.
        self._in_line: dict[int, tuple[_Scheduled, float]] = {}

    def since(self, since_s: float, pid: int) -> float:
        """Seconds in which a thread waited, from one call to the next those of one thread.

        Threads wait in turn where one has what another one needs, as Python's lock. Counted from
        the first call with this `since_s` on, of the monotonic clock. Linux counts a wait when it
        is over: one that lasts is that of a runnable thread of which nothing is counted.
        """
        now_s = time.monotonic()
        if now_s - since_s < _SHORT_S:
            return 0.0
        counted = _scheduled(pid)
        if since_s != self._since_s:
            self._since_s, self._total_s = since_s, 0.0
            self._waited_s, self._in_line = {}, {}
        if not counted:  # it has ended
            return 0.0
        for tid, one in counted.items():
            last, _ = self._in_line.get(tid, (None, now_s))
            if one != last or state_of(tid) != RUNNABLE:
                self._in_line[tid] = one, now_s
        longest_s = 0.0
        for tid, one in counted.items():
            waited_s = one.waited_ns / _NS + now_s - self._in_line[tid][1]
            longest_s = max(longest_s, waited_s - self._waited_s.get(tid, waited_s))
            self._waited_s[tid] = waited_s
        self._total_s += longest_s
        return self._total_s


def _scheduled(pid: int) -> dict[int, _Scheduled]:
    """Return what is counted by thread; nothing where the process ends.

    Nothing either where the kernel does not count. Source: Linux,
    Documentation/scheduler/sched-stats.
    """
    found = {}
    try:
        for tid in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{tid}/schedstat", "rb") as file:
                found[int(tid)] = _Scheduled(*map(int, file.read().split()))
    except (FileNotFoundError, ProcessLookupError):
        pass  # a thread has ended meanwhile: those that were read count
    return found
