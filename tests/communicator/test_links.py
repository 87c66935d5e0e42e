"""The link table by itself: framing, matching, epochs, refusals, counters, descriptors, threads."""

import contextlib
import gc
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from elaswave_plugin.communicator.groups.algorithms import receive, send
from elaswave_plugin.communicator.links import connections, link_table
from elaswave_plugin.communicator.links.connection import Connection, State
from elaswave_plugin.communicator.links.frames import (
    HEADER_BYTES,
    FrameHeader,
    Hello,
    Kind,
    control_header,
)
from elaswave_plugin.communicator.links.link_table import LinkTable
from elaswave_plugin.communicator.links.operation import Group, Operation
from elaswave_plugin.errors import EpochChanged, LinkError
from elaswave_plugin.ipc.secret import Dialling
from elaswave_plugin.ipc.secret import Kind as Purpose
from tests.communicator.forked import connected
from tests.job_secret import SECRET, dialled

LIMIT_S = 10.0


@pytest.fixture
def pair() -> Iterator[tuple[LinkTable, LinkTable]]:
    """Two tables in one process, epoch 1 open."""
    tables = LinkTable(0, secret=SECRET), LinkTable(1, secret=SECRET)
    _open(tables, 1)
    yield tables
    for table in tables:
        table.close()


def _open(tables: tuple[LinkTable, ...], epoch: int) -> None:
    addresses = {table.slot: table.address for table in tables}
    for table in tables:
        table.open_epoch(epoch, addresses)


def _group(table: LinkTable) -> Group:
    return Group(number=7, label="pair", members=(0, 1), rank=table.slot)


def _send(table: LinkTable, data: bytes | bytearray | memoryview, tag: int = 0) -> Operation:
    operation = Operation(table, _group(table), "send", timeout_s=LIMIT_S, tag=tag)
    table.run(operation, lambda op: send(op, memoryview(data), 1 - table.slot))
    return operation


def _receive(
    table: LinkTable, size: int, tag: int = 0, timeout_s: float = LIMIT_S
) -> tuple[Operation, bytearray]:
    into = bytearray(size)
    operation = Operation(table, _group(table), "recv", timeout_s=timeout_s, tag=tag)
    table.run(operation, lambda op: receive(op, memoryview(into), 1 - table.slot))
    return operation, into


def _family(table: LinkTable) -> socket.AddressFamily:
    (link,) = table.connections.links.values()
    return socket.AddressFamily(link.sock.family)


