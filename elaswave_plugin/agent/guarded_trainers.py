"""The trainers of a node: how its guardian starts each, and what they leave behind when they end.

By exec, or by a process that forks trainers: a zygote, which has the frameworks imported, or a task
of a launcher, which has devices and limits of its own. Standard library only.
"""

import contextlib
import os
import signal
import socket
import sys
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from elaswave_plugin.ipc.environment import JOB_SECRET_FD, SNAPSHOT_FDS, Program
from elaswave_plugin.ipc.process_tree import (
    SIGNALS_TO_END,
    Orphans,
    die_with_parent,
    lead_group,
    own_children,
)
from elaswave_plugin.ipc.progress_page import PROGRESS_FD
from elaswave_plugin.ipc.reactor import Reactor
from elaswave_plugin.ipc.wire import Frame, FrameBuffer, encode

_STATUS_WAIT_S = 0.5


@dataclass(frozen=True, slots=True)
class Given:
    """The inheritance of a trainer: environment, secret, progress page, snapshot memory."""

    env: Mapping[str, str]
    secret_fd: int
    progress_fd: int
    snapshot_fds: Sequence[int]

    @property
    def fds(self) -> list[int]:
        """All descriptors, in the order in which they are handed on."""
        return [self.secret_fd, self.progress_fd, *self.snapshot_fds]


class Watcher(Protocol):
    """The one that a starter tells what becomes of a trainer."""

    def started(self, pid: int, pidfd: int) -> None:
        """It runs; the descriptor is the watcher's to close."""

    def ended(self, status: int | None, why: str, exit_code: int | None) -> None:
        """It has ended, by a wait status where one is known; else `why`."""


class Starter(Protocol):
    """A way to start trainers."""

    def start(self, program: Program, given: Given, watcher: Watcher) -> None:
        """Start one. Raises OSError where it cannot any more."""

    def close(self) -> None:
        """Start no more; what runs may be ended with it."""


class ExecStarter:
    """Starts trainers in fresh interpreters, as children of this process."""

    def __init__(self, reactor: Reactor) -> None:
        self._reactor = reactor

    def start(self, program: Program, given: Given, watcher: Watcher) -> None:
        """Fork and exec."""
        names = {
            JOB_SECRET_FD: str(given.secret_fd),
            PROGRESS_FD: str(given.progress_fd),
            SNAPSHOT_FDS: ",".join(map(str, given.snapshot_fds)),
        }
        parent_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            _exec(program, {**given.env, **names}, given.fds, parent_pid)
        watch_child(self._reactor, pid, watcher)

    def close(self) -> None:
        """Nothing of it is left open."""


