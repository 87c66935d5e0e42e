"""Ends what a trainer that has ended had started: a checkpoint writer, a data loader."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from elaswave_plugin.ipc.process_tree import signal_group
from elaswave_plugin.ipc.reactor import Reactor


class Orphans:
    """The process groups that ended trainers have led, until nothing is left of them."""

    def __init__(self, reactor: Reactor, *, grace_s: float) -> None:
        """SIGKILL comes `grace_s` seconds after SIGTERM."""
        self._reactor = reactor
        self._grace_s = grace_s
        self._leaders: set[int] = set()

    def end_now(self, leader_pid: int) -> None:
        """End what a lost trainer had started by SIGKILL: a writer of its could still write.

        The others write the same checkpoint again. A script that handles SIGTERM hands that on to
        the processes that it forks, so that it would end none of them. Python's resource tracker
        writes nothing, and frees shared memory: it has its time.
        """
        if leader_pid and signal_group(leader_pid, signal.SIGSTOP):
            for pid in _group(leader_pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            signal_group(leader_pid, signal.SIGCONT)
            self.end(leader_pid)

    def end(self, leader_pid: int) -> None:
        """End what is left of the group of a trainer that has ended.

        Only a group that still has members is signalled again, so that its number is not reused.
        """
        if leader_pid and signal_group(leader_pid, signal.SIGTERM):
            self._leaders.add(leader_pid)
            self._reactor.after(self._grace_s, self.kill)

    def finish(self) -> None:
        """Wait for all that are left, for `grace_s` at most: they may have shared memory to free.

        The reactor has stopped by then.
        """
        until_s = time.monotonic() + self._grace_s
        while any(signal_group(leader, 0) for leader in self._leaders):
            if time.monotonic() > until_s:
                return self.kill()
            time.sleep(0.01)  # they are no children of ours: nothing tells of their end

    def kill(self) -> None:
        """SIGKILL to all that are left, at once."""
        while self._leaders:
            signal_group(self._leaders.pop(), signal.SIGKILL)


def _group(leader_pid: int) -> Iterator[int]:
    """The members of a group that is stopped, except for resource trackers."""
    for entry in os.scandir("/proc"):
        # One that is somebody else's may end meanwhile.
        with contextlib.suppress(OSError):
            is_member = entry.name.isdigit() and os.getpgid(int(entry.name)) == leader_pid
            command = Path(entry.path, "cmdline").read_bytes() if is_member else b""
            if is_member and b"resource_tracker" not in command:
                yield int(entry.name)
