"""Processes that answer for listed names, and what an asker makes of their silence."""

import os
import signal
import socket
from collections.abc import Iterator

import psutil
import pytest

from elaswave_plugin.agent.peers.names import NamedLease, Names, NameServer
from elaswave_plugin.core.agreement.named import Call, Known, Own, Renewal, digest
from elaswave_plugin.ipc.secret import Secret
from tests.ports import free_port

PROGRAM = {"script": "train.py"}
CALL = Call(who="one", program=digest(PROGRAM))


@pytest.fixture
def secret() -> Secret:
    return Secret.new()


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as one:
        yield one


def name_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()
    return f"{host}:{port}"


def test_it_answers_and_forgets_what_it_knew_where_it_is_killed(
    listener: socket.socket, secret: Secret
) -> None:
    name, server = name_of(listener), NameServer(listener, PROGRAM, secret)
    names = Names([name], secret)
    before = {*psutil.Process().children()}
    server.start()
    try:
        assert names.ask(CALL) == {name: Known(program=PROGRAM)}
        known = names.ask_one(name, Own(life=3))
        assert known is not None and (known.life, known.waiting) == (3, ("one",))
        (process,) = {*psutil.Process().children()} - before
        os.kill(process.pid, signal.SIGKILL)
        process.wait(10)
        # Nobody is told that none is there: the launcher lives.
        assert names.ask(CALL) == {}
        assert list(names.why_silent) == [name]
        server.start()
        assert names.ask(Renewal(life=3, contacts=("h:1",)))[name] == Known(
            program=PROGRAM, job=3, contacts=("h:1",)
        )
    finally:
        server.end()
    assert names.ask(CALL) == {name: None}
    assert {*psutil.Process().children()} <= before


def test_one_with_another_secret_is_silent(listener: socket.socket, secret: Secret) -> None:
    name, server = name_of(listener), NameServer(listener, PROGRAM, Secret.new())
    names = Names([name], secret)
    server.start()
    try:
        assert names.ask(CALL) == {}
        assert "has another secret than this one" in names.why_silent[name]
    finally:
        server.end()


def test_a_lease_says_how_many_names_are_missing(secret: Secret) -> None:
    nobody = tuple(f"127.0.0.1:{free_port()}" for _ in range(2))
    with pytest.raises(TimeoutError, match="0 of these names are part of the job, wanted 2"):
        NamedLease(nobody, 2, secret).renew(3, ())