@pytest.mark.parametrize("size", [5, 70_000, 9_000_000])
@pytest.mark.parametrize(
    ("hosts", "near_open", "family"),
    [
        (("127.0.0.1", "127.0.0.1"), True, socket.AF_UNIX),
        (("127.0.0.1", "127.0.0.1"), False, socket.AF_INET),
        (("127.0.0.1", "127.0.0.2"), True, socket.AF_INET),
    ],
)
def test_a_unix_socket_on_one_host_and_tcp_otherwise(
    hosts: tuple[str, str],
    near_open: bool,
    family: int,
    size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tables = LinkTable(0, hosts[0], secret=SECRET), LinkTable(1, hosts[1], secret=SECRET)
    if not near_open:
        monkeypatch.setattr(connections, "_name", lambda address: f"\0nobody at {address}")
    _open(tables, 1)
    data = os.urandom(size)
    got, into = _receive(tables[1], size)
    tables[0].wait(_send(tables[0], data))
    tables[1].wait(got)
    assert into == data
    assert [_family(table) for table in tables] == [family, family]
    for table in tables:
        table.close()


def _until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < limit, "the condition never came true"
        os.sched_yield()


def test_a_header_survives_its_trip() -> None:
    header = FrameHeader(Kind.POINT, 2, 1, 3, 4, 5, 2**64 - 1, -9, 8, 9, 10)
    assert len(header.pack()) == HEADER_BYTES
    assert FrameHeader.unpack(header.pack()) == header
    with pytest.raises(LinkError, match="not at a frame header"):
        FrameHeader.unpack(b"x" * HEADER_BYTES)


@pytest.mark.parametrize("size", [0, 1, 1000, 70_000, (1 << 20) + 1, 9_000_000])
@pytest.mark.parametrize("receive_first", [True, False])
def test_messages_of_any_size(
    pair: tuple[LinkTable, LinkTable], size: int, receive_first: bool
) -> None:
    left, right = pair
    data = os.urandom(size)
    if receive_first:
        got, into = _receive(right, size)
        sent = _send(left, data)
    else:
        sent = _send(left, data)
        _until(lambda: left.sent_bytes > size or size > 1 << 20)
        got, into = _receive(right, size)
    left.wait(sent)
    right.wait(got)
    assert into == data


def test_messages_match_by_tag_and_keep_their_order(pair: tuple[LinkTable, LinkTable]) -> None:
    left, right = pair
    for number in range(50):
        _send(left, bytes([number]), tag=number % 2)
    for tag in (1, 0):
        for number in range(tag, 50, 2):
            got, into = _receive(right, 1, tag)
            right.wait(got)
            assert into[0] == number


def test_both_may_dial_at_once() -> None:
    for _ in range(30):
        tables = LinkTable(0, secret=SECRET), LinkTable(1, secret=SECRET)
        _open(tables, 1)
        start = threading.Barrier(2)
        errors: list[BaseException] = []

        def talk(
            table: LinkTable,
            start: threading.Barrier = start,
            errors: list[BaseException] = errors,
        ) -> None:
            try:
                start.wait(LIMIT_S)
                sent = _send(table, bytes([table.slot]) * 200_000)
                got, into = _receive(table, 200_000)
                table.wait(got)
                table.wait(sent)
                assert into == bytes([1 - table.slot]) * 200_000
            except BaseException as error:  # handed to the test's thread
                errors.append(error)

        threads = [threading.Thread(target=talk, args=(table,)) for table in tables]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        assert not errors
        assert connected(tables[0]) == [1] and connected(tables[1]) == [0]
        for table in tables:
            table.close()


def test_traffic_is_counted_by_epoch(pair: tuple[LinkTable, LinkTable]) -> None:
    left, right = pair
    got, _ = _receive(right, 5000)
    left.wait(_send(left, bytes(5000)))
    right.wait(got)
    assert 5000 < left.sent_bytes < 5000 + 4 * HEADER_BYTES
    assert right.received_bytes >= 5000
    for table in pair:
        table.interrupt(2, "test")
    _open(pair, 2)
    assert (left.sent_bytes, left.received_bytes) == (0, 0)


def test_an_interruption_wakes_a_waiter_at_once(pair: tuple[LinkTable, LinkTable]) -> None:
    left, _ = pair
    delays = []
    for epoch in range(2, 22):
        raised: list[tuple[float, EpochChanged]] = []
        got, _ = _receive(left, 10)

        def wait(got: Operation = got, raised: list[tuple[float, EpochChanged]] = raised) -> None:
            try:
                left.wait(got)
            except EpochChanged as change:
                raised.append((time.monotonic(), change))

        thread = threading.Thread(target=wait)
        thread.start()
        _until(lambda: left._poller != 0)
        rung = time.monotonic()
        left.interrupt(epoch, f"news {epoch}")
        thread.join(LIMIT_S)
        assert (raised[0][1].epoch, raised[0][1].reason) == (epoch, f"news {epoch}")
        delays.append(raised[0][0] - rung)
        with pytest.raises(EpochChanged):
            _send(left, b"no")
        _open(pair, epoch)
    assert sorted(delays)[10] < 0.01


def test_old_and_equal_epochs_do_not_interrupt(pair: tuple[LinkTable, LinkTable]) -> None:
    left, right = pair
    left.interrupt(1, "the epoch that is open")
    left.interrupt(0, "older")
    assert left.interrupted is None
    left.interrupt(4, "newer")
    left.interrupt(3, "overtaken")
    assert left.interrupted == (4, "newer")
    with pytest.raises(LinkError, match="view 1 cannot be opened after view 1"):
        left.open_epoch(1, {})
    addresses = {0: left.address, 1: right.address}
    left.open_epoch(3, addresses)
    with pytest.raises(EpochChanged) as change:
        _send(left, b"still interrupted by 4")
    assert change.value.epoch == 4
    left.open_epoch(4, addresses)
    right.open_epoch(4, addresses)
    got, into = _receive(right, 2)
    left.wait(_send(left, b"ok"))
    right.wait(got)
    assert into == b"ok"


def test_two_threads_may_wait_at_once(pair: tuple[LinkTable, LinkTable]) -> None:
    left, right = pair
    results: dict[int, bytes] = {}

    def wait(tag: int) -> None:
        got, into = _receive(right, 300_000, tag)
        right.wait(got)
        results[tag] = bytes(into)

    threads = [threading.Thread(target=wait, args=(tag,)) for tag in range(6)]
    for thread in threads:
        thread.start()
    for tag in reversed(range(6)):
        left.wait(_send(left, bytes([tag]) * 300_000, tag))
    for thread in threads:
        thread.join(LIMIT_S)
    assert results == {tag: bytes([tag]) * 300_000 for tag in range(6)}


def test_a_half_sent_message_does_not_reach_the_next_epoch(
    pair: tuple[LinkTable, LinkTable], monkeypatch: pytest.MonkeyPatch
) -> None:
    left, right = pair
    cut, read = threading.Event(), Connection.read

    def read_a_part(connection: Connection) -> None:
        """Reads no more than a part before the cut, however long this process has to wait."""
        if connection._messages is not right or cut.is_set() or right.received_bytes <= 100_000:
            read(connection)

    monkeypatch.setattr(Connection, "read", read_a_part)
    old = bytearray(b"o" * 40_000_000)  # more than the sockets hold, so that it is cut
    got, into = _receive(right, len(old))
    sent = _send(left, old)
    _until(lambda: right.received_bytes > 100_000)
    for table in pair:
        table.interrupt(2, "cut")
    cut.set()
    into[:] = b"-" * len(into)
    for table, operation in ((left, sent), (right, got)):
        with pytest.raises(EpochChanged):
            table.wait(operation)
    _open(pair, 2)
    again, fresh = _receive(right, 3_000_000)
    left.wait(_send(left, b"n" * 3_000_000))
    right.wait(again)
    assert fresh == b"n" * 3_000_000
    assert into == b"-" * len(into)
    assert connected(right) == [0]


def test_the_receiver_of_a_cut_message_sees_true_bytes_only(
    pair: tuple[LinkTable, LinkTable],
) -> None:
    """The sender may change its memory after the interruption; what still leaves was copied."""
    left, right = pair
    old = bytearray(b"o" * 40_000_000)
    got, into = _receive(right, len(old))
    sent = _send(left, old)
    _until(lambda: right.received_bytes > 100_000)
    left.interrupt(2, "cut")
    with pytest.raises(EpochChanged):
        left.wait(sent)
    old[:] = b"x" * len(old)
    _until(lambda: not left.connections.links[1].outgoing)
    right.interrupt(2, "cut")
    with pytest.raises(EpochChanged):
        right.wait(got)
    assert b"x" not in into


def _hello(table: LinkTable, hello: Hello) -> socket.socket:
    sock = dialled(table.address, Purpose.LINK)
    sock.settimeout(LIMIT_S)
    sock.sendall(hello.pack())
    return sock


@pytest.mark.parametrize(
    ("slot", "address", "epoch"),
    [(2, "127.0.0.1:9", 1), (1, "127.0.0.1:9", 1), (1, "127.0.0.1:9", 0)],
)
def test_strangers_are_refused(
    pair: tuple[LinkTable, LinkTable], slot: int, address: str, epoch: int
) -> None:
    with _hello(pair[0], Hello(slot, address, epoch, 5, 0)) as sock:
        assert sock.recv(1) == b""
    assert connected(pair[0]) == []


@pytest.mark.parametrize("junk", [b"GET / HTTP/1.0\r\n\r\n" * 10, b"\0" * 500])
def test_junk_is_refused(pair: tuple[LinkTable, LinkTable], junk: bytes) -> None:
    host, port = pair[0].address.split(":")
    with socket.create_connection((host, int(port)), timeout=LIMIT_S) as sock:
        sock.sendall(junk)
        with contextlib.suppress(ConnectionResetError):  # closed with our junk unread
            assert sock.recv(1) == b""
    got, into = _receive(pair[1], 2)
    pair[0].wait(_send(pair[0], b"ok"))
    pair[1].wait(got)
    assert into == b"ok"


def test_a_member_of_a_later_epoch_is_kept_waiting(pair: tuple[LinkTable, LinkTable]) -> None:
    left, _ = pair
    data = FrameHeader(Kind.POINT, 2, 0, 0, 3, 2, 7, 0, 3, 3, 0).pack() + b"new"
    with _hello(left, Hello(1, "127.0.0.1:9", 2, 5, 0)) as sock:
        sock.sendall(data)
        sock.settimeout(0.05)
        with pytest.raises(TimeoutError):
            sock.recv(1)
        left.open_epoch(2, {0: left.address, 1: "127.0.0.1:9"})
        got, into = _receive(left, 3)
        left.wait(got)
        assert into == b"new"
        sock.settimeout(LIMIT_S)
        assert sock.recv(HEADER_BYTES) == control_header(Kind.ACCEPT, 0).pack()


def test_frames_of_an_older_epoch_are_dropped(pair: tuple[LinkTable, LinkTable]) -> None:
    left, _ = pair
    left.open_epoch(3, {0: left.address, 1: "127.0.0.1:9"})
    frame = FrameHeader(Kind.POINT, 2, 0, 0, 3, 2, 7, 0, 3, 3, 0)
    with _hello(left, Hello(1, "127.0.0.1:9", 2, 5, 0)) as sock:
        sock.sendall(frame.pack() + b"old" + frame._replace(epoch=3).pack() + b"new")
        got, into = _receive(left, 3)
        left.wait(got)
        assert into == b"new"


def test_a_broken_link_is_a_hint_and_the_operation_waits() -> None:
    lost: list[tuple[int, str]] = []
    left = LinkTable(
        0, secret=SECRET, on_link_lost=lambda slot, reason, silent: lost.append((slot, reason))
    )
    right = LinkTable(1, secret=SECRET)
    _open((left, right), 1)
    got, _ = _receive(left, 1)
    right.wait(_send(right, b"x"))
    left.wait(got)
    waiting, _ = _receive(left, 1, timeout_s=0.3)
    right.close()
    _until(lambda: bool(lost))
    assert lost[0][0] == 1
    assert not waiting.done
    with pytest.raises(
        LinkError, match=r"recv tag 0 in group 'pair' .*timed out .*slot 1 .*broken"
    ):
        left.wait(waiting)
    sent = _send(left, bytes(100_000))
    assert not sent.done  # a dead link takes nothing and raises nothing
    left.interrupt(2, "slot 1 is lost")
    with pytest.raises(EpochChanged):
        left.wait(sent)
    left.close()


def test_an_address_where_nobody_listens_is_a_hint_too() -> None:
    lost: list[int] = []
    table = LinkTable(0, on_link_lost=lambda slot, reason, silent: lost.append(slot), secret=SECRET)
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = f"127.0.0.1:{gone.getsockname()[1]}"
    table.open_epoch(1, {0: table.address, 1: address})
    sent = _send(table, bytes(100_000))
    _until(lambda: lost == [1])
    assert not sent.done
    table.close()
    with pytest.raises(LinkError, match="closed"):
        table.wait(sent)


def test_no_operation_before_an_epoch_or_to_a_stranger() -> None:
    table = LinkTable(0, secret=SECRET)
    with pytest.raises(LinkError, match="no view is open"):
        table.run(
            Operation(table, _group(table), "send", timeout_s=1, tag=0),
            lambda op: send(op, memoryview(b"x"), 1),
        )
    table.open_epoch(1, {0: table.address})
    sent = _send(table, b"x")
    with pytest.raises(LinkError, match="slot 1 is not a member of view 1"):
        table.wait(sent)
    table.close()


def test_close_joins_the_thread_and_leaks_no_descriptor() -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    def link_threads() -> list[str]:
        return [t.name for t in threading.enumerate() if t.name.startswith("elaswave-links")]

    assert link_threads() == []
    # What tests before this one have left in cycles would be closed on the way.
    gc.collect()
    before = descriptors()
    for _ in range(20):
        tables = (
            LinkTable(0, secret=SECRET),
            LinkTable(1, secret=SECRET),
            LinkTable(2, secret=SECRET),
        )
        _open(tables, 1)
        got, _ = _receive(tables[1], 5)
        tables[0].wait(_send(tables[0], b"hello"))
        tables[1].wait(got)
        pending, _ = _receive(tables[0], 5)
        for table in tables:
            table.close()
            table.close()
        with pytest.raises(LinkError, match="closed"):
            tables[0].wait(pending)
        with pytest.raises(LinkError, match="closed"):
            _send(tables[0], b"x")
    assert descriptors() == before
    assert link_threads() == []


def test_a_table_that_cannot_be_closed_says_where_it_is_held_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link_table, "_CLOSE_LIMIT_S", 0.1, raising=False)
    told, go_on = threading.Event(), threading.Event()

    def hold_up(slot: int, reason: str, silent: bool) -> None:
        told.set()
        go_on.wait(LIMIT_S)

    tables = LinkTable(0, on_link_lost=hold_up, secret=SECRET), LinkTable(1, secret=SECRET)
    _open(tables, 1)
    got, _ = _receive(tables[1], 5)
    tables[0].wait(_send(tables[0], b"hello"))
    tables[1].wait(got)
    pending, _ = _receive(tables[0], 5)
    tables[1].close()
    assert told.wait(LIMIT_S)
    with pytest.raises(LinkError, match=r"slot 0 are not closed after 0.1 s: .*threading.py:\d+"):
        tables[0].close()
    with pytest.raises(LinkError, match="closed"):
        tables[0].wait(pending)
    go_on.set()
    tables[0]._thread.join(LIMIT_S)
    assert not tables[0]._thread.is_alive()


