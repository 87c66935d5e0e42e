"""Launchers that a zygote forks: what each would import takes a quarter of a second."""

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from elaswave_plugin.ipc.reactor import is_readable
from elaswave_plugin.ipc.wire import FrameBuffer, encode
from tests.idle import Deadline

SCRIPT = Path(__file__).with_name("launcher.py")
PRELOAD = "elaswave_plugin.launch.launch"
START_S = 30.0
_FDS = 7  # stdin, stdout and stderr, and four for trainers


class WarmLauncher:
    """A running launcher, with what the tests use of `subprocess.Popen`.

    Its zygote kills it when this object is gone.
    """

    def __init__(
        self,
        zygote: Path,
        argv: Sequence[str],
        *,
        output: int,
        cwd: Path,
        env: Mapping[str, str],
    ) -> None:
        """Start it; `output`: a descriptor for its stdout and stderr."""
        self._argv = [str(SCRIPT), *argv]
        self.returncode: int | None = None
        self._buffer = FrameBuffer()
        self._frames: list[dict[str, Any]] = []
        self._pidfd = -1
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sock.connect(str(zygote))
        request = {
            "script": str(SCRIPT),
            "args": list(argv),
            "module": False,
            "env": dict(env),
            "cwd": str(cwd),
            "fds": _FDS,
        }
        nothing = os.open(os.devnull, os.O_RDWR)
        try:
            fds = [nothing, output, output, *[nothing] * (_FDS - 3)]
            data = encode(request)
            sent = socket.send_fds(self._sock, [data], fds)
            self._sock.sendall(data[sent:])
        finally:
            os.close(nothing)
        self.pid: int = self._next(START_S)["pid"]

    def poll(self) -> int | None:
        """Its exit code, or None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Its exit code, -N after signal N; raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(self._next(timeout)["status"])
            os.close(self._pidfd)
            self._sock.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Signal it if it still runs."""
        if self.poll() is None:
            # It may have ended since: its zygote is about to say so.
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        """End it without a word to it."""
        self.send_signal(signal.SIGKILL)

    def _next(self, timeout_s: float) -> dict[str, Any]:
        deadline = Deadline(timeout_s)
        while not self._frames:
            left_s = deadline.left_s()
            if not is_readable(self._sock, left_s):
                if left_s:
                    continue
                raise subprocess.TimeoutExpired(self._argv, timeout_s)
            data, fds, _, _ = socket.recv_fds(self._sock, 4096, 1)
            assert data, "the zygote of the launchers is gone"
            if fds:
                self._pidfd = fds[0]
            self._frames += self._buffer.feed(data)
        frame = self._frames.pop(0)
        assert "error" not in frame, frame["error"]
        return frame
