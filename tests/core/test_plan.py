"""The restore point, its sources and the plan's digest."""

from collections.abc import Mapping
from typing import Any

import pytest

from elaswave_plugin.core.dataflow import deal
from elaswave_plugin.core.plan import SealedShard, copy_targets, make_plan, restore_point
from elaswave_plugin.core.seating import Cell
from elaswave_plugin.errors import SnapshotGapError

RANKS = (0, 1, 2, 3)


def record(
    owner: int, step: int, *, epoch: int = 1, holder: int | None = None
) -> Mapping[str, Any]:
    return {
        "owner": owner,
        "step": step,
        "epoch": epoch,
        "cell": [0, 0],
        "units": [0, 1],
        "ranks": list(RANKS),
        "shard": RANKS.index(owner),
        "length": 100,
        "payload_bytes": 80,
        "capsule_bytes": 12,
        "table_digest": 1000 * owner + step,
        "holder": owner if holder is None else holder,
        "holder_address": "host:1",
        "copy": holder is not None,
    }


def plan_of(
    inventory: list[Mapping[str, Any]], *, ranks: tuple[int, ...] = (0, 3, 2), **changes: Any
) -> Any:
    arguments = {
        "epoch": 2,
        "reason": "worker 1 exited",
        "ranks": ranks,
        "dataflow": deal(num_microbatches=8, homes=RANKS, live=(0, 3, 2)),
        "cells": (Cell(ranks=ranks, units=(0, 1), buckets=(1000, 300)),),
        "inventory": inventory,
    }
    return make_plan(**{**arguments, **changes})


def test_restore_point_is_the_newest_step_sealed_for_every_shard() -> None:
    inventory = [record(slot, 9) for slot in RANKS] + [record(slot, 10) for slot in (0, 2, 3)]
    assert plan_of(inventory).restore_step == 9
    assert plan_of([*inventory, record(1, 10, holder=2)]).restore_step == 10


def test_restore_point_prefers_the_owner_to_a_copy() -> None:
    inventory = [record(slot, 9) for slot in RANKS] + [record(1, 9, holder=0)]
    sources = restore_point(
        map(SealedShard.from_record, inventory),
        [Cell(ranks=RANKS, units=(0, 1), buckets=(1000, 300))],
    )
    assert [source.holder for source in sources[0]] == [0, 1, 2, 3]


def test_restore_point_never_mixes_epochs() -> None:
    inventory = [record(slot, 9) for slot in RANKS]
    inventory += [record(slot, 10, epoch=1) for slot in (0, 1)]
    inventory += [record(slot, 10, epoch=2) for slot in (2, 3)]
    assert plan_of(inventory).restore_step == 9


def test_rejected_bytes_fall_down_the_ladder() -> None:
    inventory = [record(slot, step) for slot in RANKS for step in (9, 10)]
    inventory.append(record(1, 10, holder=2))
    plan = plan_of(inventory, rejected={(1, 1, 10)})
    assert (plan.restore_step, plan.sources[0][1].holder) == (10, 2)
    plan = plan_of(inventory, rejected={(1, 1, 10), (2, 1, 10)})
    assert (plan.restore_step, plan.sources[0][1].holder) == (9, 1)


def test_a_gap_names_the_missing_shards() -> None:
    with pytest.raises(SnapshotGapError, match=r"step 9: shards \[1, 3\] of 4"):
        plan_of([record(slot, 9) for slot in (0, 2)])
    with pytest.raises(SnapshotGapError, match="no sealed snapshot is left"):
        plan_of([])


def test_digest_is_a_function_of_the_facts_not_of_their_order() -> None:
    inventory = [record(slot, 9) for slot in RANKS]
    plan = plan_of(inventory)
    assert plan.digest == plan_of(list(reversed(inventory))).digest
    assert plan.digest != plan_of(inventory, ranks=(0, 2, 3)).digest
    assert 0 <= plan.digest < 2**63


def test_bytes_moved_counts_only_what_travels() -> None:
    inventory = [record(slot, 9) for slot in RANKS]
    assert plan_of(inventory, ranks=RANKS).bytes_moved() == 0
    # Shards of width 4 are 256 and 128 elements, of width 3 they are 384 and 128; ranks 0, 1, 2
    # are now slots 0, 3, 2, and slot 2 keeps [256, 300) of the second bucket.
    first_bucket = (384 - 256) + (768 - 384) + (1000 - 768)
    second_bucket = 256 - 128
    assert plan_of(inventory).bytes_moved() == 12 * (first_bucket + second_bucket)


def test_every_cell_restores_its_own_shards_of_the_same_step() -> None:
    cells = (
        Cell(stage=0, ranks=(0,), units=(1,), buckets=(1000,)),
        Cell(stage=1, ranks=(2, 3), units=(2,), buckets=(500,)),
    )

    def sealed(owner: int, step: int) -> Mapping[str, Any]:
        stage = owner // 2
        pair = [2 * stage, 2 * stage + 1]
        return {
            **record(owner, step),
            "cell": [stage, 0],
            "units": [stage + 1],
            "ranks": pair,
            "shard": owner % 2,
        }

    copy = {**sealed(1, 10), "holder": 3, "copy": True}
    inventory = [sealed(slot, step) for slot in (0, 2, 3) for step in (9, 10)]
    plan = plan_of([*inventory, copy], ranks=(0, 3, 2), cells=cells)
    assert plan.restore_step == 10
    assert [[s.owner for s in sources] for sources in plan.sources] == [[0, 1], [2, 3]]
    assert [source.holder for source, _ in plan.pieces(0)] == [0, 3]
    # Stage 1 keeps its cut: everyone reads back its own shard.
    assert [source.holder for source, _ in plan.pieces(3)] == [3]
    assert plan.bytes_moved() == 12 * (1000 - 512)
    with pytest.raises(SnapshotGapError, match=r"step 10, stage 0 tp 0: shards \[1\] of 2"):
        plan_of(inventory, cells=cells)


def test_a_worker_without_a_place_reads_nothing() -> None:
    plan = plan_of([record(slot, 9) for slot in RANKS])
    assert plan.cell_of(1) is None and plan.pieces(1) == ()


def test_copy_targets_prefer_another_node() -> None:
    assert copy_targets(1, ranks=RANKS, nodes=(0, 0, 0, 0), copies=1) == (2,)
    assert copy_targets(1, ranks=RANKS, nodes=(0, 0, 0, 1), copies=2) == (3, 2)
    assert copy_targets(0, ranks=(0,), nodes=(0,), copies=1) == ()
    assert copy_targets(0, ranks=RANKS, nodes=(0, 0, 0, 0), copies=1, peers=(0, 2)) == (2,)
    assert copy_targets(0, ranks=RANKS, nodes=(0, 1, 0, 1), copies=1, peers=(0, 2)) == (1,)
