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
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from elaswave_plugin.agent import snapshot_server
from elaswave_plugin.agent.snapshot_server import SnapshotCopier
from elaswave_plugin.core.codec import to_json
from elaswave_plugin.core.layout.worker_facts import SealedShard
from elaswave_plugin.errors import LinkError
from elaswave_plugin.ipc import wire
from elaswave_plugin.ipc.secret import Kind
from elaswave_plugin.ipc.snapshot_record import BODY_OFFSET, pack_record
from elaswave_plugin.ipc.wire import LENGTH, receive_frame, receive_into, send_frame
from elaswave_plugin.snapshot.fetch import Fetcher
from tests.agent.jobs import Job
from tests.agent.serving import LONG_S, SlotStore, fetch, seal, serve
from tests.core.sealed import sealed
from tests.idle import Clock
from tests.job_secret import SECRET, accepted, dialled

SHORT_S = 0.05


@pytest.mark.parametrize("nodes", [2, 4])
def test_copies_are_served_after_the_owners_node_is_killed(tmp_path: Path, nodes: int) -> None:
    with Job(tmp_path, 4, TINY_LENGTH=str(3 << 20)).start(nodes=nodes) as job:
        # Of the workers of the last node, the last one's copy is on node 0.
        job.kill_node(nodes - 1)
        inventory = job.one("commit", 0, epoch=2)["inventory"]
        held = [record for record in inventory if record["owner"] == 3]
        assert [(r["holder"], r["is_copy"], r["step"]) for r in held] == [(0, True, 0)]
        job.tell(1, f"fetch {held[0]['holder_address']} 3 0 1")
        assert job.one("fetched", 1)["equal"]
        assert job.finish(range(4 - 4 // nodes)) == 0


def test_what_is_sealed_is_served_after_the_agent_is_killed(tmp_path: Path) -> None:
    """By the next one, at the same address: the memory is the guardian's."""
    with Job(tmp_path, 4).start(nodes=2) as job:
        job.kill_agent(2)
        job.next_agent(1, 1)
        job.kill(2)
        inventory = job.one("commit", 0, epoch=2)["inventory"]
        held = [record for record in inventory if record["owner"] == 2]
        # The next worker's slot is on the same node: it holds it as it is.
        assert [(r["holder"], r["is_copy"], r["step"]) for r in held] == [(2, False, 0)]
        job.tell(0, f"fetch {held[0]['holder_address']} 2 0 1")
        assert job.one("fetched", 0)["equal"]
        assert job.finish([0, 1, 3]) == 0


def test_a_dead_trainers_memory_is_served_by_its_agent(tmp_path: Path) -> None:
    with Job(tmp_path, 3).start() as job:
        job.kill(1)
        inventory = job.one("commit", 0, epoch=2)["inventory"]
        own = [r for r in inventory if r["owner"] == 1]
        assert [(r["holder"], r["is_copy"]) for r in own] == [(1, False)]
        job.tell(0, f"fetch {own[0]['holder_address']} 1 0 1")
        assert job.one("fetched", 0)["equal"]
        assert job.finish([0, 2]) == 0


def test_old_copies_are_dropped(tmp_path: Path) -> None:
    with Job(tmp_path, 3).start(nodes=3) as job:
        for step in (1, 2, 3):
            for slot in range(3):
                job.tell(slot, f"seal {step}")
            job.all("copied", range(3), step=step)
        job.kill(1)
        inventory = job.one("commit", 0, epoch=2)["inventory"]
        assert {record["step"] for record in inventory} == {2, 3}
        assert len([r for r in inventory if r["is_copy"]]) == 6
        assert job.finish([0, 2]) == 0


def hold(store: SlotStore, record: SealedShard) -> None:
    """Have a store hold a whole copy."""
    stop = partial(pytest.fail, "no other one comes")
    store.begin_copy(record, store.slot, stop)[:] = bytes(record.length)
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


def test_half_a_copy_never_replaces_a_whole_one(served: tuple[SlotStore, str]) -> None:
    store, address = served
    owner = SlotStore(8)
    arrived = threading.Event()
    copier = SnapshotCopier(
        owner,
        address,
        3,
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
        send_frame(sock, {"t": "copy", "record": newer, "holder": 3})
        sock.sendall(b"half" * 100)
        sock.shutdown(socket.SHUT_WR)
        assert sock.recv(1) == b""  # the server has given up on it
    assert [(r.owner, r.step, r.is_copy) for r in store.inventory(address)] == [(8, 5, True)]
    into = bytearray(5000)
    fetch(address, owner=8, step=5, epoch=1, offset=0, into=memoryview(into), timeout_s=LONG_S)
    assert into == content
    copier.close()


def test_a_copy_may_be_slow_but_not_stand_still(
    served: tuple[SlotStore, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds for any length: a sender that vanished would keep its memory for hours."""
    monkeypatch.setattr(snapshot_server, "STALL_S", 0.5)
    store, address = served
    piece = bytes(1 << 20)
    record = sealed(8, 5, length=3 << 20)
    with dialled(address, Kind.SERVER) as sock:
        send_frame(sock, {"t": "copy", "record": record, "holder": 3})
        for _ in range(3):
            time.sleep(0.3)  # together longer than the limit
            sock.sendall(piece)
        send_frame(sock, {"sealed": True})
        assert receive_frame(sock, LONG_S)["held"]
        larger = replace(record, buffer=1, length=64 << 20)
        send_frame(sock, {"t": "copy", "record": larger, "holder": 3})
        sock.sendall(piece)
        assert sock.recv(1) == b""
    assert [one.step for one in store.inventory(address)] == [5]


def test_whoever_waits_for_a_slow_copy_is_told_that_it_moves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the sender, whenever pieces are taken; the kernel holds 16 MB of them at most."""
    monkeypatch.setattr(snapshot_server, "TELL_EVERY_S", 0.0)
    moving: SimpleQueue[None] = SimpleQueue()
    owner = SlotStore(8)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        copier = SnapshotCopier(
            owner,
            f"127.0.0.1:{listener.getsockname()[1]}",
            3,
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


def copy_request(**record: object) -> bytes:
    return json.dumps({"t": "copy", "record": record, "holder": 3}).encode()


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
        copy_request(**{**to_json(COPY), "length": 1 << 80}),
        copy_request(**{**to_json(COPY), "length": "4"}),
        copy_request(owner=8),
        json.dumps({"t": "copy", "record": to_json(COPY)}).encode(),
    ],
    ids=range(12),
)
def test_what_is_no_request_ends_its_connection_in_one_line(
    served: tuple[SlotStore, str], body: bytes, capfd: pytest.CaptureFixture[str]
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


def test_a_long_request_is_not_waited_for(served: tuple[SlotStore, str]) -> None:
    """Nor is memory reserved for what four bytes announce."""
    _, address = served
    with dialled(address, Kind.SERVER) as sock:
        sock.sendall(LENGTH.pack(1 << 29))
        assert sock.recv(1) == b""


def test_an_answer_that_is_none_ends_no_copier() -> None:
    """Another program may have the port of an agent that is gone."""
    owner = SlotStore(8)
    told: SimpleQueue[str] = SimpleQueue()
    with contextlib.ExitStack() as open_ones, socket.create_server(("127.0.0.1", 0)) as stranger:
        copier = SnapshotCopier(
            owner,
            f"127.0.0.1:{stranger.getsockname()[1]}",
            3,
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
    served: tuple[SlotStore, str], monkeypatch: pytest.MonkeyPatch
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
    served: tuple[SlotStore, str],
) -> None:
    store, address = served
    owner = SlotStore(8)
    happened: SimpleQueue[Any] = SimpleQueue()
    copier = SnapshotCopier(
        owner,
        address,
        3,
        secret=SECRET,
        on_copied=lambda step, epoch: happened.put((step, epoch)),
        on_broken=happened.put,
        on_moving=nobody_waits,
    )
    content = b"later" * 50
    copier.send(seal(owner, b"first", step=4))
    copier.send(seal(owner, content, buffer=1, step=5))
    assert [happened.get(timeout=LONG_S) for _ in range(2)] == [(4, 1), (5, 1)]
    copier.close()
    owner.close()
    assert [(r.owner, r.step, r.holder, r.is_copy) for r in store.inventory(address)] == [
        (8, 4, 3, True),
        (8, 5, 3, True),
    ]
    into = bytearray(250)
    fetch(address, owner=8, step=5, epoch=1, offset=0, into=memoryview(into), timeout_s=LONG_S)
    assert into == content
    store.release(1)
    assert store.inventory(address)
    store.release(2)
    assert store.inventory(address) == []


def test_what_a_dead_trainer_has_sealed_is_served_for_all_slots_of_its_node(
    served: tuple[SlotStore, str],
) -> None:
    """No message is needed: the memory tells it, and which slot holds it."""
    store, address = served
    names = store.open_slot(4)
    record = sealed(4, 6, buffer=1, length=250)
    content = b"later" * 50
    memory = store.kept.fds[names[1]]
    os.pwrite(memory, pack_record(record).ljust(BODY_OFFSET, b"\0") + content, 0)
    seal(store, b"x", step=6)
    assert [(r.owner, r.step, r.holder, r.is_copy) for r in store.inventory(address)] == [
        (3, 6, 3, False),
        (4, 6, 4, False),
    ]
    into = bytearray(250)
    fetch(address, owner=4, step=6, epoch=1, offset=0, into=memoryview(into), timeout_s=LONG_S)
    assert into == content
    assert (store.newest_step(3), store.newest_step(4)) == (6, 6)


class FailingStore(SlotStore):
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
    address = serve(store)
    owner = SlotStore(8)
    happened: SimpleQueue[Any] = SimpleQueue()
    copier = SnapshotCopier(
        owner,
        address,
        3,
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
        address,
        owner=8,
        step=1,
        epoch=1,
        offset=0,
        into=memoryview(into),
        timeout_s=LONG_S,
    )
    assert into == content
    copier.close()


def test_a_copy_is_tried_no_more_once_it_is_overwritten() -> None:
    store = FailingStore(1 << 30)
    address = serve(store)
    owner = SlotStore(8)
    happened: SimpleQueue[Any] = SimpleQueue()
    copier = SnapshotCopier(
        owner,
        address,
        3,
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


def test_a_late_copy_never_replaces_a_newer_one(served: tuple[SlotStore, str]) -> None:
    store, address = served
    for step, epoch, kept in ((4, 1, (4, 1)), (2, 2, (2, 2)), (4, 1, (2, 2)), (4, 2, (4, 2))):
        refused = pytest.raises(ConnectionAbortedError) if (step, epoch) != kept else nullcontext()
        with refused:
            hold(store, sealed(8, step, epoch))
        assert [(r.step, r.epoch) for r in store.inventory(address)] == [kept]


def test_what_a_zombie_copies_leaves_its_successors_copy_in_place(
    served: tuple[SlotStore, str],
) -> None:
    """It was given up in epoch 1, and another worker has sealed in its slot since."""
    store, address = served
    newer = sealed(5, 8, 3, length=100)
    hold(store, newer)
    zombie = SlotStore(5)
    seals = [seal(zombie, b"z" * 100, buffer=buffer, step=6 + buffer) for buffer in (0, 1)]
    told: SimpleQueue[str] = SimpleQueue()
    copier = SnapshotCopier(
        zombie,
        address,
        3,
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
    """After a roll-back, while the node that shall hold the copy does not run."""
    with Job(tmp_path, 3, "--heartbeat-timeout-s=60").start(nodes=3) as job:
        job.kill(2)
        job.all("commit", [0, 1], epoch=2)
        guardian = job.launchers[1].pid
        os.kill(guardian, signal.SIGSTOP)
        job.stop_agent(1)
        job.tell(0, "seal 0")
        job.one("sealed", 0)
        assert job.nothing("copied", 0, for_s=0.5)
        for pid in (job.agents[1], guardian):
            os.kill(pid, signal.SIGCONT)
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
        clock, at_s = Clock(), job.kill(2)
        took_s = max(r["at_s"] for r in job.all("commit", [0, 1], epoch=2)) - at_s
        clock.check(took_s, copy_s / 2)
        assert job.finish([0, 1]) == 0
