"""Records of sealed snapshots, as they are in memory and with who holds them."""

from typing import Any

from elaswave_plugin.core.layout.worker_facts import SealedShard


def sealed(owner: int, step: int, epoch: int = 1, **more: Any) -> SealedShard:
    """Build a record, by default of a job that shares no state, and of four bytes."""
    usual = {"shard_group": (0, 0), "units": (0,), "ranks": (owner,), "shard": 0, "buffer": 0}
    usual |= {"length": 4, "payload_bytes": 4, "capsule_bytes": 0, "table_digest": 0}
    return SealedShard(owner=owner, step=step, epoch=epoch, **{**usual, **more})
