"""Sees that a signal has ended a process before the kernel has freed its memory.

The memory of a process goes first when it ends, then its descriptors, and only then is its parent
told: 0.1 to 0.2 s for each GB of it. Each of its threads is marked as it begins to end; from then
on it runs nothing of its program, and no system call of it is under way.
Source: Linux, kernel/exit.c, do_exit(); include/linux/sched.h, PF_EXITING; proc(5).
"""

from __future__ import annotations

import os
from pathlib import Path

_PF_EXITING = 0x4
# Places behind the name in /proc/PID/stat: the flags, the resident pages, the exit status.
_FLAGS, _PAGES, _STATUS = 6, 21, 49


def resident_bytes(pid: int) -> int:
    """Bytes of memory that a process has; 0 where it is gone, or ends."""
    try:
        return int(_fields(Path(f"/proc/{pid}"))[_PAGES]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def dying_by(pid: int) -> int:
    """Return the signal that ends a process all of whose threads have begun to end; 0 if none."""
    try:
        threads = [_fields(one) for one in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:  # it is gone, and its parent is told otherwise
        return 0
    if not threads or not all(int(one[_FLAGS]) & _PF_EXITING for one in threads):
        return 0
    return os.WTERMSIG(int(threads[0][_STATUS]))


def _fields(folder: Path) -> list[bytes]:
    """Raises OSError where the process or thread is gone."""
    return (folder / "stat").read_bytes().rpartition(b")")[2].split()