def test_last_words_arrive_though_their_sender_has_not_read_everything(
    pair: tuple[LinkTable, LinkTable],
) -> None:
    """A worker that gives up tells the others, and may end at once: a Unix socket is reset then."""
    ours, theirs = socket.socketpair()
    with theirs:
        ours.setblocking(False)
        theirs.sendall(b"unread")
        ours.send(b"last words")
        proof = Dialling(SECRET, Purpose.LINK)
        Connection(pair[0].connections, pair[0], ours, State.OPEN, proof).close("the worker ends")
        theirs.settimeout(LIMIT_S)
        assert theirs.recv(64) == b"last words"
        assert theirs.recv(64) == b""


def test_what_a_peer_sent_before_it_went_is_read_although_nothing_can_be_sent_to_it(
    pair: tuple[LinkTable, LinkTable],
) -> None:
    """A worker that comes late to a collective sends first, and others may have given up."""
    here, there = pair
    here.wait(_send(here, b"first"))
    there.wait(_receive(there, 5)[0])
    with here._lock:
        here._poller = -1  # its progress thread leaves the sockets alone, as while somebody waits
    there.wait(_send(there, b"last", tag=1))
    there.close()
    _send(here, b"unheard", tag=2)
    with here._lock:
        here._poller = 0
    got, into = _receive(here, 4, tag=1)
    here.wait(got)
    assert into == b"last"
