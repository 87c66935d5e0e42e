"""Ties the life of a process to that of its parent, and of its children to its own."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from typing import NoReturn

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends; exit at once if it has ended.

    Call it in the child; `parent_pid` is the parent as it was before the fork.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        os._exit(128 + signal.SIGKILL)


def exit_at_once(code: int) -> NoReturn:
    """End this process without its exit functions, which may wait for others; its output is out."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # nobody reads it any more
            stream.flush()
    os._exit(code)


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


def is_stopped(pid: int) -> bool:
    """Return whether a signal or a debugger has stopped a process; false where there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state = file.read().rpartition(b")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state in (b"T", b"t")
