"""Trainers that a process was asked to fork, and that process dies."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elaswave_plugin.agent.guarded_trainers import ForkServer, Given, GuardedTrainers
from elaswave_plugin.ipc.environment import Program
from elaswave_plugin.ipc.reactor import Reactor
from elaswave_plugin.ipc.wire import encode
from tests.idle import Deadline

LONG_S = 20.0
ENDS = 'import sys\nprint("lives", flush=True)\nsys.exit(7)\n'


class Watched:
    """Notes what becomes of a trainer."""

    def __init__(self) -> None:
        self.pids: list[int] = []
        self.ends: list[tuple[int | None, str]] = []

    def started(self, pid: int, pidfd: int) -> None:
        """It runs."""
        self.pids.append(pid)
        os.close(pidfd)

    def ended(self, status: int | None, why: str, exit_code: int | None) -> None:
        """It has ended."""
        self.ends.append((status, why))


@pytest.fixture
def reactor() -> Iterator[Reactor]:
    one = Reactor()
    yield one
    one.close()


@pytest.fixture
def program(tmp_path: Path) -> Program:
    script = tmp_path / "ends.py"
    script.write_text(ENDS)
    return Program(script=str(script), args=(), module=False)


@pytest.fixture
def given() -> Iterator[Given]:
    fds = [os.memfd_create("test") for _ in range(4)]
    yield Given(env=dict(os.environ), secret_fd=fds[0], progress_fd=fds[1], snapshot_fds=fds[2:])
    for fd in fds:
        os.close(fd)


def until(reactor: Reactor, reached: Callable[[], bool]) -> None:
    """Run the reactor until something is true."""
    deadline = Deadline(LONG_S)

    def look() -> None:
        if reached():
            reactor.stop()
            return
        assert deadline.left_s()
        reactor.after(0.01, look)

    reactor.after(0.0, look)
    reactor.run()


def test_what_a_dying_zygote_did_not_come_to_is_started_by_exec(
    reactor: Reactor, program: Program, given: Given
) -> None:
    ours, theirs = socket.socketpair()
    watched = Watched()
    ForkServer(reactor, ours, ours=True).start(program, given, watched)
    theirs.close()
    until(reactor, lambda: bool(watched.ends))
    assert len(watched.pids) == 1
    assert [os.waitstatus_to_exitcode(status or 0) for status, _ in watched.ends] == [7]


def test_what_a_dying_task_did_not_come_to_is_a_loss(
    reactor: Reactor, program: Program, given: Given
) -> None:
    """A trainer by exec would have other devices than that task."""
    ours, theirs = socket.socketpair()
    watched = Watched()
    ForkServer(reactor, ours, is_task=True).start(program, given, watched)
    theirs.close()
    until(reactor, lambda: bool(watched.ends))
    assert watched.pids == []
    assert watched.ends == [(None, "not started: what should fork it has ended")]


def test_what_a_dead_zygote_has_forked_is_not_started_twice(
    reactor: Reactor, program: Program, given: Given
) -> None:
    """Another zygote takes its place before the trainer, which lives, has told of itself."""
    old, theirs = socket.socketpair()
    new, others = socket.socketpair()
    told: list[dict[str, object]] = []
    trainers = GuardedTrainers(
        reactor, [ForkServer(reactor, old, ours=True)], tell=lambda call, fds: told.append(call)
    )
    described = {name: getattr(program, name) for name in ("script", "args", "module", "options")}
    trainers.start(0, 0, 1, described, given)
    trainers.start_by([ForkServer(reactor, new, ours=True)], os.getpid())
    forked = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    pidfd = os.pidfd_open(forked.pid)
    socket.send_fds(theirs, [encode({"pid": forked.pid})], [pidfd])
    theirs.close()
    os.close(pidfd)
    until(reactor, lambda: bool(told))
    trainers.kill()
    until(reactor, lambda: len(told) == 2)
    assert [(one["n"], one["pid"]) for one in told] == [
        ("started", forked.pid),
        ("ended", forked.pid),
    ]
    trainers.close()
    others.close()
