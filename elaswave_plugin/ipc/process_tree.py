"""Ties the life of a process to that of its parent, and ends what a dead one had started."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from elaswave_plugin.ipc.reactor import Reactor

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
SIGNALS_TO_END = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""The signals by which people, launchers and schedulers tell a process of a job to end."""
STOPPED, IN_KERNEL, RUNNABLE = "T", "D", "R"
"""States of a process: a signal has stopped it; it sleeps in the kernel, and no signal wakes it."""


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends; exit at once if it has ended.

    Call it in the child; `parent_pid` is the parent as it was before the fork.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        os._exit(128 + signal.SIGKILL)


def adopt_orphans() -> None:
    """Have the kernel make this process the parent of what its descendants leave behind."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def own_children() -> set[int]:
    """Return the children of this process. Source: Linux, proc(5), task/TID/children."""
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # a thread has ended meanwhile
            found |= {*map(int, (task / "children").read_text().split())}
    return found


def exit_at_once(code: int) -> NoReturn:
    """End this process without its exit functions, which may wait for others; its output is out."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # nobody reads it any more
            stream.flush()
    os._exit(code)


def close_all_but(kept: set[int]) -> None:
    """Close all descriptors but these and the standard streams, after a fork."""
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        if fd > 2 and fd not in kept:
            # One of them is the descriptor of the listing itself, closed by now.
            with contextlib.suppress(OSError):
                os.close(fd)


def lead_group() -> None:
    """Make this process the leader of a process group, which its children belong to."""
    os.setpgid(0, 0)


def signal_group(leader_pid: int, number: int) -> bool:
    """Signal what is left of the group of an ended leader; false where nothing is left."""
    try:
        os.killpg(leader_pid, number)
    except ProcessLookupError:
        return False
    return True


def describe_status(status: int) -> tuple[str, int | None]:
    """A wait status in words, and its exit code (None where a signal ended the process)."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        try:
            name = signal.Signals(number).name
        except ValueError:
            name = f"signal {number}"
        return f"killed by {name}", None
    code = os.WEXITSTATUS(status)
    return f"exit code {code}", code


def state_of(pid: int) -> str:
    """Return the kernel's letter for the state of a process; "" where there is none.

    Source: Linux, proc(5).
    """
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0].decode()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def group_members(leader_pid: int) -> Iterator[int]:
    """Yield the processes of a group, as far as they live: a trainer and what it has started."""
    for entry in os.scandir("/proc"):
        # One that is somebody else's may end meanwhile.
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and os.getpgid(int(entry.name)) == leader_pid:
                yield int(entry.name)


def _is_resource_tracker(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


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
            for pid in group_members(leader_pid):
                if not _is_resource_tracker(pid):
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