def watch_child(reactor: Reactor, pid: int, watcher: Watcher) -> None:
    """Tell of a child of this process, and reap it."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:  # it was reaped with the orphans
        watcher.ended(None, "gone before it was seen", None)
        return

    def ended() -> None:
        reactor.unwatch(pidfd)
        os.close(pidfd)
        watcher.ended(os.waitpid(pid, 0)[1], "", None)

    reactor.watch(pidfd, ended)
    watcher.started(pid, os.dup(pidfd))


def _exec(program: Program, env: Mapping[str, str], fds: Sequence[int], parent_pid: int) -> None:
    try:
        die_with_parent(parent_pid)
        lead_group()
        for fd in fds:
            os.set_inheritable(fd, True)
        for number in (*SIGNALS_TO_END, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS_TO_END)
        os.execve(sys.executable, program.command(), env)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(127)


class ForkServer:
    """Has another process fork trainers, over a connection to it.

    `ours`: the trainers become children of this process, and outlive the other one; else they end
    with it, and it tells how. What a zygote does not come to is started by exec: its death costs
    nobody anything.
    """

    def __init__(
        self,
        reactor: Reactor,
        sock: socket.socket,
        *,
        ours: bool = False,
        is_task: bool = False,
        on_other: Callable[[Frame], None] = lambda frame: None,
    ) -> None:
        """`on_other`: is told what else the other process says.

        `is_task`: trainers are to have the devices and limits of the other process.
        """
        self._exec = None if is_task else ExecStarter(reactor)
        self._on_other = on_other
        self._reactor = reactor
        self._sock = sock
        self._ours = ours
        self._buffer = FrameBuffer()
        self._fds: list[int] = []
        # Those that were asked for, and those that run, by process id.
        self._asked: deque[tuple[Program, Given, Watcher]] = deque()
        self._running: dict[int, Watcher] = {}
        self._is_open = True
        reactor.watch(sock.fileno(), self._read)

    def start(self, program: Program, given: Given, watcher: Watcher) -> None:
        """Ask for one."""
        request: Frame = {
            "script": program.script,
            "args": list(program.args),
            "module": program.module,
            "options": list(program.options),
            "env": dict(given.env),
            "cwd": os.getcwd(),
        }
        if not self._is_open:
            raise ConnectionError("the process that forks trainers is gone")
        data = encode(request)
        sent = socket.send_fds(self._sock, [data], [0, 1, 2, *given.fds])
        self._sock.sendall(data[sent:])
        self._asked.append((program, given, watcher))

    def close(self) -> None:
        """The other process ends trainers that are its children."""
        if self._is_open:
            self._is_open = False
            self._reactor.unwatch(self._sock.fileno())
            self._sock.close()

    def _read(self) -> None:
        try:
            data, fds = receive_fds(self._sock, 4096, 16)
        except ConnectionError:  # it ended with a request unread
            data, fds = b"", []
        self._fds += fds
        if not data:
            self._gone()
            return
        for frame in self._buffer.feed(data):
            self._take(frame)

    def _take(self, frame: Frame) -> None:
        if "pid" in frame:
            (_, _, watcher), pidfd = self._asked.popleft(), self._fds.pop(0)
            if self._ours:
                os.close(pidfd)
                watch_child(self._reactor, frame["pid"], watcher)
            else:
                self._running[frame["pid"]] = watcher
                watcher.started(frame["pid"], pidfd)
        elif "error" in frame:
            _, _, watcher = self._asked.popleft()
            watcher.ended(None, f"not started: {frame['error']}", frame["exit_code"])
        elif "pid_ended" not in frame:
            self._on_other(frame)
        elif frame["pid_ended"] in self._running:
            watcher = self._running.pop(frame["pid_ended"])
            watcher.ended(frame["status"], "", None)

    def _gone(self) -> None:
        self.close()
        asked, self._asked = [*self._asked], deque()
        for program, given, watcher in asked:
            if self._exec is None:
                watcher.ended(None, "not started: what should fork it has ended", None)
            else:
                self._exec.start(program, given, watcher)
        running, self._running = [*self._running.values()], {}
        for watcher in running:
            # Its end and that of the other process come together; both were told, if not to us.
            self._reactor.after(
                _STATUS_WAIT_S, partial(watcher.ended, None, "gone with what had forked it", None)
            )


def receive_fds(sock: socket.socket, size: int, most: int) -> tuple[bytes, list[int]]:
    """Receive bytes, and descriptors that no process inherits by itself; raises OSError."""
    data, fds, _, _ = socket.recv_fds(sock, size, most)
    for fd in fds:
        os.set_inheritable(fd, False)
    return data, fds


_GRACE_S = 2.0
Call = dict[str, Any]
Tell = Callable[[Call, Sequence[int]], None]


@dataclass(slots=True, kw_only=True)
class Trainer:
    """A trainer that was started: in which place, of which slot, and how it has ended."""

    place: int
    slot: int
    incarnation: int
    tell: Tell
    orphans: Orphans
    pid: int = 0
    pidfd: int = -1
    end: dict[str, Any] | None = None

    @property
    def facts(self) -> Call:
        """The facts that an agent is told."""
        one = {"place": self.place, "slot": self.slot, "incarnation": self.incarnation}
        return {**one, "pid": self.pid, "end": self.end}

    def started(self, pid: int, pidfd: int) -> None:
        """It runs."""
        self.pid, self.pidfd = pid, pidfd
        self.tell({"n": "started", **self.facts}, [pidfd])

    def ended(self, status: int | None, why: str, exit_code: int | None) -> None:
        """It has ended; what it has started ends before anybody is told, and begins again."""
        self.end = {"status": status, "why": why, "exit_code": exit_code}
        is_done = status is not None and os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0
        (self.orphans.end if is_done else self.orphans.end_now)(self.pid)
        self.tell({"n": "ended", **self.facts}, [])

    def kill(self) -> None:
        """End it."""
        if self.pidfd >= 0 and self.end is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def close(self) -> None:
        """Let go of it."""
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


class GuardedTrainers:
    """All trainers of a node; `starters`: the ways to start one, by place; None: by exec.

    `tell(notice, descriptors)`: what becomes of each.
    """

    def __init__(self, reactor: Reactor, starters: Sequence[Starter | None], *, tell: Tell) -> None:
        self._starters: list[Starter | None] = list(starters)
        self._exec = ExecStarter(reactor)
        self._tell = tell
        self._orphans = Orphans(reactor, grace_s=_GRACE_S)
        self._known: dict[tuple[int, int], Trainer] = {}
        # The other children that this process gets are what its trainers leave behind.
        self._not_orphans = own_children()

    @property
    def all(self) -> list[Trainer]:
        """Those of which an agent may not know how they have ended; some may still be forked."""
        return list(self._known.values())

    def start_by(self, starters: Sequence[Starter], pid: int) -> None:
        """Start others in these ways, by place: by a child of this process, which is no orphan.

        The ways before end by themselves: what they were asked for may be about to come.
        """
        self._not_orphans.add(pid)
        self._starters = list(starters)

    def start(self, place: int, slot: int, incarnation: int, program: Call, given: Given) -> None:
        """Start one."""
        trainer = self._known[slot, incarnation] = Trainer(
            place=place,
            slot=slot,
            incarnation=incarnation,
            tell=self._tell,
            orphans=self._orphans,
        )
        what = Program(**{**program, "args": tuple(program["args"])})
        starter = self._starters[place] if place < len(self._starters) else None
        if starter is not None:
            # What should fork it may be gone: by exec it is slower, and that is all.
            with contextlib.suppress(OSError):
                starter.start(what, given, trainer)
                return
        self._exec.start(what, given, trainer)

    def seen(self, slot: int, incarnation: int) -> None:
        """An agent knows how it has ended."""
        trainer = self._known.pop((slot, incarnation), None)
        if trainer is not None:
            trainer.close()

    def reap(self, agent_pid: int | None) -> None:
        """Take note of the ends of processes that trainers have left behind."""
        mine = {trainer.pid for trainer in self.all} | self._not_orphans | {agent_pid}
        for pid in own_children() - mine:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)

    def kill(self) -> None:
        """End all, at once."""
        for trainer in self.all:
            trainer.kill()

    def close(self) -> None:
        """Wait for what they have left behind, and let go of everything."""
        self._orphans.finish()
        for trainer in self.all:
            trainer.close()
        for starter in self._starters:
            if starter is not None:
                starter.close()
