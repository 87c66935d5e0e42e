"""The migration benchmark: its input, what a contiguous layout moves, and one small run."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.contiguous import ContiguousPlan, Stages
from benchmarks.migration import WAYS, check_options, main
from benchmarks.migration_worker import Move, sealed_by_stage
from elaswave_plugin.core.layout.shards import ShardCut
from elaswave_plugin.core.layout.worker_facts import SealedShard
from elaswave_plugin.core.planner.pipeline_flow import flow_of
from elaswave_plugin.errors import ConfigurationError
from tests.core.sealed import sealed

SIZES: dict[str, Any] = {"dp": 2, "layers": 8, "layer_mib": 1, "moved": 1, "rounds": 1}


def record(slot: int, shard_group: Any) -> SealedShard:
    cut = ShardCut(buckets=shard_group.buckets, width=len(shard_group.ranks))
    of_shard_group = {
        "shard_group": shard_group.key,
        "units": shard_group.units,
        "ranks": shard_group.ranks,
    }
    shard, payload_bytes = shard_group.ranks.index(slot), cut.payload_bytes
    return sealed(slot, 1, holder=slot, shard=shard, payload_bytes=payload_bytes, **of_shard_group)


def contiguous(move: Move) -> tuple[ContiguousPlan, Stages, Stages]:
    before, after = move.seatings()
    old, new = move.stages(before), move.stages(after)
    shard_groups = [
        old.shard_group(shard_group.stage, shard_group.ranks) for shard_group in before.shard_groups
    ]
    plan = ContiguousPlan(
        epoch=2,
        reason="r",
        ranks=tuple(range(2 * move.dp)),
        restore_step=1,
        shard_groups=tuple(
            new.shard_group(shard_group.stage, shard_group.ranks)
            for shard_group in after.shard_groups
        ),
        sources=sealed_by_stage(
            record(slot, shard_group) for shard_group in shard_groups for slot in shard_group.ranks
        ),
        alignment=128,
        dataflow=flow_of(layout=after.layout, num_microbatches=move.dp),
        old=old,
        new=new,
    )
    return plan, old, new


@given(dp=st.integers(1, 5), half=st.integers(2, 6), moved=st.integers(1, 5))
def test_contiguous_shards_are_put_together_from_the_right_elements(
    dp: int, half: int, moved: int
) -> None:
    """Every element of every new shard is read once, from where that element of its layer was."""
    move = Move(dp=dp, layers=2 * half, numel=128 * dp, moved=min(moved, half - 1))
    plan, old, new = contiguous(move)
    for slot in plan.ranks:
        number = plan.shard_group_of(slot)
        assert number is not None
        size = plan.after(number).shard_numel
        at = plan.shard_groups[number].ranks.index(slot) * size
        place = {s: at for at, s in enumerate(_elements(new, plan.shard_groups[number].stage))}
        found: dict[int, int] = {}
        for source, pieces in plan.pieces(slot):
            there = _elements(old, source.shard_group[0])
            base = source.shard * plan.before(source).shard_numel
            for piece in pieces:
                for offset in range(0, piece.stop - piece.start, 64):
                    element = there[base + piece.source_offset + offset]
                    found[piece.target_offset + offset] = place[element] - at
        assert sorted(found) == list(range(0, size, 64))
        assert all(target == wanted for target, wanted in found.items())


def _elements(stages: Stages, stage: int) -> list[tuple[int, int]]:
    """(layer, element) of every place of a stage's buffer."""
    return [(unit, n) for unit in stages.starts(stage) for n in range(stages.units[unit])]


def test_a_contiguous_layout_moves_more_than_the_layer() -> None:
    move = Move(dp=4, layers=12, numel=512, moved=1)
    plan, _, _ = contiguous(move)
    assert plan.bytes_moved() == 4 * 12 * 512


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"moved": 4}, "--layers is 8 and --moved 4, wanted an even number"),
        ({"layers": 7}, "--layers is 7"),
        ({"dp": 3}, "--dp is 3, which does not divide a layer of 1 MiB evenly"),
        ({"rounds": 0}, "--rounds is 0, wanted 1 or more"),
        ({"json_file": Path("no") / "such.json"}, "whose folder does not exist"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        check_options(**{**SIZES, "json_file": None, **options})
    assert complaint in str(caught.value)


@pytest.mark.slow
def test_a_small_run_brings_all_state_over(tmp_path: Path) -> None:
    """The workers compare every value that arrived."""
    file = tmp_path / "migration.json"
    sizes = [f"--{name.replace('_', '-')}={value}" for name, value in SIZES.items()]
    assert main([*sizes, f"--json={file}"]) == 0
    result = json.loads(file.read_text())
    assert set(result["pause_s"]) == set(WAYS)
    # A layer in two parts to two workers, and all the shards that shift by it.
    layer_bytes = result["layer_state_bytes"]
    assert result["fetched_bytes"]["blocking_interleaved"] >= layer_bytes
    assert result["fetched_bytes"]["blocking_contiguous"] >= 2 * layer_bytes
