"""A server of sealed snapshots for a test."""

import pytest

from elaswave_plugin.supervisor.snapshot_server import SnapshotServer
from elaswave_plugin.supervisor.snapshot_store import SnapshotStore
from tests.job_secret import SECRET


@pytest.fixture
def served() -> tuple[SnapshotStore, str]:
    store = SnapshotStore(3)
    server = SnapshotServer(store, "127.0.0.1", secret=SECRET)
    server.start()
    return store, server.address
