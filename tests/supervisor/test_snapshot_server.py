"""Sealed snapshots: served, copied, fetched, and what breaks on the way."""

import contextlib
import itertools
import json
import os
import signal
import socket
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from elaswave_plugin.core.codec import to_json
from elaswave_plugin.core.layout.sealed_shard import SealedShard
from elaswave_plugin.errors import LinkError
from elaswave_plugin.ipc import wire
from elaswave_plugin.ipc.handshake import Kind
from elaswave_plugin.ipc.wire import LENGTH, receive_frame, receive_into, send_frame
from elaswave_plugin.snapshot.fetch import Fetcher
from elaswave_plugin.supervisor import snapshot_server
from elaswave_plugin.supervisor.snapshot_server import SnapshotCopier, SnapshotServer
from elaswave_plugin.supervisor.snapshot_store import SnapshotStore
from tests.core.sealed import sealed
from tests.job_secret import SECRET, accepted, dialled
from tests.supervisor.jobs import Job
from tests.supervisor.serving import LONG_S, fetch, seal

SHORT_S = 0.05


@pytest.mark.parametrize("nodes", [1, 4])
def test_copies_are_served_after_the_owners_supervisor_is_killed(
    tmp_path: Path, nodes: int
) -> None:
    with Job(tmp_path, 4, TINY_LENGTH=str(3 << 20)).start(nodes=nodes) as job:
        job.kill_supervisor(2)
        inventory = job.one("commit", 0, epoch=2)["inventory"]
        held = [record for record in inventory if record["owner"] == 2]
        assert [(r["holder"], r["is_copy"], r["step"]) for r in held] == [(3, True, 0)]
        job.tell(0, f"fetch {held[0]['holder_address']} 2 0 1")
        assert job.one("fetched", 0)["equal"]
        assert job.finish([0, 1, 3]) == 0


def test_a_dead_trainers_memory_is_served_by_its_supervisor(tmp_path: Path) -> None:
    with Job(tmp_path, 3).start() as job:
        job.kill(1)
        inventory = job.one("commit", 0, epoch=2)["inventory"]
        own = next(r for r in inventory if r["owner"] == 1 and not r["is_copy"])
        assert own["holder"] == 1
        job.tell(0, f"fetch {own['holder_address']} 1 0 1")
        assert job.one("fetched", 0)["equal"]
        assert job.finish([0, 2]) == 0


def test_old_copies_are_dropped(tmp_path: Path) -> None:
    with Job(tmp_path, 3).start() as job:
        for step in (1, 2, 3):
            for slot in range(3):
                job.tell(slot, f"seal {step}")
            job.all("copied", range(3), step=step)
        job.kill(1)
        inventory = job.one("commit", 0, epoch=2)["inventory"]
        assert {record["step"] for record in inventory} == {2, 3}
        assert len([r for r in inventory if r["is_copy"]]) == 6
        assert job.finish([0, 2]) == 0


def hold(store: SnapshotStore, record: SealedShard) -> None:
    """Have a store hold a whole copy."""
    store.begin_copy(record, lambda: pytest.fail("no other one comes"))[:] = bytes(record.length)
    store.end_copy(record, whole=True)


TCP_REPAIR = 19


def vanish(sock: socket.socket) -> None:
    """Close without a FIN or an RST."""
    try:
        sock.setsockopt(socket.IPPROTO_TCP, TCP_REPAIR, 1)
    except PermissionError:
        sock.close()
        pytest.skip("only root can close a connection without a word")
    sock.close()


def test_a_fetch_from_nobody_names_the_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(LinkError, match=address):
        Fetcher(address, secret=SECRET, timeout_s=LONG_S)


def nobody_waits() -> None:
    """That a copy moves is for whoever waits for it."""


def test_half_a_copy_never_replaces_a_whole_one(served: tuple[SnapshotStore, str]) -> None:
    store, address = served
    owner = SnapshotStore(8)
    arrived = threading.Event()
    copier = SnapshotCopier(
        owner,
        address,
        secret=SECRET,
        on_copied=lambda step, epoch: arrived.set(),
        on_broken=pytest.fail,
        on_moving=nobody_waits,
    )
    content = b"whole" * 1000
    copier.send(seal(owner, content))
    assert arrived.wait(LONG_S)
    newer = sealed(8, 7, buffer=1, length=5000)
    with dialled(address, Kind.SERVER) as sock:
        send_frame(sock, {"t": "copy", "record": newer})
        sock.sendall(b"half" * 100)
        sock.shutdown(socket.SHUT_WR)
        assert sock.recv(1) == b""  # the server has given up on it
    assert [(r.owner, r.step, r.is_copy) for r in store.inventory(address)] == [(8, 5, True)]
    into = bytearray(5000)
    fetch(address, owner=8, step=5, epoch=1, offset=0, into=memoryview(into), timeout_s=LONG_S)
    assert into == content
    copier.close()


