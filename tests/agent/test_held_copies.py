"""Copies of another node's workers: two buffers each, and none that a recovery may read is lost."""

import mmap
import os
import re
import socket
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from elaswave_plugin.agent.snapshot_store import HeldCopies, SnapshotStore
from elaswave_plugin.core.layout.worker_facts import SealedShard
from elaswave_plugin.ipc.secret import Kind
from elaswave_plugin.ipc.snapshot_record import BODY_OFFSET, MEMORIES
from elaswave_plugin.ipc.wire import receive_frame, send_frame
from elaswave_plugin.snapshot.fetch import Fetcher
from tests.agent.serving import NamedMemory, SlotStore, serve
from tests.core.sealed import sealed
from tests.idle import Deadline
from tests.job_secret import SECRET, dialled

LONG_S = 10.0
LENGTH = 1 << 20
# The page of a whole copy in which it is written down as such; the rest before the body is a hole.
RECORD = mmap.PAGESIZE


def record_of(owner: int, step: int, epoch: int = 1, length: int = LENGTH) -> SealedShard:
    return sealed(owner, step, epoch, buffer=step % 2, length=length, payload_bytes=length)


def bytes_of(record: SealedShard) -> bytes:
    return bytes([record.owner, record.step, record.epoch, 7]) * (record.length // 4)


class Holder:
    """A store that is served, and connections to it; use it in a with statement."""

    def __init__(self) -> None:
        self.memory = NamedMemory()
        self.store = SlotStore(3, self.memory)
        self.address = serve(self.store)
        self._socks: list[socket.socket] = []

    def __enter__(self) -> "Holder":
        return self

    def __exit__(self, *exception: object) -> None:
        for sock in self._socks:
            sock.close()
        self.wait_until_filled(False)
        self.store.close()

    def wait_until_filled(self, wanted: bool) -> None:
        """Until a buffer is being filled, or none is; nothing tells that it has begun."""
        deadline = Deadline(LONG_S)
        with self.store._lock:
            while any(one.stop for one in self.store._copies._buffers.values()) != wanted:
                assert deadline.left_s()
                self.store._lock.wait(0.01)

    def begin(self, record: SealedShard, share: float = 1.0) -> socket.socket:
        """Send a copy, or the first part of it, over a connection of its own."""
        self._socks.append(sock := dialled(self.address, Kind.SERVER))
        send_frame(sock, {"t": "copy", "record": record, "holder": 3})
        sock.sendall(bytes_of(record)[: int(share * record.length)])
        return sock

    def begin_part(self, record: SealedShard, share: float) -> socket.socket:
        """The same, until the store is being filled by it."""
        sock = self.begin(record, share)
        self.wait_until_filled(True)
        return sock

    def go_on(self, sock: socket.socket, record: SealedShard, share: float) -> None:
        """Send the rest of a copy of which a part was sent."""
        sock.sendall(bytes_of(record)[int(share * record.length) :])
        self.finish(sock)

    def finish(self, sock: socket.socket, *, still_sealed: bool = True) -> None:
        with sock:
            send_frame(sock, {"sealed": still_sealed})
            assert receive_frame(sock, LONG_S) == {"t": "copied", "held": still_sealed}

    def send(self, record: SealedShard, *, still_sealed: bool = True) -> None:
        self.finish(self.begin(record), still_sealed=still_sealed)

    def check_offers(self, *records: SealedShard) -> None:
        """Assert that a recovery would find these records, and each of them whole."""
        found = [(one.owner, one.epoch, one.step) for one in self.store.inventory(self.address)]
        assert sorted(found) == sorted((one.owner, one.epoch, one.step) for one in records)
        with Fetcher(self.address, secret=SECRET, timeout_s=LONG_S) as fetcher:
            for one in records:
                into = bytearray(one.length)
                what = {"owner": one.owner, "step": one.step, "epoch": one.epoch}
                fetcher.fetch(**what, offset=0, into=memoryview(into), timeout_s=LONG_S)
                assert into == bytes_of(one)

    def wait_until_free(self) -> None:
        """Until no memory is taken: who serves lets go behind the answer that its peer has."""
        deadline = Deadline(LONG_S)
        while self.memories():
            assert deadline.left_s()
            time.sleep(0.01)

    def memories(self) -> Counter[int]:
        """Bytes that each memory of copies takes, by inode, as /proc has it."""
        found: Counter[int] = Counter()
        for entry in Path("/proc/self/fd").iterdir():
            try:
                name, state = os.readlink(entry), entry.stat()
            except FileNotFoundError:
                continue  # the descriptor of the listing itself
            if re.match("/memfd:elaswave copy of worker 10[789] ", name):
                found[state.st_ino] = 512 * state.st_blocks
        return found


def has_ended(sock: socket.socket) -> bool:
    """Wait until the other end of a connection is closed."""
    sock.settimeout(LONG_S)
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:  # what was sent was not read
        return True


@pytest.fixture
def holder() -> Iterator[Holder]:
    with Holder() as made:
        yield made


def a_run_with_a_loss(holder: Holder) -> None:
    """Steps of one owner, a copy that breaks off, a loss, and the same step in a new view."""
    steps = [record_of(108, step) for step in range(5)]
    holder.send(steps[0])
    for before, record in pairwise(steps[:4]):
        moving = holder.begin_part(record, 0.5)
        holder.check_offers(before)
        holder.go_on(moving, record, 0.5)
        holder.check_offers(before, record)
    # A loss while the others copy step 4: all go back to step 3.
    broken = holder.begin_part(steps[4], 0.9)
    broken.shutdown(socket.SHUT_WR)
    assert has_ended(broken)
    holder.check_offers(steps[3])
    again = record_of(108, 4, epoch=2)
    moving = holder.begin_part(again, 0.1)
    holder.check_offers(steps[3])
    holder.go_on(moving, again, 0.1)
    holder.check_offers(steps[3], again)


def test_what_a_recovery_would_read_is_whole_at_any_time(holder: Holder) -> None:
    a_run_with_a_loss(holder)


def test_control_one_buffer_for_all_steps_is_seen(
    monkeypatch: pytest.MonkeyPatch, holder: Holder
) -> None:
    start, over = HeldCopies.begin, HeldCopies.end
    monkeypatch.setattr(
        HeldCopies,
        "begin",
        lambda self, record, *how: start(self, replace(record, buffer=0), *how),
    )
    monkeypatch.setattr(
        HeldCopies,
        "end",
        lambda self, record, *, whole: over(self, replace(record, buffer=0), whole=whole),
    )
    with pytest.raises(AssertionError):
        a_run_with_a_loss(holder)


def test_control_a_copy_that_is_offered_before_it_is_whole_is_seen(
    monkeypatch: pytest.MonkeyPatch, holder: Holder
) -> None:
    start = HeldCopies.begin

    def offered_at_once(self: HeldCopies, record: SealedShard, *how: Any) -> memoryview:
        body = start(self, record, *how)
        self._buffers[record.owner, record.buffer].is_whole = True
        return body

    monkeypatch.setattr(HeldCopies, "begin", offered_at_once)
    with pytest.raises(AssertionError):
        a_run_with_a_loss(holder)


def test_a_copy_is_written_into_the_memory_of_the_one_before_the_last(holder: Holder) -> None:
    for step in (0, 1):
        holder.send(record_of(108, step))
    first = holder.memories()
    assert len(first) == 2 and set(first.values()) == {RECORD + LENGTH}
    for step in (2, 3, 4):
        holder.send(record_of(108, step))
        assert holder.memories() == first
    # A larger shard takes more, in the same memory, and a smaller one gives it back.
    for step, length in ((5, 3 * LENGTH), (6, 3 * LENGTH), (7, LENGTH), (8, LENGTH)):
        holder.send(record_of(108, step, 2 + step // 7, length))
        assert holder.memories().keys() == first.keys()
        bodies = {5: 4, 6: 6, 7: 4, 8: 2}[step] * LENGTH
        assert holder.memories().total() == 2 * RECORD + bodies


def test_who_begins_again_ends_the_connection_that_still_writes(holder: Holder) -> None:
    """As where its owner saw the old one break: of two writers the bytes would be mixed."""
    holder.send(record_of(108, 4))
    stuck = holder.begin_part(record_of(108, 5), 0.5)
    holder.send(record_of(108, 5))
    assert has_ended(stuck)
    holder.check_offers(record_of(108, 4), record_of(108, 5))
    assert len(holder.memories()) == 2


def test_an_older_copy_does_not_disturb_one_that_is_on_its_way(holder: Holder) -> None:
    """Of a worker that was given up, and whose successor copies."""
    newer = record_of(108, 5, epoch=2)
    moving = holder.begin_part(newer, 0.5)
    assert has_ended(holder.begin(record_of(108, 7, epoch=1, length=4)))
    holder.go_on(moving, newer, 0.5)
    holder.check_offers(newer)


def a_change_of_holders(holder: Holder) -> None:
    """The job goes back to step 5; 108 is lost, 109 copies elsewhere, and 107 to here."""
    for step in (4, 5):
        for owner in (108, 109):
            holder.send(record_of(owner, step))
    first, second = (record_of(107, step, 2, 3 * LENGTH) for step in (6, 7))
    moving = holder.begin_part(first, 0.5)
    holder.check_offers(record_of(108, 5), record_of(109, 5))
    assert len(holder.memories()) == 3
    holder.go_on(moving, first, 0.5)
    holder.send(second)
    holder.check_offers(first, second)
    assert holder.memories().total() == 2 * RECORD + first.length + second.length


def test_copies_of_an_earlier_view_go_before_those_of_a_new_one_come(holder: Holder) -> None:
    """So that both never take memory at once: first those of the buffer that all seal into."""
    a_change_of_holders(holder)


def test_control_copies_of_an_earlier_view_that_stay_are_seen(
    monkeypatch: pytest.MonkeyPatch, holder: Holder
) -> None:
    monkeypatch.setattr(HeldCopies, "_drop_earlier_views", lambda self, record: None)
    with pytest.raises(AssertionError):
        a_change_of_holders(holder)


def test_what_is_released_is_freed_where_no_copy_follows(
    holder: Holder,
) -> None:
    for owner in (108, 109):
        for step in (4, 5):
            holder.send(record_of(owner, step))
    holder.send(record_of(108, 6, 2, 4))  # 109 has only step 5 left by now
    holder.store.release(2)
    holder.check_offers(record_of(108, 6, 2, 4))
    # The buffer of 108 that its next copy will be written to stays.
    assert len(holder.memories()) == 2
    holder.store.release(3)
    holder.check_offers()
    holder.wait_until_free()


def test_a_length_that_no_memory_has_leaves_what_is_there(holder: Holder) -> None:
    holder.send(record_of(108, 4))
    for length in (1 << 80, 1 << 60):
        with dialled(holder.address, Kind.SERVER) as sock:
            send_frame(sock, {"t": "copy", "record": record_of(108, 6, length=length), "holder": 3})
            assert sock.recv(1) == b""
        holder.check_offers(record_of(108, 4))


def test_a_memory_that_no_worker_has_is_refused(holder: Holder) -> None:
    with pytest.raises(ValueError, match=f"buffer {MEMORIES}"):
        holder.store.begin_copy(replace(record_of(108, 4), buffer=MEMORIES), 3, lambda: None)
    assert not holder.memories()


def test_whole_copies_are_there_for_the_next_agent_and_half_ones_are_not(holder: Holder) -> None:
    """All of it is the guardian's memory; what is written on goes on in the same one."""
    for step in (4, 5):
        holder.send(record_of(108, step))
    holder.send(record_of(109, 4))
    half = holder.begin_part(record_of(108, 6), 0.5)
    names = {*holder.memory.names()}
    next_life = SlotStore(3, holder.memory)
    found = next_life.inventory("x")
    assert [(one.owner, one.step, one.holder, one.is_copy) for one in found] == [
        (108, 5, 3, True),
        (109, 4, 3, True),
    ]
    for one in found:
        memory = next_life.open(owner=one.owner, step=one.step, epoch=one.epoch)
        assert memory is not None and memory[1] == one.length
        assert os.pread(memory[0], one.length, BODY_OFFSET) == bytes_of(one)
        os.close(memory[0])
    # Nobody knows what the half one is of: its memory is given back.
    assert names - {*holder.memory.names()} == {"elaswave copy of worker 108 buffer 0"}
    SnapshotStore.close(next_life)
    half.close()
