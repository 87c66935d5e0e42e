"""A task of a launcher beside the first one of its node: it forks its trainer for the guardian.

Launchers give a task devices, limits and processors of its own, which its trainer has to have. The
task ends with the job's exit code, once the guardian names that. Standard library only.
"""

import contextlib
import hashlib
import os
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elaswave_plugin.agent.guarded_trainers import ExecStarter, ForkServer, Given, receive_fds
from elaswave_plugin.agent.peers.rendezvous import MeetingWait
from elaswave_plugin.errors import (
    EXIT_CONFIGURATION,
    EXIT_FAILED,
    AgreementError,
    ConfigurationError,
)
from elaswave_plugin.ipc.environment import Program
from elaswave_plugin.ipc.process_tree import SIGNALS_TO_END
from elaswave_plugin.ipc.reactor import Reactor, is_readable
from elaswave_plugin.ipc.secret import is_same_user
from elaswave_plugin.ipc.snapshot_record import MEMORIES
from elaswave_plugin.ipc.wire import Frame, FrameBuffer, encode, receive_frame, send_frame

_AGAIN_S = 0.02
_HELLO_S = 10.0
# Standard streams, secret, page, and the memories of its snapshots.
_FDS_A_REQUEST = 5 + MEMORIES


def meeting_name(job: str, node: int) -> str:
    """The name of the Unix socket at which the tasks of a node meet their guardian."""
    digest = hashlib.sha256(job.encode()).hexdigest()[:32]  # such a name is 107 bytes at most
    return f"\0elaswave tasks {os.getuid()}/{digest}/{node}"


@dataclass(frozen=True, slots=True)
class Task:
    """A task that has come: its connection, and its worker.

    That is its slot, its environment, and what the launcher adds before the script's arguments.
    """

    sock: socket.socket
    slot: int
    env: Mapping[str, str]
    args: tuple[str, ...]

    def tell(self, frame: Frame) -> None:
        """Have it end, with the job's exit code ("exit") or a sentence ("refused")."""
        with contextlib.suppress(OSError):  # it has ended by itself
            send_frame(self.sock, frame)

    def starter(self, reactor: Reactor, on_signal: Callable[[int], None]) -> ForkServer:
        """The way to start its trainer; what it is told after that, it is told by `tell`."""
        return ForkServer(
            reactor,
            self.sock.dup(),
            is_task=True,  # the task has devices and limits of its own
            on_other=lambda frame: on_signal(int(frame["signal"])),
        )


@contextlib.contextmanager
def tasks_of_node(name: str, slot: int, count: int, timeout_s: float) -> Iterator[list[Task]]:
    """Wait, as a node's guardian, for `count` tasks beside it, and let go of them after the block.

    Those that were not told how the job has ended have failed then.
    Raises AgreementError where one does not come, ConfigurationError where one cannot serve.
    """
    found: list[Task] = []
    try:
        _meet(found, name, slot, count, timeout_s)
        yield found
    except ConfigurationError as error:
        for task in found:
            task.tell({"refused": str(error)})
        raise
    finally:
        for task in found:
            task.sock.close()


def _meet(found: list[Task], name: str, slot: int, count: int, timeout_s: float) -> None:
    deadline_s, waiting = time.monotonic() + timeout_s, MeetingWait()
    with _listen(name) as listener:
        while len(found) < count:
            left_s = deadline_s - time.monotonic()
            late = f"{count - len(found)} of the {count + 1} tasks of this node"
            if left_s <= 0:
                raise AgreementError(f"{late} did not come within {timeout_s:g} s")
            waiting.tell(f"{late} to come")
            if not is_readable(listener, min(left_s, waiting.left_s)):
                continue
            sock, _ = listener.accept()
            if not is_same_user(sock):
                sock.close()
                continue
            hello = receive_frame(sock, _HELLO_S)
            found.append(Task(sock, int(hello["slot"]), hello["env"], tuple(hello["args"])))
            if hello["pid"] != _pid_at(sock):
                raise ConfigurationError(
                    f"workers {slot} and {hello['slot']} are both on one node, and in two"
                    " containers (PID namespaces): give each of these a node number of its own, or"
                    " start their workers in one"
                )
    found.sort(key=lambda task: task.slot)


