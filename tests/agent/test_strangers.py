"""Strangers at an agent and at a worker: few, not for long, and in nobody's way."""

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elaswave_plugin.agent.snapshot_server import SnapshotServer, listen_for_data
from elaswave_plugin.communicator.links.frames import FrameHeader, Hello
from elaswave_plugin.communicator.links.link_table import LinkTable
from elaswave_plugin.core.codec import UnreadableMessageError, from_json, to_json
from elaswave_plugin.errors import LinkError
from elaswave_plugin.ipc import secret
from elaswave_plugin.ipc.frames import Beat, FromPeer
from elaswave_plugin.ipc.reactor import Reactor
from elaswave_plugin.ipc.requests import request
from elaswave_plugin.ipc.secret import Dialling, Kind, Secret, Strangers
from elaswave_plugin.ipc.wire import LENGTH, Channel, FrameBuffer, receive_frame, send_frame
from tests.agent.serving import SlotStore
from tests.core.sealed import sealed
from tests.idle import Deadline
from tests.job_secret import SECRET, dialled

LONG_S = 10.0


def ends(sock: socket.socket, within_s: float = LONG_S) -> bool:
    """Tell whether the other side closes the connection in time."""
    sock.settimeout(within_s)
    try:
        while sock.recv(4096):
            pass
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False
    return True


def until(true: Callable[[], bool]) -> None:
    deadline = Deadline(LONG_S)
    while not true():
        assert deadline.left_s()
        time.sleep(0.005)


@pytest.fixture
def server() -> SnapshotServer:
    answers = {"ask": lambda request: {"t": "told"}}
    found = SnapshotServer(SlotStore(3), listen_for_data("127.0.0.1"), answers, secret=SECRET)
    found.start()
    return found


def connected(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=LONG_S)


def test_the_oldest_stranger_goes_where_all_places_are_taken() -> None:
    pairs = [socket.socketpair() for _ in range(4)]
    door = Strangers("here", most=3)
    for ours, _ in pairs[:3]:
        door.came(ours)
    door.is_known(pairs[1][0])
    door.came(pairs[3][0])  # the place of the one that is known
    assert len(door) == 3
    again = socket.socketpair()
    door.came(again[0])
    assert ends(pairs[0][1])
    assert len(door) == 3 and not ends(pairs[2][1], 0.05)
    for sock in (*sum(pairs, ()), *again):
        sock.close()


def test_a_stranger_that_is_late_goes() -> None:
    ours, theirs = socket.socketpair()
    door = Strangers("here", within_s=0.1)
    door.came(ours)
    assert 0 < (door.next_end_s() or 0) <= 0.1
    assert not ends(theirs, 0.02)
    time.sleep(0.1)
    door.end_late()
    assert ends(theirs) and door.next_end_s() is None
    ours.close()
    theirs.close()


def test_a_full_house_of_silent_strangers_keeps_nobody_of_the_job_out(
    server: SnapshotServer, capfd: pytest.CaptureFixture[str]
) -> None:
    silent = [connected(server.address) for _ in range(200)]
    for _ in range(20):
        assert request(server.address, {"t": "ask"}, LONG_S, SECRET) == {"t": "told"}
    assert ends(silent[0])
    until(lambda: len(server._strangers) <= secret.MOST)
    for sock in silent:
        sock.close()
    until(lambda: len(server._strangers) == 0)
    assert capfd.readouterr().err.count("\n") <= 1


def test_another_secret_and_other_bytes_are_counted_and_said_once(
    server: SnapshotServer, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConnectionError, match="another secret"):
        request(server.address, {"t": "ask"}, LONG_S, Secret(b"8" * 64))
    for said in (b"GET / HTTP/1.0\r\n\r\n" * 10, os.urandom(100)):
        with connected(server.address) as sock:
            sock.sendall(said)
            assert ends(sock)
    dialling = Dialling(SECRET, Kind.SERVER)
    with connected(server.address) as sock:  # an honest opening, and a proof that is none
        sock.sendall(dialling.opening)
        sock.sendall(os.urandom(32))
        assert ends(sock)
    until(lambda: server._strangers.refused == 3)
    assert capfd.readouterr().err.count("\n") == 1
    assert request(server.address, {"t": "ask"}, LONG_S, SECRET) == {"t": "told"}


def test_valid_frames_without_a_proof_do_nothing(server: SnapshotServer) -> None:
    with connected(server.address) as sock:
        send_frame(sock, {"t": "copy", "record": to_json(sealed(8, 10**6)), "holder": 3})
        assert ends(sock)
    assert server._store.inventory(server.address) == []


