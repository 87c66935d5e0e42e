"""Starts one trainer, by exec or from a zygote, and reports its end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from elaswave_plugin.ipc.environment import CONTROL_FD, SNAPSHOT_FDS, Program
from elaswave_plugin.ipc.process_tree import describe_status, die_with_parent, lead_group
from elaswave_plugin.ipc.progress_page import PROGRESS_FD
from elaswave_plugin.ipc.reactor import Reactor
from elaswave_plugin.ipc.wire import Frame, FrameBuffer, encode

OnExit = Callable[[str, int | None], None]
OnStart = Callable[[int], None]
_STATUS_WAIT_S = 0.5
_OF_THE_SUPERVISOR = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """The inheritance of a trainer: environment, control link, snapshot memory, progress page."""

    env: Mapping[str, str]
    control: socket.socket
    snapshot_fds: Sequence[int]
    progress_fd: int

    @property
    def fds(self) -> list[int]:
        """All descriptors, in the order in which a zygote hands them on."""
        return [self.control.fileno(), self.progress_fd, *self.snapshot_fds]


class ExecTrainer:
    """A trainer in a fresh interpreter, a child of this process."""

    def __init__(self, program: Program, given: Given) -> None:
        names = {
            CONTROL_FD: str(given.control.fileno()),
            PROGRESS_FD: str(given.progress_fd),
            SNAPSHOT_FDS: ",".join(map(str, given.snapshot_fds)),
        }
        self._parent_pid = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            self._exec(program, {**given.env, **names}, given.fds)
        self._pidfd = os.pidfd_open(self.pid)

    def attach(self, reactor: Reactor, *, on_start: OnStart, on_exit: OnExit) -> None:
        """Have the reactor call `on_start(pid)` and, once, `on_exit(evidence, exit code)`."""

        def ended() -> None:
            reactor.unwatch(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
            on_exit(*describe_status(os.waitpid(self.pid, 0)[1]))

        on_start(self.pid)
        reactor.watch(self._pidfd, ended)

    def send_signal(self, number: int) -> None:
        """Signal the trainer if it still runs."""
        if self._pidfd >= 0:
            signal.pidfd_send_signal(self._pidfd, number)

    def _exec(self, program: Program, env: Mapping[str, str], fds: Sequence[int]) -> None:
        try:
            die_with_parent(self._parent_pid)
            lead_group()
            for fd in fds:
                os.set_inheritable(fd, True)
            for number in (*_OF_THE_SUPERVISOR, signal.SIGPIPE):
                signal.signal(number, signal.SIG_DFL)
            os.execve(sys.executable, program.command(), env)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(127)


class ZygoteTrainer:
    """A trainer forked by a zygote, which tells how it ended.

    One at a time uses the connection, which stays open for the next. Raises OSError where there
    is no zygote any more.
    """

    def __init__(self, program: Program, given: Given, *, zygote: socket.socket) -> None:
        self.pid = 0
        self.zygote_lives = True
        self._zygote = zygote
        self._buffer = FrameBuffer()
        self._pidfd = -1
        self._ended = False
        self._pending_signal = 0
        request: Frame = {
            "script": program.script,
            "args": list(program.args),
            "module": program.module,
            "env": dict(given.env),
            "cwd": os.getcwd(),
            "fds": 7,
        }
        data = encode(request)
        sent = socket.send_fds(zygote, [data], [0, 1, 2, *given.fds])
        zygote.sendall(data[sent:])

    def attach(self, reactor: Reactor, *, on_start: OnStart, on_exit: OnExit) -> None:
        """Have the reactor call `on_start(pid)` and, once, `on_exit(evidence, exit code)`."""

        def end(evidence: str, code: int | None) -> None:
            if not self._ended:
                self._ended = True
                reactor.unwatch(self._zygote.fileno())
                if self._pidfd >= 0:
                    reactor.unwatch(self._pidfd)
                    os.close(self._pidfd)
                    self._pidfd = -1
                on_exit(evidence, code)

        def gone() -> None:
            # The zygote, its parent, is about to say how; do not wait for ever for that.
            reactor.unwatch(self._pidfd)
            reactor.after(_STATUS_WAIT_S, lambda: end("gone (its zygote did not say how)", None))

        def read() -> None:
            try:
                data, fds, _, _ = socket.recv_fds(self._zygote, 4096, 4)
            except ConnectionError:  # it ended with a request unread
                data, fds = b"", []
            if fds:
                self._pidfd = fds[0]
                reactor.watch(self._pidfd, gone)
            if not data:
                self.zygote_lives = False
                end("gone with its zygote, which ended", None)
            for frame in self._buffer.feed(data):
                if "pid" in frame:
                    self.pid = frame["pid"]
                    on_start(self.pid)
                    if self._pending_signal:
                        self.send_signal(self._pending_signal)
                elif "error" in frame:
                    end(f"not started: {frame['error']}", frame["exit_code"])
                elif frame["pid_ended"] == self.pid:  # and not that of an earlier trainer
                    end(*describe_status(frame["status"]))

        reactor.watch(self._zygote.fileno(), read)

    def send_signal(self, number: int) -> None:
        """Signal the trainer if it still runs, or as soon as it does."""
        if self._pidfd < 0:
            self._pending_signal = number
            return
        # One that the zygote has reaped is reported by it.
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)