def _listen(name: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(name)
        listener.listen(256)
    except OSError as error:
        listener.close()
        raise ConfigurationError(
            "another task is the first one of this node too: give each task of a node a LOCAL_RANK"
            " of its own, and each node a GROUP_RANK"
        ) from error
    return listener


def _pid_at(sock: socket.socket) -> int:
    """The process at the other end, by the number that it has here."""
    size = struct.calcsize("3i")
    pid, _, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return int(pid)


def be_task(
    name: str, slot: int, env: Mapping[str, str], args: Sequence[str], timeout_s: float
) -> int:
    """Serve the guardian of the node to the end of the job; returns the job's exit code.

    Raises AgreementError where there is none, ConfigurationError where it refuses the job.
    """
    sock = _dial(name, timeout_s)
    send_frame(sock, {"slot": slot, "env": dict(env), "args": list(args), "pid": os.getpid()})
    served = _Served(sock)
    old = {number: signal.signal(number, served.on_signal) for number in SIGNALS_TO_END}
    try:
        return served.run()
    finally:
        for number, action in old.items():
            signal.signal(number, action)


def _dial(name: str, timeout_s: float) -> socket.socket:
    deadline_s = time.monotonic() + timeout_s
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect(name)
            if not is_same_user(sock):
                raise ConnectionError("somebody else's")
        except OSError as error:
            sock.close()
            if time.monotonic() > deadline_s:
                raise AgreementError(
                    f"the first task of this node did not come within {timeout_s:g} s"
                ) from error
            time.sleep(_AGAIN_S)  # it may start later
        else:
            return sock


class _Served:
    """The guardian, as a task sees it: it asks for a trainer, and names the exit code."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._reactor = Reactor()
        self._exec = ExecStarter(self._reactor)
        self._buffer = FrameBuffer()
        self._fds: list[int] = []
        self._pidfds: dict[int, int] = {}
        self._pid = 0
        self._code = EXIT_FAILED
        self._refusal: str | None = None

    def run(self) -> int:
        """Serve until the guardian names the exit code, or is gone."""
        self._reactor.watch(self._sock.fileno(), self._read)
        self._reactor.run()
        for pidfd in self._pidfds.values():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        self._sock.close()
        self._reactor.close()
        if self._refusal is not None:
            raise ConfigurationError(self._refusal)
        return self._code

    def on_signal(self, number: int, frame: object) -> None:
        """Hand a signal on: the guardian's agent decides what it means."""
        self._reactor.post(lambda: self._say({"signal": int(number)}))

    def started(self, pid: int, pidfd: int) -> None:
        """The trainer runs."""
        self._pid, self._pidfds[pid] = pid, pidfd
        with contextlib.suppress(OSError):
            socket.send_fds(self._sock, [encode({"pid": pid})], [pidfd])

    def ended(self, status: int | None, why: str, exit_code: int | None) -> None:
        """The trainer has ended."""
        os.close(self._pidfds.pop(self._pid))
        self._say({"pid_ended": self._pid, "status": status})

    def _say(self, frame: Frame) -> None:
        with contextlib.suppress(OSError):  # the reading side sees its end
            self._sock.sendall(encode(frame))

    def _read(self) -> None:
        try:
            data, fds = receive_fds(self._sock, 1 << 16, _FDS_A_REQUEST)
        except ConnectionError:
            data, fds = b"", []
        self._fds += fds
        if not data:
            self._reactor.stop()
            return
        for frame in self._buffer.feed(data):
            self._take(frame)

    def _take(self, frame: dict[str, Any]) -> None:
        if "exit" in frame or "refused" in frame:
            self._code = int(frame.get("exit", EXIT_CONFIGURATION))
            self._refusal = frame.get("refused")
            self._reactor.stop()
            return
        given, self._fds = self._fds[:_FDS_A_REQUEST], self._fds[_FDS_A_REQUEST:]
        program = Program(
            script=frame["script"],
            args=tuple(frame["args"]),
            module=frame["module"],
            options=tuple(frame["options"]),
        )
        self._exec.start(program, _given(frame["env"], given), self)
        for fd in given:
            os.close(fd)


def _given(env: Mapping[str, str], fds: Sequence[int]) -> Given:
    """Name what the trainer inherits; its standard streams are the task's own."""
    _, _, _, secret, progress, *snapshots = fds
    return Given(env=env, secret_fd=secret, progress_fd=progress, snapshot_fds=snapshots)
