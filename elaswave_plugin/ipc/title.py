"""Shows in the process list which worker a process belongs to (standard library only)."""

import ctypes
import sys

# Fields of /proc/PID/stat after the name: where the command line begins and ends in memory.
_ARG_START, _ARG_END = 45, 46


def set_title(role: str) -> None:
    """Write `role` and the script's arguments over the command line that `ps` shows.

    They have the room of the command line with which the process was started, and the rest is cut
    off. The environment behind it and the name of the process ("python") stay as they are.
    """
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    start, end = int(fields[_ARG_START]), int(fields[_ARG_END])
    room = end - start - 1
    if start and room > 0:
        text = " ".join([f"elaswave {role}:", *sys.argv]).encode(errors="replace")
        ctypes.memmove(start, text[:room].ljust(room + 1, b"\0"), room + 1)