def test_a_link_takes_no_message_of_one_without_the_secret() -> None:
    tables = LinkTable(0, secret=SECRET), LinkTable(1, secret=Secret(b"8" * 64))
    for table in tables:
        table.open_epoch(1, {one.slot: one.address for one in tables})
    with connected(tables[0].address) as sock:
        sock.sendall(Hello(1, tables[1].address, 1, 5, 0).pack() * 3)
        assert ends(sock)
    assert tables[0].connections.links == {}
    tables[1].connections.link_to(0)
    until(lambda: "another secret" in tables[1].connections.links[0].why_closed)
    assert tables[0].connections.links == {}
    for table in tables:
        table.close()


def test_strangers_at_a_worker_go_while_it_computes() -> None:
    """Nobody waits for an operation: the progress thread ends them."""
    table = LinkTable(0, secret=SECRET)
    table.connections._strangers._within_s = 0.2
    with connected(table.address) as sock:
        assert ends(sock, 5.0)
    assert len(table.connections._strangers) == 0
    table.close()


@pytest.mark.parametrize("said", [b"no json", b"[1]", b"1", b"[" * 100_000])
def test_a_frame_that_is_none_ends_its_channel_and_nothing_else(said: bytes) -> None:
    reactor, (ours, theirs) = Reactor(), socket.socketpair()
    frames: list[object] = []
    why: list[str] = []

    def closed(evidence: str) -> None:
        why.append(evidence)
        reactor.stop()

    Channel(reactor, ours, on_frame=frames.append, on_close=closed)
    send_frame(theirs, {"t": "first"})
    theirs.sendall(LENGTH.pack(len(said)) + said)
    reactor.after(LONG_S, reactor.stop)
    reactor.run()
    assert frames == [{"t": "first"}] and "no frame" in why[0]
    theirs.close()
    reactor.close()


def mutated(data: st.DataObject, whole: bytes) -> bytes:
    """Bytes of a valid frame, some of them changed, left out or put in."""
    out = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        where = data.draw(st.integers(0, len(out)))
        new = data.draw(st.binary(max_size=6))
        out[where : where + data.draw(st.integers(0, 6))] = new
    return bytes(out)


BEAT = json.dumps({"t": "beat", **to_json(Beat(n=3, heard=2, left=0.5))}).encode()
COPY = json.dumps({"t": "copy", "record": to_json(sealed(8, 6, 9)), "holder": 3}).encode()
HELLO = Hello(1, "127.0.0.1:9", 1, 5, 0).pack()


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.data())
def test_no_mutated_frame_does_more_than_be_refused(data: st.DataObject) -> None:
    body = mutated(data, data.draw(st.sampled_from([BEAT, COPY])))
    with contextlib.suppress(ValueError, UnreadableMessageError):
        for frame in FrameBuffer(1 << 16).feed(LENGTH.pack(len(body)) + body):
            from_json(FromPeer, frame)
    head = mutated(data, HELLO)
    with contextlib.suppress(LinkError):
        FrameHeader.unpack(head.ljust(100, b"\0"))
    with contextlib.suppress(LinkError):
        Hello.unpack(head[-80:])


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.data())
def test_no_mutated_request_ends_a_server(data: st.DataObject) -> None:
    store, listeners = SlotStore(3), listen_for_data("127.0.0.1")
    server = SnapshotServer(store, listeners, secret=SECRET)
    ours, theirs = socket.socketpair()
    body = mutated(data, COPY)
    with ours:
        ours.sendall(Dialling(SECRET, Kind.SERVER).opening)
        ours.sendall(LENGTH.pack(len(body)) + body)
        ours.shutdown(socket.SHUT_WR)
        server._serve(theirs)  # returns, whatever came
    assert store.inventory("here") == []
    for listener in listeners:
        listener.close()
    store.close()


def test_a_proven_mutated_request_ends_its_connection_alone(server: SnapshotServer) -> None:
    copy = b'{"t": "copy", "record": 1, "holder": 3}'
    for body in (b'{"t": "fetch", "owner": []}', b'{"t": null}', copy):
        with dialled(server.address, Kind.SERVER) as sock:
            sock.sendall(LENGTH.pack(len(body)) + body)
            assert ends(sock)
    with dialled(server.address, Kind.SERVER) as sock:
        send_frame(sock, {"t": "ask"})
        assert receive_frame(sock, LONG_S) == {"t": "told"}
