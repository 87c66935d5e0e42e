"""Agents find node 0 of their own job among ports that others may have taken."""

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

import pytest

from elaswave_plugin.agent.peers import rendezvous
from elaswave_plugin.agent.peers.rendezvous import (
    EndedEarlyError,
    Meeting,
    RendezvousSpec,
    host_meeting,
    join_meeting,
    listen_at,
    tell_of_end,
)
from elaswave_plugin.core.layout.reserve import NOWHERE
from elaswave_plugin.errors import AgreementError, ConfigurationError
from elaswave_plugin.ipc.peer import Peer
from elaswave_plugin.ipc.secret import Secret
from elaswave_plugin.ipc.wire import encode, send_frame
from tests.idle import within
from tests.job_secret import SECRET

HOST = "127.0.0.1"


def place(
    node: int, ports: tuple[int, ...], *, job: str = "ours", wait_s: float = 20.0, size: int = 2
) -> RendezvousSpec:
    """The place of a node with one worker."""
    return RendezvousSpec(
        node=node,
        slots=(node,),
        world_size=size,
        host=HOST,
        ports=ports,
        job=job,
        timeout_s=wait_s,
        secret=SECRET,
    )


@pytest.fixture
def listeners() -> Iterator[list[socket.socket]]:
    with ExitStack() as stack:
        yield [stack.enter_context(listen_at(HOST, 0)) for _ in range(3)]


def peer(node: int) -> Peer:
    return Peer(node=node, pid=100 + node, life=0, data=f"{HOST}:{1000 + node}")


def host(place: RendezvousSpec, listener: socket.socket) -> Meeting:
    return host_meeting(place, listener, peer(place.node))


def join(place: RendezvousSpec) -> Meeting:
    return join_meeting(place, peer(place.node))


def close(meeting: Meeting) -> None:
    for _, sock in meeting.links:
        sock.close()


