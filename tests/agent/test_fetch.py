"""A fetch of snapshot bytes: interrupted by a proposal, and too slow."""

import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from elaswave_plugin.errors import EpochChanged, LinkError
from elaswave_plugin.ipc.secret import Kind
from elaswave_plugin.ipc.wire import send_frame
from elaswave_plugin.snapshot.fetch import Fetcher
from tests.job_secret import SECRET, accepted

LONG_S = 10.0
SHORT_S = 0.05


def stop_in(seconds: float) -> Callable[[], None]:
    at_s = time.monotonic() + seconds

    def check() -> None:
        if time.monotonic() > at_s:
            raise EpochChanged(5, "r")

    return check


@contextmanager
def fetcher_of(
    listener: socket.socket, check: Callable[[], None] | None
) -> Iterator[tuple[Fetcher, socket.socket]]:
    """A fetcher, and the other end of its connection, which has proved the secret."""
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    with ThreadPoolExecutor(1) as threads:
        arrival = threads.submit(accepted, listener, Kind.SERVER)
        with (
            Fetcher(address, secret=SECRET, timeout_s=LONG_S, check=check) as fetcher,
            arrival.result(LONG_S) as far,
        ):
            yield fetcher, far


def test_a_fetch_ends_at_once_when_a_proposal_arrives() -> None:
    """From an agent that accepts and never answers, answers halfway, or does not accept."""
    with socket.create_server(("127.0.0.1", 0), backlog=1) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        wanted = {"owner": 3, "step": 5, "epoch": 1, "offset": 0, "timeout_s": LONG_S}
        for halfway in (False, True):
            started_s = time.monotonic()
            with fetcher_of(listener, check=stop_in(0.2)) as (fetcher, far):
                if halfway:
                    send_frame(far, {"t": "bytes"})
                    far.sendall(b"x" * 10)
                with pytest.raises(EpochChanged):
                    fetcher.fetch(**wanted, into=memoryview(bytearray(100)))
            assert 0.2 <= time.monotonic() - started_s < LONG_S / 4
        waiting = [socket.create_connection(listener.getsockname()) for _ in range(2)]
        started_s = time.monotonic()
        with pytest.raises(EpochChanged):  # the backlog is full: nobody accepts
            Fetcher(address, secret=SECRET, timeout_s=LONG_S, check=stop_in(0.2))
        assert 0.2 <= time.monotonic() - started_s < LONG_S / 4
        for sock in waiting:
            sock.close()


def test_a_fetch_that_is_too_slow_gives_up_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for check in (None, stop_in(LONG_S)):
            with (
                fetcher_of(listener, check=check) as (fetcher, _),
                pytest.raises(LinkError, match="timed out"),
            ):
                fetcher.fetch(
                    owner=3,
                    step=5,
                    epoch=1,
                    offset=0,
                    into=memoryview(bytearray(1)),
                    timeout_s=SHORT_S,
                )
