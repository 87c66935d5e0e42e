"""Descriptors of large jobs: numbers beyond select's, none left for a moment, and the limit."""

import contextlib
import fcntl
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from elaswave_plugin.agent.snapshot_server import SnapshotServer, listen_for_data
from elaswave_plugin.agent.snapshot_store import SnapshotStore
from elaswave_plugin.communicator.links.connections import Listeners
from elaswave_plugin.ipc.reactor import Reactor
from elaswave_plugin.ipc.secret import ANSWER_BYTES, Dialling, Kind
from elaswave_plugin.ipc.wire import Channel, receive_frame, send_frame
from elaswave_plugin.launch.options import OWN_DESCRIPTORS
from tests.agent.jobs import LAUNCH, environment
from tests.agent.serving import NamedMemory
from tests.job_secret import SECRET

BEYOND_SELECT = 1100
SHORT_S = 0.3
LONG_S = 10.0


@contextlib.contextmanager
def limit_of(soft: int) -> Iterator[None]:
    old = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, old)


@contextlib.contextmanager
def none_left() -> Iterator[None]:
    free = os.dup(0)
    os.close(free)
    with limit_of(free):
        with pytest.raises(OSError, match="Too many open files"):
            os.dup(0)
        yield


def test_a_channel_with_a_high_number_is_drained() -> None:
    near, far = socket.socketpair()
    frames: list[object] = []
    reactor = Reactor()
    with limit_of(resource.getrlimit(resource.RLIMIT_NOFILE)[1]), near, far:
        high = socket.socket(fileno=fcntl.fcntl(near.fileno(), fcntl.F_DUPFD, BEYOND_SELECT))
        channel = Channel(reactor, high, on_frame=frames.append, on_close=frames.append)
        send_frame(far, {"t": "last word"})
        channel.drain()
        channel.close()
    reactor.close()
    assert frames == [{"t": "last word"}]


def test_a_server_without_descriptors_serves_again_once_there_are_some() -> None:
    answers = {"ask": lambda request: {"t": "told"}}
    store, listeners = SnapshotStore(NamedMemory()), listen_for_data("127.0.0.1")
    server = SnapshotServer(store, listeners, answers, secret=SECRET)
    server.start()
    host, _, port = server.address.rpartition(":")
    # An accept that waits has its descriptor already: the first one may still be let in.
    with socket.socket() as first, socket.socket() as second:
        with none_left():
            for sock in (first, second):
                sock.connect((host, int(port)))
            opening = Dialling(SECRET, Kind.SERVER)
            second.sendall(opening.opening)
            second.settimeout(SHORT_S)
            with pytest.raises(TimeoutError):
                second.recv(1)
        second.settimeout(LONG_S)
        second.sendall(opening.answered(second.recv(ANSWER_BYTES, socket.MSG_WAITALL)))
        send_frame(second, {"t": "ask"})
        assert receive_frame(second, LONG_S) == {"t": "told"}


def test_doors_without_descriptors_let_in_later() -> None:
    doors = Listeners("127.0.0.1")
    host, _, port = doors.address.rpartition(":")
    with socket.socket() as sock:
        with none_left():
            sock.connect((host, int(port)))
            assert list(doors.accept_all()) == []
        (inside,) = doors.accept_all()
        inside.close()
    doors.close()


def run_with(soft: int, hard: int, cwd: Path) -> "subprocess.CompletedProcess[str]":
    """A job of one worker with a reserve of 600, which prints its limits."""
    script = cwd / "script.py"
    script.write_text("import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE))")
    return subprocess.run(
        [sys.executable, "-c", LAUNCH, "--reserve=600", str(script)],
        cwd=cwd,
        env=environment(),
        preexec_fn=partial(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard)),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_job_raises_its_limit_by_what_it_needs(tmp_path: Path) -> None:
    needed = 601 + OWN_DESCRIPTORS
    for hard, soft in ((2000, 100 + needed), (900, 900)):
        ran = run_with(100, hard, tmp_path)
        assert (ran.stdout, ran.returncode) == (f"({soft}, {hard})\n", 0), ran.stderr


def test_a_job_beyond_the_limit_is_refused(tmp_path: Path) -> None:
    refused = run_with(100, 800, tmp_path)
    assert (refused.stdout, refused.returncode) == ("", 2)
    assert refused.stderr == (
        "elaswave run: the limit of open files is 800 (`ulimit -Hn`), wanted at least 857: each of "
        "601 workers has a connection with each other one; raise it on every node\n"
    )