def test_an_agent_passes_by_strangers_and_other_jobs(
    listeners: list[socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first port's owner says nothing, the second is the door of another job."""
    monkeypatch.setattr(rendezvous, "_FIRST_FRAME_S", 0.2)
    silent, other, own = listeners
    ports = tuple(int(listener.getsockname()[1]) for listener in (silent, other, own))
    with ThreadPoolExecutor(3) as threads:
        theirs: Future[Meeting] = threads.submit(host, place(0, ports[1:], job="theirs"), other)
        ours = threads.submit(host, place(0, ports), own)
        joined = join(place(1, ports))
        met = ours.result(20.0)
        assert met.of_slots == joined.of_slots == (0, 1)
        assert met.addresses == joined.addresses == {0: peer(0).data, 1: peer(1).data}
        ((far, at_first),), ((first, at_far),) = met.links, joined.links
        assert (far, first) == (peer(1), peer(0))
        assert at_first.getpeername() == at_far.getsockname()
        assert not theirs.done()
        late = join(place(1, ports[1:], job="theirs"))
        assert late.links[0][1].getpeername()[1] == ports[1]
        for meeting in (joined, met, late, theirs.result(20.0)):
            close(meeting)


def test_a_stranger_that_speaks_is_no_agent(listeners: list[socket.socket]) -> None:
    """Only strangers answer at every port: told with the addresses, in time."""
    stranger = listeners[0]
    port = int(stranger.getsockname()[1])

    def greet() -> None:
        with closing(stranger.accept()[0]) as sock:
            sock.sendall(encode({"job": "theirs"}))

    speaker = threading.Thread(target=greet)
    speaker.start()
    with pytest.raises(AgreementError, match=f"at {HOST}:{port} within 0.02 s .*'theirs'.*'ours'"):
        join(place(1, (port,), wait_s=0.02))
    speaker.join()


def test_a_stranger_that_says_nothing_keeps_nobody_waiting(
    listeners: list[socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It knocked first; were it heard first, the meeting would be over before."""
    monkeypatch.setattr(rendezvous, "_FIRST_FRAME_S", 60.0)
    port = int(listeners[0].getsockname()[1])
    with ThreadPoolExecutor(1) as threads, socket.create_connection((HOST, port)) as stranger:
        ours = threads.submit(host, place(0, (port,)), listeners[0])
        assert stranger.recv(1)  # it was let in
        joined = join(place(1, (port,)))
        met = ours.result(20.0)
        assert met.addresses == joined.addresses
        for meeting in (joined, met):
            close(meeting)


def test_all_are_told_the_slots_of_each_node_and_have_a_link_with_the_first(
    listeners: list[socket.socket],
) -> None:
    """In any order they may come; the slots of the reserve are nobody's."""
    port = int(listeners[0].getsockname()[1])
    slots = ((0, 1), (2,), (3, 4))
    places = [
        replace(place(node, (port,), size=5), slots=some, reserve=1)
        for node, some in enumerate(slots)
    ]
    with ThreadPoolExecutor(3) as threads:
        others = [threads.submit(join, places[node]) for node in (2, 1)]
        met = [host(places[0], listeners[0]), *(one.result(20.0) for one in others)]
    assert {one.of_slots for one in met} == {(0, 0, 1, 2, 2, NOWHERE)}
    assert all(one.addresses == {node: peer(node).data for node in range(3)} for one in met)
    assert sorted(far.node for far, _ in met[0].links) == [1, 2]
    assert [[far.node for far, _ in one.links] for one in met[1:]] == [[0], [0]]
    for meeting in met:
        close(meeting)


def test_who_is_not_wanted_is_told_why(listeners: list[socket.socket]) -> None:
    port = int(listeners[0].getsockname()[1])
    with ThreadPoolExecutor(1) as threads:
        ours = threads.submit(host, place(0, (port,)), listeners[0])
        for stranger, why in (
            (place(0, (port,)), "node 0 is refused: another agent has come as node 0, or with"),
            (
                replace(place(1, (port,)), slots=(0,)),
                "node 1 is refused: another agent has come as node 1, or with a worker of it",
            ),
            (place(1, (port,), size=4), "its job has 4 workers and that of node 0 has 2: give"),
            (replace(place(1, (port,)), reserve=2), "its reserve is 2, that of node 0 is 0: give"),
        ):
            with pytest.raises(ConfigurationError, match=why):
                join(stranger)
        for meeting in (join(place(1, (port,))), ours.result(20.0)):
            close(meeting)


def test_another_secret_than_that_of_node_0_is_told_at_once(
    listeners: list[socket.socket],
) -> None:
    port = listeners[0].getsockname()[1]
    with ThreadPoolExecutor(1) as threads:
        ours = threads.submit(host, place(0, (port,)), listeners[0])
        with within(1.0), pytest.raises(ConfigurationError, match="is not that of node 0: give"):
            join(replace(place(1, (port,)), secret=Secret.new()))
        for meeting in (join(place(1, (port,))), ours.result(20.0)):
            close(meeting)


def test_who_does_not_come_is_named_again_and_again(
    listeners: list[socket.socket],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its node, by the number of workers of each; on another node, that others are awaited."""
    monkeypatch.setattr(rendezvous, "_FIRST_TOLD_S", 0.3)
    monkeypatch.setattr(rendezvous, "_TOLD_EVERY_S", 0.6)
    port = int(listeners[0].getsockname()[1])
    places = [
        replace(place(node, (port,), size=8, wait_s=1.2), slots=(2 * node, 2 * node + 1), width=2)
        for node in (0, 1)
    ]
    with ThreadPoolExecutor(2) as threads:
        both = [threads.submit(host, places[0], listeners[0]), threads.submit(join, places[1])]
        for one in both:
            with pytest.raises(
                AgreementError,
                match=r"node 2 \(workers 4, 5\), node 3 \(workers 6, 7\) did not come",
            ):
                one.result(20.0)
    said = capsys.readouterr().err
    missing = f"s for node 2 (workers 4, 5), node 3 (workers 6, 7) to come to {HOST}:{port}\n"
    assert said.count(missing) == 2
    assert said.count("s for all to come: node 0 names the missing workers") == 2


def test_node_0_that_does_not_answer_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rendezvous, "_FIRST_TOLD_S", 0.2)
    with closing(socket.socket()) as nobody:
        nobody.bind((HOST, 0))
        port = int(nobody.getsockname()[1])
        with pytest.raises(AgreementError, match="does not answer"):
            join(place(1, (port,), wait_s=0.5))
    assert f"s for node 0 to answer at {HOST}:{port}" in capsys.readouterr().err


@pytest.mark.parametrize("comes", [True, False], ids=["after it came", "before it came"])
def test_one_that_ends_before_all_have_met_ends_the_meeting_at_once(
    listeners: list[socket.socket], comes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = int(listeners[0].getsockname()[1])
    places = [place(slot, (port,), size=4) for slot in range(4)]
    dial, has_come = rendezvous._dial, threading.Event()

    def dialled(*args: Any) -> socket.socket:
        found = dial(*args)
        has_come.set()
        return found

    monkeypatch.setattr(rendezvous, "_dial", dialled)
    with ThreadPoolExecutor(2) as threads:
        waiting = [
            threads.submit(host, places[0], listeners[0]),
            threads.submit(join, places[1]),
        ]
        assert has_come.wait(30.0)
        if comes:
            with dial(places[2], port) as sock:
                sizes = {"world_size": 4, "reserve": 0}
                send_frame(sock, {"node": 2, "slots": (2,), "peer": peer(2), **sizes})
                assert not any(one.done() for one in waiting)
        else:
            tell_of_end(places[2], "signal 9")
        for one in waiting:
            with pytest.raises(EndedEarlyError, match="the agent of node 2 ended before all"):
                one.result(10.0)
