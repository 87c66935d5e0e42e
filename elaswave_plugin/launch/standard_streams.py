"""Keeps a job from its output: closed standard streams, and pipes whose reader goes away.

Standard library only.
"""

import contextlib
import os
import signal
import stat
import sys
from collections.abc import Iterator, Sequence
from typing import NoReturn

from elaswave_plugin.ipc.reactor import is_readable

_OUTPUTS = (1, 2)
# What still has our output after the job may keep it: its lines are handed on after our end.
_LAST_WORDS_S = 2.0


def fill_closed_streams() -> None:
    """Open /dev/null in the place of each standard stream that is closed.

    Else what is opened next gets its number, and every child prints into that.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= max(_OUTPUTS):
        os.set_inheritable(fd, True)
    os.close(fd)
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            # By these numbers only: an agent closes all others, and what it opens next gets
            # them. What it said on a stream of another number went into its snapshot memory.
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115


@contextlib.contextmanager
def relayed_output() -> Iterator[None]:
    """Have output that goes to a pipe or socket pass through a process that outlives its reader.

    A script that prints to a pipe that is read no more gets an error and dies of it. Here
    it prints to the relay, which drops what is not taken. This process must have no other thread.
    """
    fds_of: dict[tuple[int, int], list[int]] = {}
    for fd in _OUTPUTS:
        status = os.fstat(fd)
        if stat.S_ISFIFO(status.st_mode) or stat.S_ISSOCK(status.st_mode):
            fds_of.setdefault((status.st_dev, status.st_ino), []).append(fd)
    relays = [_Relay(fds) for fds in fds_of.values()]
    try:
        yield
    finally:
        for relay in relays:
            relay.end()


class _Relay:
    """A process between these descriptors, which are one file, and what was behind them."""

    def __init__(self, fds: Sequence[int]) -> None:
        _flush()
        ours, theirs = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            _hand_on(ours, fds[0])
        os.close(ours)
        self._behind = {fd: os.dup(fd) for fd in fds}
        for fd in fds:
            os.dup2(theirs, fd)
        os.close(theirs)

    def end(self) -> None:
        """Print to the former stream, once all is handed on; nowhere if it is not read."""
        _flush()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for fd in self._behind:
            os.dup2(nowhere, fd)
        pidfd = os.pidfd_open(self._pid)
        if is_readable(pidfd, _LAST_WORDS_S):
            is_read = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1]) == 0
            for fd, behind in self._behind.items():
                if is_read:
                    os.dup2(behind, fd)
        for fd in (pidfd, nowhere, *self._behind.values()):
            os.close(fd)


def _hand_on(source: int, target: int) -> NoReturn:
    """Be the relay, until no process can write any more; exit code 0 where all of it was taken."""
    # The terminal and the scheduler mean the job, whose last words are still to come.
    os.setpgid(0, 0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    for name in os.listdir("/proc/self/fd"):
        # The listing has a descriptor itself, closed by now; other relays wait for the rest.
        with contextlib.suppress(OSError):
            if int(name) not in (source, target):
                os.close(int(name))
    code = 0
    while data := os.read(source, 1 << 16):
        try:
            while data and code == 0:
                data = data[os.write(target, data) :]
        except OSError:
            code = 1
    os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
