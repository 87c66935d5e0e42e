"""Supervisors find slot 0 of their own job among ports that others may have taken."""

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace

import pytest

from elaswave_plugin.errors import AgreementError, ConfigurationError
from elaswave_plugin.ipc.peer import Peer, own_machine
from elaswave_plugin.ipc.secret import Secret
from elaswave_plugin.ipc.wire import encode, send_frame
from elaswave_plugin.supervisor.peers import rendezvous
from elaswave_plugin.supervisor.peers.rendezvous import (
    EndedEarlyError,
    Meeting,
    RendezvousSpec,
    host_meeting,
    join_meeting,
    listen_at,
    tell_of_end,
)
from tests.job_secret import SECRET

HOST = "127.0.0.1"


def place(
    slot: int, ports: tuple[int, ...], *, job: str = "ours", wait_s: float = 20.0, size: int = 2
) -> RendezvousSpec:
    return RendezvousSpec(
        slot=slot,
        node=0,
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


def close(meeting: Meeting) -> None:
    for sock in meeting.links.values():
        sock.close()


def test_a_supervisor_passes_by_strangers_and_other_jobs(
    listeners: list[socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first port's owner says nothing, the second is the door of another job."""
    monkeypatch.setattr(rendezvous, "_FIRST_FRAME_S", 0.2)
    silent, other, own = listeners
    ports = tuple(int(listener.getsockname()[1]) for listener in (silent, other, own))
    with ThreadPoolExecutor(3) as threads:
        theirs: Future[Meeting] = threads.submit(
            host_meeting, place(0, ports[1:], job="theirs"), other, ""
        )
        ours = threads.submit(host_meeting, place(0, ports), own, "")
        joined = join_meeting(place(1, ports), HOST, "")
        met = ours.result(20.0)
        assert [peer.slot for peer in joined.peers] == [0, 1]
        assert met.peers == joined.peers
        assert met.links[1].getpeername() == joined.links[0].getsockname()
        assert not theirs.done()
        late = join_meeting(place(1, ports[1:], job="theirs"), HOST, "")
        assert late.links[0].getpeername()[1] == ports[1]
        for meeting in (joined, met, late, theirs.result(20.0)):
            close(meeting)


def test_a_stranger_that_speaks_is_no_supervisor(listeners: list[socket.socket]) -> None:
    """Only strangers answer at every port: told with the addresses, in time."""
    stranger = listeners[0]
    port = int(stranger.getsockname()[1])

    def greet() -> None:
        with closing(stranger.accept()[0]) as sock:
            sock.sendall(encode({"job": "theirs"}))

    speaker = threading.Thread(target=greet)
    speaker.start()
    with pytest.raises(AgreementError, match=f"at {HOST}:{port} within 0.02 s .*'theirs'.*'ours'"):
        join_meeting(place(1, (port,), wait_s=0.02), HOST, "")
    speaker.join()


def test_a_stranger_that_says_nothing_keeps_nobody_waiting(
    listeners: list[socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It knocked first; were it heard first, the meeting would be over before."""
    monkeypatch.setattr(rendezvous, "_FIRST_FRAME_S", 60.0)
    port = int(listeners[0].getsockname()[1])
    with ThreadPoolExecutor(1) as threads, socket.create_connection((HOST, port)) as stranger:
        ours = threads.submit(host_meeting, place(0, (port,)), listeners[0], "")
        assert stranger.recv(1)  # it was let in
        joined = join_meeting(place(1, (port,)), HOST, "")
        met = ours.result(20.0)
        assert met.peers == joined.peers
        for meeting in (joined, met):
            close(meeting)


def test_two_machines_with_one_node_number_are_told_to_all(
    listeners: list[socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker on a good node does not start either, and is not left waiting."""
    monkeypatch.setattr(rendezvous, "own_machine", lambda: f"thread {threading.get_ident()}")
    port = int(listeners[0].getsockname()[1])
    with ThreadPoolExecutor(3) as threads:
        places = [place(slot, (port,), size=3) for slot in range(3)]
        places[1] = replace(places[1], node=1)
        all_three = [
            threads.submit(host_meeting, places[0], listeners[0], ""),
            *(threads.submit(join_meeting, places[slot], HOST, "") for slot in (1, 2)),
        ]
        for one in all_three:
            with pytest.raises(ConfigurationError, match="workers 0 and 2 are both on node 0, and"):
                one.result(20.0)


def test_who_is_not_wanted_is_told_why(listeners: list[socket.socket]) -> None:
    port = int(listeners[0].getsockname()[1])
    with ThreadPoolExecutor(1) as threads:
        ours = threads.submit(host_meeting, place(0, (port,)), listeners[0], "")
        for stranger, why in (
            (place(0, (port,)), "worker 0 is refused: another supervisor has come as this worker"),
            (place(1, (port,), size=4), "its job has 4 workers and that of worker 0 has 2: give"),
        ):
            with pytest.raises(ConfigurationError, match=why):
                join_meeting(stranger, HOST, "")
        for meeting in (join_meeting(place(1, (port,)), HOST, ""), ours.result(20.0)):
            close(meeting)


def test_another_secret_than_that_of_node_0_is_told_at_once(
    listeners: list[socket.socket],
) -> None:
    port = listeners[0].getsockname()[1]
    with ThreadPoolExecutor(1) as threads:
        ours = threads.submit(host_meeting, place(0, (port,)), listeners[0], "")
        began_s = time.monotonic()
        with pytest.raises(ConfigurationError, match="is not that of node 0: give every"):
            join_meeting(replace(place(1, (port,)), secret=Secret.new()), HOST, "")
        assert time.monotonic() - began_s < 1.0
        for meeting in (join_meeting(place(1, (port,)), HOST, ""), ours.result(20.0)):
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
        replace(place(slot, (port,), size=6, wait_s=1.2), node=slot // 2, width=2)
        for slot in (0, 2, 3)
    ]
    with ThreadPoolExecutor(3) as threads:
        all_three = [
            threads.submit(host_meeting, places[0], listeners[0], ""),
            *(threads.submit(join_meeting, one, HOST, "") for one in places[1:]),
        ]
        for one in all_three:
            with pytest.raises(
                AgreementError, match=r"node 0 \(worker 1\), node 2 \(workers 4, 5\) did not come"
            ):
                one.result(20.0)
    said = capsys.readouterr().err
    missing = f"s for node 0 (worker 1), node 2 (workers 4, 5) to come to {HOST}:{port}\n"
    assert said.count(missing) == 2
    # One of the two on node 1.
    assert said.count("s for all to come: node 0 names the missing workers") == 2


def test_node_0_that_does_not_answer_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rendezvous, "_FIRST_TOLD_S", 0.2)
    with closing(socket.socket()) as nobody:
        nobody.bind((HOST, 0))
        port = int(nobody.getsockname()[1])
        with pytest.raises(AgreementError, match="does not answer"):
            join_meeting(place(1, (port,), wait_s=0.5), HOST, "")
    assert f"s for node 0 to answer at {HOST}:{port}" in capsys.readouterr().err


@pytest.mark.parametrize("comes", [True, False], ids=["after it came", "before it came"])
def test_one_that_ends_before_all_have_met_ends_the_meeting_at_once(
    listeners: list[socket.socket], comes: bool
) -> None:
    port = int(listeners[0].getsockname()[1])
    places = [place(slot, (port,), size=4) for slot in range(4)]
    with ThreadPoolExecutor(2) as threads:
        waiting = [
            threads.submit(host_meeting, places[0], listeners[0], ""),
            threads.submit(join_meeting, places[1], HOST, ""),
        ]
        if comes:
            with rendezvous._dial(places[2], port) as sock:
                own = Peer(slot=2, node=0, pid=1, control="", data="", machine=own_machine())
                send_frame(sock, {"slot": 2, "peer": own, "world_size": 4, "reserve": 0})
                assert not any(one.done() for one in waiting)
        else:
            tell_of_end(places[2], "signal 9")
        for one in waiting:
            with pytest.raises(EndedEarlyError, match="supervisor of worker 2 ended before all"):
                one.result(10.0)
