"""The memory of snapshots that a job says it takes, against what one counts by hand."""

from collections.abc import Sequence

import pytest

from elaswave_plugin.core.agreement.view import MembershipView
from elaswave_plugin.core.recovery_plan.placement import FlatPlacement
from elaswave_plugin.core.recovery_plan.replica_placement import ReplicaPlacement
from elaswave_plugin.recovery.state_keeper import CAPSULE_ROOM_BYTES, SnapshotMemory
from elaswave_plugin.snapshot.snapshot_pool import capacity_of, taken_of

# Of a whole model, in elements: shards of up to eight workers are whole numbers of them.
NUMEL = 128 * 840 * 100


def shard(width: int) -> int:
    return 12 * NUMEL // width


def room(width: int) -> int:
    return capacity_of(shard(width) + CAPSULE_ROOM_BYTES)


def memory(nodes: Sequence[int], *, copies: int = 1) -> SnapshotMemory:
    """Of a data-parallel job with a worker on each of these nodes."""
    ranks = tuple(range(len(nodes)))
    view = MembershipView(
        epoch=1, ranks=ranks, incarnations=(0,) * len(nodes), nodes=tuple(nodes), reason="r"
    )
    placement = FlatPlacement(launch_slots=ranks, ranks=ranks, buckets=(NUMEL,))
    return SnapshotMemory(view, placement, copies=copies, alignment=128)


def test_on_one_node_only_the_own_buffers_count() -> None:
    one = memory((0,) * 4, copies=2)
    assert one.in_use == 2 * taken_of(shard(4))
    # Beside the buffers of the old shards, the new shard is read; a third of it more.
    assert one.at_most == 2 * room(4) + shard(3)
    assert one.needed(one.node_of(2)) == 4 * one.at_most


def test_of_two_nodes_each_holds_the_others_and_a_loss_makes_one_hold_two() -> None:
    one = memory((0, 0, 1, 1))
    assert one.node_of(2) == (2, 3)
    assert one.in_use == 4 * taken_of(shard(4))
    # The one that is left on its node holds both of the other's copies.
    assert one.at_most == 6 * room(3)
    # And the memory of the lost one stays with its guardian.
    assert one.needed((2, 3)) == 6 * room(3) + 4 * room(4)


def test_in_large_jobs_the_state_that_is_read_counts_most() -> None:
    one = memory((0,) * 4 + (1,) * 4, copies=0)
    assert one.at_most == 2 * room(8) + shard(7)


def test_the_last_worker_of_a_node_leaves_none_to_hold_copies() -> None:
    one = memory((0, 1))
    assert one.in_use == 4 * taken_of(shard(2))
    # Of the whole state, once it is alone; it reads that beside its own buffers and the copies.
    assert one.at_most == max(4 * room(2) + shard(1), 2 * room(1))


@pytest.mark.parametrize("nodes", [(0, 0, 1), (0, 0, 0, 1, 1, 1), (0, 1, 2, 0, 1, 2)])
def test_no_loss_leaves_a_worker_with_more(nodes: tuple[int, ...]) -> None:
    """Against the views after each loss, each counted as that of a launch."""
    before = memory(nodes)
    for lost in range(len(nodes)):
        left = [node for slot, node in enumerate(nodes) if slot != lost]
        assert memory(left).in_use <= before.at_most


def test_a_stage_keeps_its_layers_and_has_one_replica_fewer() -> None:
    ranks = (0, 1, 2, 3)
    view = MembershipView(
        epoch=1, ranks=ranks, incarnations=(0,) * 4, nodes=(0, 0, 0, 0), reason="r"
    )
    stages = ReplicaPlacement.at_launch(
        ((0, 2), (1, 3)), groups={}, buckets=((NUMEL // 4,), (3 * NUMEL // 4,))
    )
    one = SnapshotMemory(view, stages, copies=1, alignment=128)
    larger = 3 * shard(1) // 4
    assert one.in_use == 2 * taken_of(larger // 2)
    assert one.at_most == 2 * capacity_of(larger + CAPSULE_ROOM_BYTES)
    assert one.needed((0,)) == 2 * capacity_of(larger // 3 + CAPSULE_ROOM_BYTES)
