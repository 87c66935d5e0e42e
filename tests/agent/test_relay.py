"""An agent that is not heard from here is reached by another one; no other address is."""

import os
import socket
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from functools import partial

import pytest

from elaswave_plugin.agent.snapshot_server import SnapshotCopier
from elaswave_plugin.errors import LinkError
from elaswave_plugin.ipc import relay
from elaswave_plugin.ipc.wire import Check, connect
from elaswave_plugin.snapshot import fetch as fetching
from elaswave_plugin.snapshot.fetch import Fetcher
from tests.agent.serving import LONG_S, SlotStore, seal, serve
from tests.idle import Deadline
from tests.job_secret import SECRET

CONTENT = os.urandom(3 << 20)


class Nodes:
    """Agents at addresses of their own, some of which cannot be dialled from here."""

    def __init__(self, stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
        self._stack = stack
        self.known: set[str] = set()
        self.unheard: set[str] = set()
        self.dialled: list[str] = []
        # By the Unix socket all of this machine hear each other.
        monkeypatch.setattr(fetching, "_connect_near", lambda address: None)
        monkeypatch.setattr(relay, "connect", self._connect)

    def open(self, slot: int) -> tuple[SlotStore, str]:
        store = SlotStore(slot)
        self._stack.callback(store.close)
        carry = partial(relay.carry, lambda: self.known)
        address = serve(store, f"127.0.0.{slot + 1}", {relay.RELAY: carry})
        self.known.add(address)
        return store, address

    def _connect(self, address: str, timeout_s: float, check: Check | None = None) -> socket.socket:
        self.dialled.append(address)
        # From a relay, which passes no check and comes second, it is reached.
        if address in self.unheard and self.dialled.count(address) == 1:
            raise TimeoutError("timed out")
        return connect(address, timeout_s, check)


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    with ExitStack() as stack:
        yield Nodes(stack, monkeypatch)


def read(address: str, relays: Collection[str], unheard: set[str] | None = None) -> bytes:
    into = bytearray(len(CONTENT))
    with Fetcher(
        address, secret=SECRET, timeout_s=LONG_S, relays=sorted(relays), unheard=unheard
    ) as fetcher:
        where = {"owner": 1, "step": 5, "epoch": 1, "offset": 0}
        fetcher.fetch(**where, into=memoryview(into), timeout_s=LONG_S)
    return bytes(into)


def test_bytes_come_by_the_one_that_hears_both(nodes: Nodes) -> None:
    (store, address), (_, third) = nodes.open(1), nodes.open(2)
    seal(store, CONTENT)
    nodes.unheard.add(address)
    unheard = set[str]()
    assert read(address, nodes.known, unheard) == CONTENT
    assert nodes.dialled == [address, third, address] and unheard == {address}
    # It is known now, and not dialled in vain once more.
    assert read(address, nodes.known, unheard) == CONTENT
    assert nodes.dialled[3:] == [third, address]


def test_of_each_node_one_is_asked(nodes: Nodes) -> None:
    (store, address), (_, hears) = nodes.open(1), nodes.open(3)
    seal(store, CONTENT)
    beside = {nodes.open(2)[1] for _ in range(4)}
    nodes.unheard |= {address} | beside
    assert read(address, nodes.known) == CONTENT
    assert len([one for one in nodes.dialled if one in beside]) <= 1
    assert nodes.dialled[-2:] == [hears, address]


def test_one_whose_machine_answers_needs_nobody(nodes: Nodes) -> None:
    with socket.create_server(("127.0.0.2", 0)) as gone:
        address = f"127.0.0.2:{gone.getsockname()[1]}"
    nodes.open(2)
    with pytest.raises(LinkError, match="refused"):
        read(address, nodes.known)
    assert nodes.dialled == [address]


def test_nothing_is_carried_to_an_address_of_no_member(nodes: Nodes) -> None:
    with socket.create_server(("127.0.0.9", 0)) as stranger:
        address = f"127.0.0.9:{stranger.getsockname()[1]}"
        _, third = nodes.open(2)
        with pytest.raises(OSError, match=f"{address} is no member's address"):
            relay._through(third, address, SECRET, timeout_s=LONG_S, check=None)
        assert address not in nodes.dialled


def test_copies_go_by_it_too(nodes: Nodes) -> None:
    (_, address), (_, third) = nodes.open(1), nodes.open(2)
    own = SlotStore(0)
    record = seal(own, CONTENT)
    copied, broken = list[tuple[int, int]](), list[str]()
    nodes.unheard.add(address)
    copier = SnapshotCopier(
        own,
        address,
        1,
        secret=SECRET,
        relays=[third],
        on_copied=lambda step, epoch: copied.append((step, epoch)),
        on_broken=broken.append,
        on_moving=lambda: None,
    )
    copier.send(record)
    deadline = Deadline(LONG_S)
    while not copied and deadline.left_s():
        time.sleep(0.01)  # the copier has a thread of its own
    copier.close()
    assert copied == [(5, record.epoch)] and not broken
    assert nodes.dialled == [address, third, address]
