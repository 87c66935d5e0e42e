"""The zygote that `elaswave run` starts for its own node, and starts again where it is killed."""

import os
import signal
import socket
import struct
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from elaswave_plugin.agent.guarded_trainers import ForkServer
from elaswave_plugin.agent.oom_kills import oom_kills
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.ipc.console import say
from elaswave_plugin.ipc.reactor import Reactor

_READ_AT_LOAD = ("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "LD_")
_READ_AT_START = ("PYTHONHASHSEED",)
_CREDENTIALS = struct.Struct("3i")


def check_zygote(sock: socket.socket, path: str, env: Mapping[str, str]) -> None:
    """Raise ConfigurationError for settings that the zygote at ``path`` has loaded otherwise.

    Some variables are read when a library is loaded: a worker that a zygote forks would compute
    with its threads, and not have the bits of one that was started by exec.

    ``sock``: a connection to it; ``env``: what a worker is to have. One of another user, whose
    environment may not be read, is taken as it is.
    """
    size = _CREDENTIALS.size
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    pid, _, _ = _CREDENTIALS.unpack(data)
    try:
        lines = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return
    pairs = (line.decode(errors="replace").partition("=") for line in lines if line)
    theirs = {name: value for name, _, value in pairs}
    for name in sorted({*theirs, *env}):
        is_read = name.startswith(_READ_AT_LOAD) or name in _READ_AT_START
        if is_read and theirs.get(name) != env.get(name):
            raise ConfigurationError(
                f"--zygote is {path}, which was started with {_said(name, theirs)}, and workers are"
                f" to have {_said(name, env)}, which it has read already: start it with the same"
            )


def _said(name: str, values: Mapping[str, str]) -> str:
    return f"{name}={values[name]}" if name in values else f"no {name}"


_ENDS_WITHIN_S = 10.0
# Where they are killed one after the other, it is no accident.
_MOST = 5


class OwnZygote:
    """Has one connection for each of `count` places.

    `on_new(starters, pid)`: another one is there, a child of this process; `command`: to which its
    connections are added; `env`: its environment.
    """

    def __init__(
        self,
        reactor: Reactor,
        command: Sequence[str],
        env: Mapping[str, str],
        count: int,
        *,
        on_new: Callable[[list[ForkServer], int], None],
    ) -> None:
        self._reactor = reactor
        self._command = list(command)
        self._env = dict(env)
        self._count = count
        self._on_new = on_new
        self._started = 0
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> list[ForkServer]:
        """Start it; returns the ways to start trainers by it, by place."""
        pairs = [socket.socketpair() for _ in range(self._count)]
        fds = [theirs.fileno() for _, theirs in pairs]
        connections = f"--connections={','.join(map(str, fds))}"
        process = self._process = subprocess.Popen(
            [*self._command, f"--parent={os.getpid()}", connections],
            env=self._env,
            pass_fds=fds,
            process_group=0,
        )
        for _, theirs in pairs:
            theirs.close()
        self._started += 1
        ended, killed_before = os.pidfd_open(process.pid), oom_kills()

        def on_exit() -> None:
            self._reactor.unwatch(ended)
            os.close(ended)
            self._on_exit(process, killed_before)

        self._reactor.watch(ended, on_exit)
        return [ForkServer(self._reactor, ours, ours=True) for ours, _ in pairs]

    def end(self) -> None:
        """End it."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            try:
                process.wait(_ENDS_WITHIN_S)
            except subprocess.TimeoutExpired:
                say(f"the zygote (pid {process.pid}) does not die of SIGKILL: left behind")

    def _on_exit(self, process: subprocess.Popen[bytes], killed_before: int) -> None:
        """The workers that it had forked go on; one that failed by itself would do so again."""
        code = process.wait()
        if code == 0:
            return
        how = f"exit code {code}" if code > 0 else f"killed by {signal.Signals(-code).name}"
        if code < 0 and oom_kills() > killed_before:
            how += ", and the kernel has ended processes for lack of memory meanwhile"
        again = code < 0 and self._started < _MOST
        others = "another one is started for others" if again else "others start without it"
        say(
            f"the zygote (pid {process.pid}) ended: {how}; the workers that it had forked go on,"
            f" and {others}"
        )
        if again:
            starters = self.start()
            assert self._process is not None
            self._on_new(starters, self._process.pid)
