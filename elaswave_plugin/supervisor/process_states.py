"""The times for which a trainer did not run: a signal has stopped it, or the kernel held it."""

from __future__ import annotations

import time

from elaswave_plugin.ipc.process_tree import IN_KERNEL, STOPPED, state_of


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