def test_a_copy_may_be_slow_but_not_stand_still(
    served: tuple[SnapshotStore, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds for any length: a sender that vanished would keep its memory for hours."""
    monkeypatch.setattr(snapshot_server, "STALL_S", 0.5)
    store, address = served
    piece = bytes(1 << 20)
    record = sealed(8, 5, length=3 << 20)
    with dialled(address, Kind.SERVER) as sock:
        send_frame(sock, {"t": "copy", "record": record})
        for _ in range(3):
            time.sleep(0.3)  # together longer than the limit
            sock.sendall(piece)
        send_frame(sock, {"sealed": True})
        assert receive_frame(sock, LONG_S)["held"]
        send_frame(sock, {"t": "copy", "record": replace(record, buffer=1, length=64 << 20)})
        sock.sendall(piece)
        assert sock.recv(1) == b""
    assert [one.step for one in store.inventory(address)] == [5]


def test_whoever_waits_for_a_slow_copy_is_told_that_it_moves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the sender, whenever pieces are taken; the kernel holds 16 MB of them at most."""
    monkeypatch.setattr(snapshot_server, "TELL_EVERY_S", 0.0)
    moving: SimpleQueue[None] = SimpleQueue()
    owner = SnapshotStore(8)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        copier = SnapshotCopier(
            owner,
            f"127.0.0.1:{listener.getsockname()[1]}",
            secret=SECRET,
            on_copied=lambda step, epoch: pytest.fail("nobody has acknowledged it"),
            on_broken=lambda why: None,
            on_moving=lambda: moving.put(None),
        )
        copier.send(seal(owner, bytes(64 << 20)))
        with accepted(listener, Kind.SERVER) as peer:
            assert receive_frame(peer, LONG_S)["t"] == "copy"
            into = memoryview(bytearray(4 << 20))
            for _ in range(6):
                receive_into(peer, into, time.monotonic() + LONG_S)
                while not moving.empty():
                    moving.get()
                receive_into(peer, into, time.monotonic() + LONG_S)
                moving.get(timeout=LONG_S)
        copier.close()


COPY = sealed(8, 6, 9)


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b"[",
        b"1",
        b"\xff",
        b"[" * 100_000,
        b'{"t": "fetch"}',
        b'{"t": []}',
        b'{"t": "sing"}',
        json.dumps({"t": "copy", "record": {**to_json(COPY), "length": 1 << 80}}).encode(),
        json.dumps({"t": "copy", "record": {**to_json(COPY), "length": "4"}}).encode(),
        b'{"t": "copy", "record": {"owner": 8}}',
    ],
    ids=range(11),
)
def test_what_is_no_request_ends_its_connection_in_one_line(
    served: tuple[SnapshotStore, str], body: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    store, address = served
    hold(store, replace(COPY, epoch=1))
    with dialled(address, Kind.SERVER) as sock:
        sock.sendall(LENGTH.pack(len(body)) + body)
        assert sock.recv(1) == b""
    complaint = capfd.readouterr().err
    assert complaint.startswith(f"elaswave: a connection to {address} was closed")
    assert "no request: " in complaint
    assert complaint.count("\n") == 1 and len(complaint) < 300
    assert [one.epoch for one in store.inventory(address)] == [1]


def test_a_long_request_is_not_waited_for(served: tuple[SnapshotStore, str]) -> None:
    """Nor is memory reserved for what four bytes announce."""
    _, address = served
    with dialled(address, Kind.SERVER) as sock:
        sock.sendall(LENGTH.pack(1 << 29))
        assert sock.recv(1) == b""


def test_an_answer_that_is_none_ends_no_copier() -> None:
    """Another program may have the port of a supervisor that is gone."""
    owner = SnapshotStore(8)
    told: SimpleQueue[str] = SimpleQueue()
    with contextlib.ExitStack() as open_ones, socket.create_server(("127.0.0.1", 0)) as stranger:
        copier = SnapshotCopier(
            owner,
            f"127.0.0.1:{stranger.getsockname()[1]}",
            secret=SECRET,
            on_copied=lambda step, epoch: told.put("copied"),
            on_broken=told.put,
            on_moving=nobody_waits,
        )
        copier.send(seal(owner, b"x"))
        for _ in range(2):  # it is tried again
            sock = open_ones.enter_context(accepted(stranger, Kind.SERVER))
            sock.sendall(LENGTH.pack(1) + b"1")
            receive_frame(sock, LONG_S)
        assert "not 1" in told.get(timeout=LONG_S)
    copier.close()


def test_a_peer_that_vanished_is_noticed(
    served: tuple[SnapshotStore, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a FIN, as when its machine loses power: nothing would come for a day."""
    monkeypatch.setattr(wire, "PROBE_AFTER_S", 1)
    _, address = served
    others = set(threading.enumerate())
    sock = dialled(address, Kind.SERVER)
    send_frame(sock, {"t": "fetch", "owner": 1, "step": 1, "epoch": 1})
    assert "error" in receive_frame(sock, LONG_S)
    (peer,) = set(threading.enumerate()) - others
    assert peer.name == "snapshot-peer"
    vanish(sock)
    peer.join(LONG_S)
    assert not peer.is_alive()


def test_what_is_held_outlives_its_owner_until_it_is_released(
    served: tuple[SnapshotStore, str],
) -> None:
    store, address = served
    owner = SnapshotStore(8)
    happened: SimpleQueue[Any] = SimpleQueue()
    copier = SnapshotCopier(
        owner,
        address,
        secret=SECRET,
        same_node=True,
        on_copied=lambda step, epoch: happened.put((step, epoch)),
        on_broken=happened.put,
        on_moving=nobody_waits,
    )
    copier.send(seal(owner, b"first", step=4))
    assert happened.get(timeout=LONG_S) == (4, 1)
    seal(owner, b"later" * 50, buffer=1, step=5)  # no message: the memory tells it
    os.pwrite(owner.fds[0], bytes(8), 0)  # as if it died while it sealed step 6
    owner.close()
    copier.close()
    assert [(r.owner, r.step, r.is_copy) for r in store.inventory(address)] == [(8, 5, True)]
    into = bytearray(250)
    fetch(address, owner=8, step=5, epoch=1, offset=0, into=memoryview(into), timeout_s=LONG_S)
    assert into == b"later" * 50
    store.release(1)
    assert store.inventory(address)
    store.release(2)
    assert store.inventory(address) == []


def test_memory_that_cannot_be_held_is_reported(served: tuple[SnapshotStore, str]) -> None:
    _, address = served
    owner = SnapshotStore(8)
    record = seal(owner, b"x")
    # Not closed: its number would be given to whichever descriptor is opened next.
    with Path(os.devnull).open("rb") as no_memory:
        os.dup2(no_memory.fileno(), owner.fds[1])
    happened: SimpleQueue[Any] = SimpleQueue()
    copier = SnapshotCopier(
        owner,
        address,
        secret=SECRET,
        same_node=True,
        on_copied=lambda step, epoch: happened.put((step, epoch)),
        on_broken=happened.put,
        on_moving=nobody_waits,
    )
    copier.send(record)
    assert "closed" in happened.get(timeout=LONG_S)
    copier.close()


class FailingStore(SnapshotStore):
    """A receiver's store that fails to take copies, so many times."""

    def __init__(self, failures: int) -> None:
        super().__init__(3)
        self.failures = failures

    def end_copy(self, record: SealedShard, *, whole: bool) -> None:
        super().end_copy(record, whole=whole and not self.failures)
        if self.failures:
            self.failures -= 1
            raise OSError("injected")


@pytest.mark.parametrize("failures", [1, 2, 4])
def test_a_copy_that_fails_is_tried_until_it_arrives(failures: int) -> None:
    """Nothing else is sealed before: everybody waits for it."""
    store = FailingStore(0)
    server = SnapshotServer(store, "127.0.0.1", secret=SECRET)
    server.start()
    owner = SnapshotStore(8)
    happened: SimpleQueue[Any] = SimpleQueue()
    copier = SnapshotCopier(
        owner,
        server.address,
        secret=SECRET,
        on_copied=lambda step, epoch: happened.put((step, epoch)),
        on_broken=happened.put,
        on_moving=nobody_waits,
    )
    copier.send(seal(owner, b"first" * 100, step=0))
    assert happened.get(timeout=LONG_S) == (0, 1)
    store.failures = failures
    content = b"later" * 200
    copier.send(seal(owner, content, step=1, buffer=1))
    broken = []
    while isinstance(news := happened.get(timeout=LONG_S), str):
        broken.append(news)
    assert (news, store.failures) == ((1, 1), 0)
    # Not told again for the same reason, however often it fails.
    assert broken and all(one != following for one, following in itertools.pairwise(broken))
    into = bytearray(1000)
    fetch(
        server.address,
        owner=8,
        step=1,
        epoch=1,
        offset=0,
        into=memoryview(into),
        timeout_s=LONG_S,
    )
    assert into == content
    copier.close()
    server.close()


def test_a_copy_is_tried_no_more_once_it_is_overwritten() -> None:
    store = FailingStore(1 << 30)
    server = SnapshotServer(store, "127.0.0.1", secret=SECRET)
    server.start()
    owner = SnapshotStore(8)
    happened: SimpleQueue[Any] = SimpleQueue()
    copier = SnapshotCopier(
        owner,
        server.address,
        secret=SECRET,
        on_copied=lambda step, epoch: happened.put((step, epoch)),
        on_broken=happened.put,
        on_moving=nobody_waits,
    )
    copier.send(seal(owner, b"old", step=1))
    assert isinstance(happened.get(timeout=LONG_S), str)
    copier.send(seal(owner, b"new", step=3))
    store.failures = 0
    while isinstance(news := happened.get(timeout=LONG_S), str):
        pass
    assert news == (3, 1)
    copier.close()
    server.close()


def test_a_late_copy_never_replaces_a_newer_one(served: tuple[SnapshotStore, str]) -> None:
    store, address = served
    for step, epoch, kept in ((4, 1, (4, 1)), (2, 2, (2, 2)), (4, 1, (2, 2)), (4, 2, (4, 2))):
        refused = pytest.raises(ConnectionAbortedError) if (step, epoch) != kept else nullcontext()
        with refused:
            hold(store, sealed(8, step, epoch))
        assert [(r.step, r.epoch) for r in store.inventory(address)] == [kept]


def test_what_a_zombie_copies_leaves_its_successors_copy_in_place(
    served: tuple[SnapshotStore, str],
) -> None:
    """It was given up in epoch 1, and another worker has sealed in its slot since."""
    store, address = served
    newer = sealed(5, 8, 3, length=100)
    hold(store, newer)
    zombie = SnapshotStore(5)
    seals = [seal(zombie, b"z" * 100, buffer=buffer, step=6 + buffer) for buffer in (0, 1)]
    told: SimpleQueue[str] = SimpleQueue()
    copier = SnapshotCopier(
        zombie,
        address,
        secret=SECRET,
        on_copied=lambda step, epoch: told.put("copied"),
        on_broken=lambda why: told.put("broken"),
        on_moving=nobody_waits,
    )
    for record in seals:
        copier.send(record)
    copier.close()
    assert [told.get(timeout=LONG_S) for _ in seals] == ["broken", "broken"]
    there = replace(newer, holder=store.slot, holder_address=address, is_copy=True)
    assert store.inventory(address) == [there]


def test_copies_of_a_step_that_is_sealed_again_are_awaited(tmp_path: Path) -> None:
    """After a roll-back, while the supervisor that shall hold the copy does not run."""
    with Job(tmp_path, 3, "--heartbeat-timeout-s=60").start() as job:
        job.kill(2)
        job.all("commit", [0, 1], epoch=2)
        job.stop_supervisor(1)
        job.tell(0, "seal 0")
        job.one("sealed", 0)
        assert job.nothing("copied", 0, for_s=0.5)
        os.kill(job.supervisors[1], signal.SIGCONT)
        job.one("copied", 0, step=0)
        assert job.finish([0, 1]) == 0


def test_bulk_copies_do_not_delay_the_agreement(tmp_path: Path) -> None:
    """A commit while half a gibibyte is on its way takes a fraction of the time of that copy."""
    with Job(tmp_path, 3, TINY_LENGTH=str(512 << 20)).start(sealed=False, nodes=3) as job:
        for slot in (1, 2):
            job.tell(slot, "bulk 0")
        job.all("copied", [1, 2])
        job.tell(0, "bulk 0")
        copy_s = job.one("copied", 0)["took_s"]
        job.tell(0, "bulk 1")
        job.one("sealed", 0)
        at_s = job.kill(2)
        took_s = max(r["at_s"] for r in job.all("commit", [0, 1], epoch=2)) - at_s
        assert took_s < copy_s / 2
        assert job.finish([0, 1]) == 0


def test_a_server_is_closed_while_somebody_connects() -> None:
    """Its accepting thread, woken by that one, may be the first to see that it is closed."""
    server = SnapshotServer(SnapshotStore(0), "127.0.0.1", secret=SECRET)
    server.start()
    tell_closed = server._closed.set

    def tell_and_let_it_see() -> None:
        tell_closed()
        host, _, port = server.address.rpartition(":")
        with contextlib.suppress(OSError):
            socket.create_connection((host, int(port))).close()
        deadline_s = time.monotonic() + LONG_S
        while any(one.fileno() >= 0 for one in server._listeners):
            assert time.monotonic() < deadline_s
            time.sleep(0.001)  # nothing tells that the thread has closed it

    server._closed.set = tell_and_let_it_see  # type: ignore[method-assign]
    server.close()
