"""Free TCP ports for the jobs of the tests."""

import contextlib
import socket


def free_port() -> int:
    """A TCP port that is free now, with the next one free as well (our control port)."""
    for _ in range(100):
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            with contextlib.suppress(OSError):
                second.bind(("127.0.0.1", port + 1))
                return port
    raise RuntimeError("no two neighbouring free ports")
