"""The reads of a migrated layer: worker to worker between stages of equal widths."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from elaswave_plugin.core.layout.shards import ShardCut
from elaswave_plugin.core.recovery_plan.placement import ShardGroup
from elaswave_plugin.core.recovery_plan.plan import RecoveryPlan, make_plan
from elaswave_plugin.core.step.dataflow import deal
from tests.core.sealed import sealed

WIDTHS = st.integers(1, 8)
LENGTHS = st.lists(st.integers(1, 9000), min_size=3, max_size=6).map(tuple)


def migration(lengths: tuple[int, ...], giving: int, getting: int, *, moved: int) -> RecoveryPlan:
    """Layers go from stage 1, of ``giving`` workers, to stage 0, of ``getting``; the rest stays.

    They are the first ``moved`` of stage 1, which keeps one more; ``lengths`` in elements.
    """
    units, slots = tuple(range(len(lengths))), tuple(range(getting + giving))
    ranks = (slots[:getting], slots[getting:])
    before, after = (
        tuple(
            ShardGroup(
                stage=stage, ranks=ranks[stage], units=own, buckets=tuple(lengths[u] for u in own)
            )
            for stage, own in enumerate((units[:cut], units[cut:]))
        )
        for cut in (len(units) - 1 - moved, len(units) - 1)
    )
    inventory = [
        sealed(
            slot,
            5,
            shard_group=shard_group.key,
            units=shard_group.units,
            ranks=shard_group.ranks,
            shard=shard,
            holder=slot,
        )
        for shard_group in before
        for shard, slot in enumerate(shard_group.ranks)
    ]
    return make_plan(
        epoch=2,
        reason="layers move",
        ranks=slots,
        shard_groups=after,
        dataflow=deal(num_microbatches=8, launch_slots=(0,), live=(0,)),
        inventory=inventory,
        live=dict.fromkeys(slots, (5, 1)),
    )


def transfers(plan: RecoveryPlan) -> list[tuple[int, int]]:
    """(holder, reader) of everything that is read."""
    return [(source.holder, slot) for slot in plan.ranks for source, _ in plan.pieces(slot)]


def owners(lengths: tuple[int, ...], width: int) -> list[int]:
    """Shards with any element at all: a layer may be smaller than 128 elements a worker."""
    cut = ShardCut(buckets=lengths, width=width)
    return [shard for shard in range(width) if any(cut.spans(shard))]


@given(LENGTHS, WIDTHS, st.data())
def test_each_reads_from_one_and_is_read_by_one_where_stages_are_as_wide(
    lengths: tuple[int, ...], width: int, data: st.DataObject
) -> None:
    moved = data.draw(st.integers(1, len(lengths) - 2))
    plan = migration(lengths, width, width, moved=moved)
    found = transfers(plan)
    readers, holders = Counter(slot for _, slot in found), Counter(held for held, _ in found)
    assert set(readers.values()) == set(holders.values()) == {1}
    # And who reads has the same place in its stage: nothing of the layer is cut anew.
    own = owners(lengths[-1 - moved : -1], width)
    assert sorted(found) == [(width + shard, shard) for shard in own]


@given(LENGTHS, WIDTHS, WIDTHS)
def test_stages_of_unequal_widths_read_every_element_once_in_few_transfers(
    lengths: tuple[int, ...], giving: int, getting: int
) -> None:
    """One layer: at most a transfer for each place at which either stage cuts it."""
    plan = migration(lengths, giving, getting, moved=1)
    found = transfers(plan)
    assert len(found) == len(set(found)) <= giving + getting - 1
    assert {slot for _, slot in found} == set(owners(lengths[-2:-1], getting))
    assert {held - getting for held, _ in found} == set(owners(lengths[-2:-1], giving))
    assert plan.bytes_moved() == 12 * lengths[-2]
    read = sorted(
        (piece.start, piece.stop)
        for slot in plan.ranks
        for _, pieces in plan.pieces(slot)
        for piece in pieces
    )
    assert [start for start, _ in read] == [0, *(stop for _, stop in read[:-1])]
    assert read[-1][1] == lengths[-2]
