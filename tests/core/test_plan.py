"""The restore point, its sources and the plan's digest."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elaswave_plugin.core.layout.worker_facts import SealedShard
from elaswave_plugin.core.recovery_plan.placement import ShardGroup
from elaswave_plugin.core.recovery_plan.plan import copy_targets, make_plan, restore_point
from elaswave_plugin.core.step.dataflow import deal
from elaswave_plugin.errors import SnapshotGapError
from tests.core.sealed import sealed

RANKS = (0, 1, 2, 3)


def record(owner: int, step: int, *, epoch: int = 1, holder: int | None = None) -> SealedShard:
    return sealed(
        owner,
        step,
        epoch,
        units=(0, 1),
        ranks=RANKS,
        shard=RANKS.index(owner),
        table_digest=1000 * owner + step,
        holder=owner if holder is None else holder,
        holder_address="host:1",
        is_copy=holder is not None,
    )


def plan_of(
    inventory: list[SealedShard], *, ranks: tuple[int, ...] = (0, 3, 2), **changes: Any
) -> Any:
    arguments = {
        "epoch": 2,
        "reason": "worker 1 exited",
        "ranks": ranks,
        "dataflow": deal(num_microbatches=8, launch_slots=RANKS, live=(0, 3, 2)),
        "shard_groups": (ShardGroup(ranks=ranks, units=(0, 1), buckets=(1000, 300)),),
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
        inventory,
        [ShardGroup(ranks=RANKS, units=(0, 1), buckets=(1000, 300))],
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
    plan = plan_of(inventory, rejected={record(1, 10)})
    assert (plan.restore_step, plan.sources[0][1].holder) == (10, 2)
    plan = plan_of(inventory, rejected={record(1, 10), record(1, 10, holder=2)})
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


def test_digest_covers_every_field_of_every_source() -> None:
    plan = plan_of([record(slot, 9) for slot in RANKS])
    first, *others = plan.sources[0]
    for field in fields(SealedShard):
        value = getattr(first, field.name)
        more: Any = (7,) if isinstance(value, tuple) else "?" if isinstance(value, str) else 1
        changed = replace(first, **{field.name: value + more})
        other = replace(plan, sources=((changed, *others),))
        assert other.digest != plan.digest, field.name


def test_bytes_moved_counts_only_what_travels() -> None:
    inventory = [record(slot, 9) for slot in RANKS]
    assert plan_of(inventory, ranks=RANKS).bytes_moved() == 0
    # Shards of width 4 are 256 and 128 elements, of width 3 they are 384 and 128; ranks 0, 1, 2
    # are now slots 0, 3, 2, and slot 2 keeps [256, 300) of the second bucket.
    first_bucket = (384 - 256) + (768 - 384) + (1000 - 768)
    second_bucket = 256 - 128
    assert plan_of(inventory).bytes_moved() == 12 * (first_bucket + second_bucket)


def test_every_cell_restores_its_own_shards_of_the_same_step() -> None:
    shard_groups = (
        ShardGroup(stage=0, ranks=(0,), units=(1,), buckets=(1000,)),
        ShardGroup(stage=1, ranks=(2, 3), units=(2,), buckets=(500,)),
    )

    def of_stage(owner: int, step: int) -> SealedShard:
        stage = owner // 2
        place = {"shard_group": (stage, 0), "units": (stage + 1,), "shard": owner % 2}
        return replace(record(owner, step), ranks=(2 * stage, 2 * stage + 1), **place)

    copy = replace(of_stage(1, 10), holder=3, is_copy=True)
    inventory = [of_stage(slot, step) for slot in (0, 2, 3) for step in (9, 10)]
    plan = plan_of([*inventory, copy], ranks=(0, 3, 2), shard_groups=shard_groups)
    assert plan.restore_step == 10
    assert [[s.owner for s in sources] for sources in plan.sources] == [[0, 1], [2, 3]]
    assert [source.holder for source, _ in plan.pieces(0)] == [0, 3]
    # Stage 1 keeps its cut: everyone reads back its own shard.
    assert [source.holder for source, _ in plan.pieces(3)] == [3]
    assert plan.bytes_moved() == 12 * (1000 - 512)
    with pytest.raises(SnapshotGapError, match=r"step 10, stage 0 tp 0: shards \[1\] of 2"):
        plan_of(inventory, shard_groups=shard_groups)


def test_a_worker_without_a_place_reads_nothing() -> None:
    plan = plan_of([record(slot, 9) for slot in RANKS])
    assert plan.shard_group_of(1) is None and plan.pieces(1) == ()


def test_copy_targets_prefer_another_node() -> None:
    assert copy_targets(1, ranks=RANKS, nodes=(0, 0, 0, 0), copies=1) == (2,)
    assert copy_targets(1, ranks=RANKS, nodes=(0, 0, 0, 1), copies=2) == (3, 2)
    assert copy_targets(0, ranks=(0,), nodes=(0,), copies=1) == ()
    assert copy_targets(0, ranks=RANKS, nodes=(0, 0, 0, 0), copies=1, peers=(0, 2)) == (2,)
    assert copy_targets(0, ranks=RANKS, nodes=(0, 1, 0, 1), copies=1, peers=(0, 2)) == (1,)


def holders(
    sizes: list[int],
    *,
    ranks: tuple[int, ...] | None = None,
    copies: int,
    width: int | None = None,
    sharing: bool = True,
    apart: bool = True,
) -> Counter[int]:
    """Count the copies that each slot holds; `sizes`: workers by node; `apart`: not on its own.

    Every ``width`` workers of a node share their state with those of the same places elsewhere.
    """
    nodes = [node for node, size in enumerate(sizes) for _ in range(size)]
    places = [place for size in sizes for place in range(size)]
    ranks = ranks or tuple(range(len(nodes)))
    groups = [0 if width is None else place // width for place in places]
    held: Counter[int] = Counter()
    for slot in ranks:
        targets = copy_targets(
            slot,
            ranks=ranks,
            nodes=[nodes[one] for one in ranks],
            copies=copies,
            peers=[one for one in ranks if groups[one] == groups[slot]] if sharing else (),
        )
        assert len(set(targets)) == copies
        assert not apart or all(nodes[one] != nodes[slot] for one in targets)
        held.update(targets)
    return held


@given(st.integers(2, 6), st.integers(1, 8), st.data())
def test_on_equal_nodes_everybody_holds_as_many_copies_as_it_gives(
    nodes: int, size: int, data: st.DataObject
) -> None:
    """With ZeRO over all workers, and with stages of so many workers a node, or of one."""
    copies = data.draw(st.integers(1, nodes - 1))
    width = data.draw(st.sampled_from([None, *(w for w in range(1, size + 1) if size % w == 0)]))
    everybody = dict.fromkeys(range(nodes * size), copies)
    assert holders([size] * nodes, copies=copies, width=width) == everybody
    assert holders([size] * nodes, copies=copies, sharing=False) == everybody


@given(st.lists(st.integers(1, 8), min_size=2, max_size=6), st.data())
def test_on_unequal_nodes_nobody_holds_many_more_copies_than_others(
    sizes: list[int], data: st.DataObject
) -> None:
    """As after losses, where the last rank has taken the place of one that went."""
    copies = data.draw(st.integers(1, len(sizes) - 1))
    ranks = tuple(data.draw(st.permutations(range(sum(sizes)))))
    held = holders(sizes, ranks=ranks, copies=copies)
    assert max(held.values()) <= copies * math.ceil(max(sizes) / min(sizes))


@given(st.integers(2, 9), st.booleans())
def test_on_one_node_everybody_holds_the_snapshot_of_another(size: int, sharing: bool) -> None:
    held = holders([size], copies=1, sharing=sharing, apart=False)
    assert held == dict.fromkeys(range(size), 1)


def test_sixteen_nodes_of_eight() -> None:
    """The first of a node once held the copies of all eight of the one before."""
    assert set(holders([8] * 16, copies=1).values()) == {1}


def in_place_of(plan: Any) -> list[tuple[int, int]]:
    """(weights, state) of each worker, by the number of its parts."""
    return [(one["weights"], one["state"]) for one in map(plan.in_place, plan.ranks)]


def test_what_is_live_at_the_restore_point_stays_in_place() -> None:
    inventory = [record(slot, 9) for slot in RANKS]
    alive = dict.fromkeys(RANKS, (9, 1))
    # Everyone has all weights; shards are others where the width is.
    narrower = plan_of(inventory, live=alive)
    assert in_place_of(narrower) == [(2, 0)] * 3
    shard_groups = (ShardGroup(ranks=RANKS, units=(0, 1), buckets=(1000, 300)),)
    same = plan_of(inventory, ranks=RANKS, shard_groups=shard_groups, live=alive)
    assert in_place_of(same) == [(2, 2)] * 4
    assert [same.pieces(slot) for slot in RANKS] == [()] * 4


@pytest.mark.parametrize("last", [None, (8, 1), (9, 2)])
def test_one_worker_that_is_elsewhere_makes_all_of_its_cell_gather(
    last: tuple[int, int] | None,
) -> None:
    inventory = [record(slot, 9) for slot in RANKS]
    plan = plan_of(inventory, live={**dict.fromkeys(RANKS, (9, 1)), 3: last})
    assert in_place_of(plan) == [(0, 0)] * 3


def test_who_comes_to_a_cell_makes_all_of_it_gather() -> None:
    inventory = [replace(record(slot, 9), ranks=(0, 1), shard=slot) for slot in (0, 1)]
    shard_groups = (ShardGroup(ranks=(0, 1, 2), units=(0, 1), buckets=(1000, 300)),)
    alive = dict.fromkeys(RANKS, (9, 1))
    assert (
        in_place_of(plan_of(inventory, ranks=(0, 1, 2), shard_groups=shard_groups, live=alive))
        == [(0, 0)] * 3
    )


@given(st.data())
def test_pieces_and_what_stays_make_the_new_shard(data: st.DataObject) -> None:
    """Layers and workers of two stages change; every real element is read or stays, once."""
    lengths = dict(enumerate(data.draw(st.lists(st.integers(1, 900), min_size=4, max_size=6))))
    units = sorted(lengths)

    def cells_of(cut: int, stages: Sequence[tuple[int, ...]]) -> tuple[ShardGroup, ...]:
        parts = tuple(units[:cut]), tuple(units[cut:])
        return tuple(
            ShardGroup(stage=s, ranks=ranks, units=own, buckets=tuple(lengths[u] for u in own))
            for s, (ranks, own) in enumerate(zip(stages, parts, strict=True))
        )

    before = cells_of(data.draw(st.integers(1, len(units) - 1)), ((0, 1), (2, 3)))
    gone = data.draw(st.sampled_from([None, *RANKS]))
    left = [tuple(slot for slot in shard_group.ranks if slot != gone) for shard_group in before]
    after = cells_of(data.draw(st.integers(1, len(units) - 1)), left)
    inventory = [
        replace(
            record(slot, 9, holder=None if slot != gone else (slot + 1) % 4),
            shard_group=shard_group.key,
            units=shard_group.units,
            ranks=shard_group.ranks,
            shard=shard_group.ranks.index(slot),
        )
        for shard_group in before
        for slot in shard_group.ranks
    ]
    ranks = tuple(slot for shard_group in after for slot in shard_group.ranks)
    live = {slot: (9, 1) for slot in ranks if data.draw(st.booleans())}
    plan = plan_of(inventory, ranks=ranks, shard_groups=after, live=live)
    for number, shard_group in enumerate(after):
        for slot in shard_group.ranks:
            spans = {
                bucket: (start, stop)
                for bucket, start, stop, _ in plan.after(number).spans(
                    shard_group.ranks.index(slot)
                )
            }
            read = dict.fromkeys(spans, 0)
            for _, pieces in plan.pieces(slot):
                for piece in pieces:
                    read[piece.bucket] += piece.stop - piece.start
            stays = plan.state_in_place(slot)
            for bucket, (start, stop) in spans.items():
                assert read[bucket] == (0 if bucket in stays else stop - start)
            for bucket, was in stays.items():
                assert slot in live
                assert before[number].ranks == shard_group.ranks
                assert before[number].units[was] == shard_group.units[bucket]
