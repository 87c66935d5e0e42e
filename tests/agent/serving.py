"""A server of sealed snapshots in this process, the memory below it, and fetches from it."""

import os
from collections.abc import Mapping
from typing import Any

from elaswave_plugin.agent.snapshot_server import SnapshotServer, Taker, listen_for_data
from elaswave_plugin.agent.snapshot_store import SnapshotStore
from elaswave_plugin.core.layout.worker_facts import SealedShard
from elaswave_plugin.ipc.snapshot_record import BODY_OFFSET, pack_record
from elaswave_plugin.snapshot.fetch import Fetcher
from tests.core.sealed import sealed
from tests.job_secret import SECRET

LONG_S = 10.0


class NamedMemory:
    """Memory by name, as a guardian holds it."""

    def __init__(self) -> None:
        self.fds: dict[str, int] = {}

    def memory(self, name: str) -> int:
        if name not in self.fds:
            self.fds[name] = os.memfd_create(name, os.MFD_CLOEXEC)
        return os.dup(self.fds[name])

    def drop(self, name: str) -> None:
        os.close(self.fds.pop(name))

    def names(self) -> list[str]:
        return list(self.fds)

    def close(self) -> None:
        for name in self.names():
            self.drop(name)


class SlotStore(SnapshotStore):
    """The snapshots of a node with one slot, whose two buffers are `fds`."""

    def __init__(self, slot: int, memory: NamedMemory | None = None) -> None:
        self.kept = NamedMemory() if memory is None else memory
        super().__init__(self.kept)
        self.slot = slot
        self.open_slot(slot)
        self.fds = self._fds[slot]

    def close(self) -> None:
        super().close()
        self.kept.close()


def serve(
    store: SnapshotStore, host: str = "127.0.0.1", takers: Mapping[str, Taker] | None = None
) -> str:
    """Serve a store to the end of this process, as an agent does; the address."""
    server = SnapshotServer(store, listen_for_data(host), takers=takers, secret=SECRET)
    server.start()
    return server.address


def fetch(address: str, **what: Any) -> None:
    """One fetch over a connection of its own."""
    with Fetcher(address, secret=SECRET, timeout_s=LONG_S) as fetcher:
        fetcher.fetch(**what)


def seal(store: SlotStore, content: bytes, *, buffer: int = 0, step: int = 5) -> SealedShard:
    """Write a snapshot into a buffer of the store's slot."""
    record = sealed(store.slot, step, buffer=buffer, length=len(content))
    os.pwrite(store.fds[buffer], pack_record(record).ljust(BODY_OFFSET, b"\0") + content, 0)
    return record
