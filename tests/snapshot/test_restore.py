"""A restore that waits for a supervisor, and the proposal that ends the wait."""

import socket
import time

import pytest

from elaswave_plugin.core.layout.sealed_shard import SealedShard
from elaswave_plugin.core.recovery_plan.placement import ShardGroup
from elaswave_plugin.core.recovery_plan.plan import RecoveryPlan, make_plan
from elaswave_plugin.core.step.dataflow import deal
from elaswave_plugin.errors import EpochChanged
from elaswave_plugin.snapshot import restore
from tests.core.sealed import sealed
from tests.job_secret import SECRET

LONG_S = 10.0


def record(shard: int, address: str) -> SealedShard:
    held = {"holder": 1, "holder_address": address, "is_copy": True}
    sizes = {"length": 1024, "payload_bytes": 1000, "capsule_bytes": 10}
    return sealed(shard, 4, ranks=(0, 1), shard=shard, **sizes, **held)


def test_a_proposal_ends_the_wait_for_a_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    """It accepts and never answers; the collective comparison of the plans is left out."""
    monkeypatch.setattr(restore, "_compare_digests", lambda plan: None)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"

        def make(rejected: frozenset[SealedShard]) -> RecoveryPlan:
            return make_plan(
                epoch=2,
                reason="r",
                ranks=(0,),
                dataflow=deal(num_microbatches=2, launch_slots=(0, 1), live=(0,)),
                shard_groups=[ShardGroup(ranks=(0,), units=(0,), buckets=(64,))],
                inventory=[record(shard, address) for shard in range(2)],
                rejected=rejected,
            )

        started_s = time.monotonic()

        def check() -> None:
            if time.monotonic() > started_s + 0.2:
                raise EpochChanged(3, "r")

        with pytest.raises(EpochChanged):
            restore.restore(
                slot=0,
                pool=None,  # type: ignore[arg-type]  # nothing is read from own memory
                make_plan=make,
                secret=SECRET,
                timeout_s=LONG_S,
                check=check,
            )
        assert 0.2 <= time.monotonic() - started_s < LONG_S / 4
