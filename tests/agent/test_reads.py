"""Reads of sealed snapshots, in place on an agent's node and over TCP from another one."""

import os
from typing import Any

import pytest

from elaswave_plugin.agent import snapshot_server
from elaswave_plugin.errors import LinkError
from elaswave_plugin.ipc import wire
from elaswave_plugin.ipc.snapshot_record import BODY_OFFSET
from elaswave_plugin.snapshot import fetch as snapshot_fetch
from elaswave_plugin.snapshot.fetch import Fetcher
from tests.agent.serving import LONG_S, SlotStore, fetch, seal
from tests.job_secret import SECRET


@pytest.fixture(params=["in place", "over TCP"])
def _both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same node, and as of another one, which cannot see the Unix socket."""
    if request.param == "over TCP":
        monkeypatch.setattr(snapshot_fetch, "_connect_near", lambda address: None)


both_ways = pytest.mark.usefixtures("_both_ways")


@both_ways
def test_many_fetches_over_one_connection(served: tuple[SlotStore, str]) -> None:
    store, address = served
    content = bytes(range(256)) * 40
    seal(store, content)
    with Fetcher(address, secret=SECRET, timeout_s=LONG_S) as fetcher:
        for offset, length in ((0, 10), (1000, 9240), (10240, 0), (5, 1)):
            into = bytearray(length)
            fetcher.fetch(
                owner=3, step=5, epoch=1, offset=offset, into=memoryview(into), timeout_s=LONG_S
            )
            assert into == content[offset : offset + length]


@both_ways
def test_what_was_asked_for_ahead_comes_in_its_order(
    served: tuple[SlotStore, str],
) -> None:
    store, address = served
    content = bytes(range(256)) * 40
    seal(store, content)
    what = {"owner": 3, "step": 5, "epoch": 1, "timeout_s": LONG_S}
    ranges = ((0, 10), (1000, 9240), (5, 1))
    with Fetcher(address, secret=SECRET, timeout_s=LONG_S) as fetcher:
        for offset, length in ranges:
            fetcher.ask(**what, offset=offset, length=length)
        for offset, length in ranges:
            into = bytearray(length)
            fetcher.fetch(**what, offset=offset, into=memoryview(into))
            assert into == content[offset : offset + length]


@both_ways
@pytest.mark.parametrize(
    ("wanted", "complaint"),
    [
        ({"owner": 4}, "no such sealed snapshot here"),
        ({"step": 6}, "no such sealed snapshot here"),
        ({"epoch": 2}, "no such sealed snapshot here"),
        ({"offset": 95}, r"bytes 95\.\.105 of a snapshot of 100 bytes"),
    ],
)
def test_a_fetch_of_what_is_not_there(
    served: tuple[SlotStore, str], wanted: dict[str, int], complaint: str
) -> None:
    store, address = served
    seal(store, b"x" * 100)
    what = {"owner": 3, "step": 5, "epoch": 1, "offset": 0, **wanted}
    with pytest.raises(LinkError, match=complaint):
        fetch(address, **what, into=memoryview(bytearray(10)), timeout_s=LONG_S)


@both_ways
def test_a_buffer_that_is_being_overwritten_is_not_served(
    served: tuple[SlotStore, str],
) -> None:
    store, address = served
    seal(store, b"x" * 100)
    os.pwrite(store.fds[0], bytes(8), 0)
    assert store.inventory(address) == []
    with pytest.raises(LinkError, match="no such sealed"):
        fetch(
            address,
            owner=3,
            step=5,
            epoch=1,
            offset=0,
            into=memoryview(bytearray(10)),
            timeout_s=LONG_S,
        )


def test_what_is_read_in_place_goes_through_no_socket_and_leaves_no_descriptor(
    served: tuple[SlotStore, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, address = served
    content = bytes(range(256)) * 40
    seal(store, content)
    monkeypatch.setattr(snapshot_server, "send_memory", lambda *_: pytest.fail("it was sent"))
    what = {"owner": 3, "step": 5, "epoch": 1, "timeout_s": LONG_S}
    taken = []

    def take(*how: Any) -> int:
        taken.append(wire.receive_descriptor(*how))
        return taken[-1]

    monkeypatch.setattr(snapshot_fetch, "receive_descriptor", take)
    with Fetcher(address, secret=SECRET, timeout_s=LONG_S) as fetcher:
        for offset in (0, 5):
            into = bytearray(1000)
            fetcher.fetch(**what, offset=offset, into=memoryview(into))
            assert into == content[offset : offset + 1000]
        (memory,) = taken
        assert os.fstat(memory).st_ino == os.fstat(store.fds[0]).st_ino
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(memory)
    with Fetcher(address, secret=SECRET, timeout_s=LONG_S) as fetcher:
        # What is overwritten while it is read is for its checksum to find.
        fetcher.fetch(**what, offset=0, into=memoryview(into))
        os.pwrite(store.fds[0], b"\xff" * 1000, BODY_OFFSET)
        fetcher.fetch(**what, offset=0, into=memoryview(into))
        assert into == b"\xff" * 1000
