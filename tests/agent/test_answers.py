"""Answers in an agent's control loop, and the files that say where agents answer."""

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from elaswave_plugin.ipc import requests
from elaswave_plugin.ipc.address_file import Address, published, read_addresses
from elaswave_plugin.ipc.reactor import Reactor
from elaswave_plugin.ipc.requests import in_loop
from tests.agent.jobs import WAIT_S

Record = dict[str, Any]


def test_an_answer_that_fails_is_told_and_leaves_the_agent_alone() -> None:
    reactor = Reactor()

    def fail(request: Record) -> Record:
        raise OSError("no such descriptor")

    ask = in_loop(reactor, fail)
    answers: list[Record] = []

    def client() -> None:
        answers.append(ask({"t": "status"}))
        reactor.post(reactor.stop)

    thread = threading.Thread(target=client)
    thread.start()
    reactor.run()
    thread.join(WAIT_S)
    reactor.close()
    assert answers == [{"error": "OSError: no such descriptor"}]


def test_what_the_loop_comes_to_too_late_is_not_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "ANSWER_S", 0.05)
    reactor, done = Reactor(), []
    ask = in_loop(reactor, lambda request: done.append(request) or {})  # type: ignore[func-returns-value]
    answer = ask({"t": "drain"})  # nobody runs the loop
    reactor.post(reactor.stop)
    reactor.run()
    reactor.close()
    assert answer == {"error": "its control loop did not answer within 0.05 s"}
    assert done == []


def test_what_the_loop_has_begun_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "ANSWER_S", 0.5)
    reactor, begun = Reactor(), threading.Event()

    def slowly(request: Record) -> Record:
        begun.set()
        time.sleep(0.7)
        return {"done": request["t"]}

    loop = threading.Thread(target=reactor.run)
    loop.start()
    answer = in_loop(reactor, slowly)({"t": "drain"})
    reactor.post(reactor.stop)
    loop.join(WAIT_S)
    reactor.close()
    assert begun.is_set() and answer == {"done": "drain"}


def test_a_torn_address_file_is_nobodys_and_harms_nobody(tmp_path: Path) -> None:
    (tmp_path / "agent-7.json").write_text("")
    (tmp_path / "agent-8.json").write_text('{"node": 8}')
    mine = Address(node=3, pid=1, address="127.0.0.1:1")
    with published(str(tmp_path), mine, lambda node: node == 7):
        assert read_addresses(tmp_path) == [mine]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["agent-7.json", "agent-8.json"]


def test_of_the_files_of_others_those_of_nodes_that_have_left_go(tmp_path: Path) -> None:
    def write(node: int, pid: int) -> None:
        text = json.dumps({"node": node, "pid": pid, "address": "127.0.0.1:1"})
        (tmp_path / f"agent-{node}.json").write_text(text)

    write(1, 1)
    write(2, 1)
    mine = Address(node=3, pid=1, address="127.0.0.1:1")
    with published(str(tmp_path), mine, lambda node: node == 1):
        assert [one.node for one in read_addresses(tmp_path)] == [1, 2, 3]
        write(3, 2)  # an agent after this one has written its own
    assert [(one.node, one.pid) for one in read_addresses(tmp_path)] == [(2, 1), (3, 2)]
