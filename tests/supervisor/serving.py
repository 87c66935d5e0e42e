"""A server of sealed snapshots in this process, and fetches from it."""

import os
from typing import Any

from elaswave_plugin.core.layout.sealed_shard import SealedShard
from elaswave_plugin.ipc.snapshot_record import BODY_OFFSET, pack_record
from elaswave_plugin.snapshot.fetch import Fetcher
from elaswave_plugin.supervisor.snapshot_store import SnapshotStore
from tests.core.sealed import sealed
from tests.job_secret import SECRET

LONG_S = 10.0


def fetch(address: str, **what: Any) -> None:
    """One fetch over a connection of its own."""
    with Fetcher(address, secret=SECRET, timeout_s=LONG_S) as fetcher:
        fetcher.fetch(**what)


def seal(store: SnapshotStore, content: bytes, *, buffer: int = 0, step: int = 5) -> SealedShard:
    record = sealed(store.slot, step, buffer=buffer, length=len(content))
    os.pwrite(store.fds[buffer], pack_record(record).ljust(BODY_OFFSET, b"\0") + content, 0)
    return record
