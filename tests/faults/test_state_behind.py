"""The optimizer state follows its weights behind the redone step, and is awaited by its update."""

from dataclasses import replace

import pytest

from tests.faults.conftest import Launch, Reference
from tests.faults.harness import JobSpec, check_equal, check_survived
from tests.faults.hybrid_matrix import PP2_DP2
from tests.proofs import Kind, Promise, proves

# No moment arrives before the update waits for it.
HELD_BACK = """
import threading
from elaswave_plugin.snapshot import restore
read_parts, complete = restore.read_parts, restore.DeferredMoments.complete
awaited = threading.Event()
def read_late(plan, parts, access):
    while parts is restore.MOMENTS and not awaited.wait(0.005):
        access.check()
    return read_parts(plan, parts, access)
def completing(self):
    awaited.set()
    try:
        return complete(self)
    finally:
        awaited.clear()
restore.read_parts, restore.DeferredMoments.complete = read_late, completing
"""
# What is told of how much slower passes were is not measured by chance.
SEVENFOLD = """
from elaswave_plugin.core.planner.layer_times import FOLLOWED, PassTimes
medians = PassTimes.medians
def telling(self):
    told = medians(self)
    return {**told, FOLLOWED: [7.0]} if FOLLOWED in told else told
PassTimes.medians = telling
"""
# This byte is in a chunk that has moments only: neither weights nor the capsule at the end.
LARGE = ("--hidden-size=128",)
FLIP = """
from elaswave_plugin.core.layout.shards import PARTS
from elaswave_plugin.ipc.snapshot_record import BODY_OFFSET
from elaswave_plugin.snapshot.snapshot_pool import CHUNK_BYTES
from elaswave_plugin.recovery.state_keeper import payload_of
from elaswave_plugin.recovery.state_keeper import StateKeeper
wait = StateKeeper.await_copies
def flip(self):
    wait(self)
    if (self._member.slot, self._sealed_step) == (1, 3):
        payload_bytes = payload_of(self._shard_group, self.alignment)
        chunk = -(-payload_bytes // len(PARTS) // CHUNK_BYTES)
        assert chunk < payload_bytes // CHUNK_BYTES
        self.pool._maps[1][BODY_OFFSET + chunk * CHUNK_BYTES + 1000] ^= 1
StateKeeper.await_copies = flip
"""


@proves(Kind.KILL, Promise.EQUAL)
@pytest.mark.parametrize(
    "kills", [("2@3:backward",), ("2@3:backward", "1@3:replay")], ids=["one", "and-while-it-waits"]
)
def test_the_update_waits_for_what_follows(
    run: Launch, reference: Reference, kills: tuple[str, ...]
) -> None:
    survived = run(JobSpec(kills=kills, sabotage=HELD_BACK))
    check_survived(survived)
    last = [e for e in survived.events("recovered") if e["epoch"] == len(kills) + 1]
    assert len(last) == 4 - len(kills)
    assert all(event["followed_s"] > 0 and event["followed_late_s"] > 0 for event in last)
    assert survived.trace() == reference(JobSpec()).trace()


@proves(Kind.DAMAGE, Promise.OLDER, victim="2", moment="3:optimizer")
@pytest.mark.parametrize(("nodes", "restored_step"), [(2, 3), (1, 2)])
def test_damaged_moments_renew_the_view_and_are_not_used(
    run: Launch, reference: Reference, nodes: int, restored_step: int
) -> None:
    """Another node has a copy of the step; within a node there is that memory only."""
    spec = JobSpec(kills=("2@3:optimizer",), sabotage=FLIP, options=LARGE)
    survived = run(replace(spec, nodes=nodes))
    check_survived(survived)
    _, loss, renewal = (event["reason"] for event in survived.events("view_committed"))
    assert "worker 2" in loss and "does not match its checksum" in renewal
    assert {e["restored_step"] for e in survived.events("recovered")} == {restored_step}
    assert survived.trace() == reference(JobSpec(options=LARGE)).trace()


@proves(Kind.KILL, Promise.EQUAL, victim="0 3", moment="7:backward 9:forward")
def test_what_following_state_costs_is_known_to_the_next_plan(
    run: Launch, reference: Reference
) -> None:
    spec = replace(PP2_DP2, steps=11, options=(*PP2_DP2.options, "--num-layers=4"))
    kills = ("0@7:backward", "3@9:forward")
    survived = run(replace(spec, kills=kills, sabotage=HELD_BACK + SEVENFOLD))
    check_equal(survived, reference(spec))
    slowdowns = [
        (e["epoch"], *e["layer_times_s"]["slowdown"]) for e in survived.events("recovered")
    ]
    assert sorted(slowdowns) == [(2, 1.0)] * 3 + [(3, 7.0)] * 2
