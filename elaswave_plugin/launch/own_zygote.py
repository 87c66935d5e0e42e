"""The zygote that `elaswave run` starts for its own node, and starts again where it is killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence

from elaswave_plugin.agent.oom_kills import oom_kills
from elaswave_plugin.agent.starters import ForkServer
from elaswave_plugin.ipc.console import say
from elaswave_plugin.ipc.reactor import Reactor

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
