"""Waits for a descriptor, whatever its number."""

import os
import resource
import signal
import socket
import subprocess

import pytest

from elaswave_plugin.ipc.reactor import is_readable


@pytest.fixture
def many() -> int:
    """Return a number that ``select`` refuses, as a descriptor that is free."""
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] <= 2000:
        pytest.skip("no descriptor of 2000 may be open here")
    return 2000


def test_a_socket_of_a_high_number(many: int) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        high = os.dup2(ours.fileno(), many)
        try:
            assert not is_readable(high, 0.0)
            theirs.send(b"x")
            assert is_readable(high, 5.0) and is_readable(ours, 5.0)
            ours.recv(1)
            theirs.close()
            assert is_readable(high, 5.0)
        finally:
            os.close(high)


def test_a_process_that_ends() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        pidfd = os.pidfd_open(process.pid)
        try:
            assert not is_readable(pidfd, 0.01)
            process.send_signal(signal.SIGKILL)
            assert is_readable(pidfd, 20.0)
        finally:
            os.close(pidfd)
