"""Links whose other end answers nothing are broken; those that merely rest or are full are not."""

import contextlib
import socket
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import pytest

from elaswave_plugin.communicator.groups.algorithms import receive, send
from elaswave_plugin.communicator.links.link_table import LinkTable
from elaswave_plugin.communicator.links.operation import Group, Operation
from elaswave_plugin.errors import LinkError
from elaswave_plugin.ipc import silence
from tests.idle import Clock
from tests.job_secret import SECRET

LIMIT_S, SHORT_S = 10.0, 0.3
# Two hosts to the table, so that they speak TCP.
HERE, THERE = "127.0.0.1", "127.0.0.2"


@pytest.fixture
def lost(monkeypatch: pytest.MonkeyPatch) -> SimpleQueue[Any]:
    monkeypatch.setattr(silence, "LIMIT_S", SHORT_S)
    monkeypatch.setattr(silence, "DIAL_LIMIT_S", SHORT_S)
    return SimpleQueue()


def table_of(lost: "SimpleQueue[Any]") -> LinkTable:
    return LinkTable(0, HERE, secret=SECRET, on_link_lost=lambda *what: lost.put(what))


def begin(table: LinkTable, name: str, steps: Callable[[Operation], Any]) -> None:
    group = Group(number=7, label="pair", members=(0, 1), rank=0)
    table.run(Operation(table, group, name, timeout_s=LIMIT_S, tag=0), steps)


def test_an_idle_peer_answers_and_one_without_room_is_not_judged() -> None:
    with socket.create_server((HERE, 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    with near, far:
        silence.have_probed(near)
        clock = Clock()
        ends_s = clock.began_s + 2.5
        while time.monotonic() < ends_s:
            clock.check(silence.answers(near).silent_s, 1.5)
            time.sleep(0.1)  # the probes are the kernel's, one a second
        near.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                near.send(bytes(1 << 16))
        clock = Clock()
        ends_s = clock.began_s + 2.5
        while time.monotonic() < ends_s:
            clock.check(silence.answers(near).silent_s, 1.5)
            time.sleep(0.1)


def test_a_link_that_is_needed_is_told_once_it_is_silent(
    lost: "SimpleQueue[Any]", monkeypatch: pytest.MonkeyPatch
) -> None:
    since_s = {HERE: 0.0, THERE: 0.0}
    monkeypatch.setattr(
        silence, "answers", lambda sock: silence.Answers(since_s[sock.getsockname()[0]], 0)
    )
    table, other = table_of(lost), LinkTable(1, THERE, secret=SECRET)
    for one in (table, other):
        one.open_epoch(1, {0: table.address, 1: other.address})
    begin(table, "send", lambda op: send(op, memoryview(b"x"), 1))
    begin(table, "recv", lambda op: receive(op, memoryview(bytearray(5)), 1))
    time.sleep(2 * silence.LOOK_EVERY_S)
    assert lost.empty()
    since_s[HERE] = 2 * SHORT_S
    assert lost.get(timeout=LIMIT_S) == (1, "broken: the other machine answers nothing", True)
    assert lost.empty()
    for one in (table, other):
        one.close()


def test_a_dial_that_nobody_answers_is_told(lost: "SimpleQueue[Any]") -> None:
    with socket.create_server((THERE, 0), backlog=0) as full:
        # What comes now is left without an answer, as by a switch that drops it.
        waiting = [socket.socket() for _ in range(4)]
        for sock in waiting:
            sock.setblocking(False)
            sock.connect_ex(full.getsockname())
        table = table_of(lost)
        table.open_epoch(1, {0: table.address, 1: f"{THERE}:{full.getsockname()[1]}"})
        began_s = time.monotonic()
        begin(table, "send", lambda op: send(op, memoryview(b"x"), 1))
        assert lost.get(timeout=LIMIT_S) == (1, "broken: the other machine answers nothing", True)
        assert time.monotonic() - began_s >= SHORT_S
        table.close()
        for sock in waiting:
            sock.close()


def test_a_look_at_the_links_is_no_progress_of_a_wait(
    lost: "SimpleQueue[Any]", monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent counts from the last word of who is awaited: a hang would never be one."""
    monkeypatch.setattr(silence, "LOOK_EVERY_S", 0.02)
    table, other = table_of(lost), LinkTable(1, THERE, secret=SECRET)
    for one in (table, other):
        one.open_epoch(1, {0: table.address, 1: other.address})
    told = list[int]()
    monkeypatch.setattr(table.page, "waits_for", lambda peer, *number: told.append(peer))
    group = Group(number=7, label="pair", members=(0, 1), rank=0)
    operation = Operation(table, group, "recv", timeout_s=LIMIT_S, tag=0)
    table.run(operation, lambda op: receive(op, memoryview(bytearray(5)), 1))
    with pytest.raises(LinkError, match="timed out"):
        table.wait(operation, 0.6)
    # Once as it begins and once as it ends.
    assert len(told) == 2
    for one in (table, other):
        one.close()
