"""After a loss the live Megatron objects equal freshly built ones: nothing captured was missed."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.conftest import Launch
from tests.faults.harness import JobSpec, check_survived
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled

EXPERTS = ("--num-experts=4", "--disable-bias-linear")

# What differs for a known reason, each with that reason.
KNOWN = {
    r"ddp/buffers/\d+/(numel|bucket_indices|param_data|grad_data)": "buckets reserve room",
    r"ddp/buffers/\d+/(grad_numel|param_index_map)": "buckets reserve room",
    r".*/offset$": "buckets reserve room",
    r".*gbuf_world/(start|end)": "buckets reserve room",
    r"ddp/full_param_layout/": "what DDP made its buffers from; later nobody asks for it",
    r"optimizer/_has_grad_norm_group_cache/mtp": "asked in a step, and MTP is refused",
    r".*gradient_scaling_factor": "the gradient scale is that of the launch, whoever is left",
    r".*(is_first_batch|per_param_grad_ready_counts)": "the live ones have trained",
    r"modules/.*/current_microbatch": "the live ones have trained",
    r".*\.token_dispatcher/(\w+_splits\w*|tokens_per_expert)": "the live ones have trained",
    r".*\.token_dispatcher/(num_out_tokens|cuda_sync_point)": "the live ones have trained",
    r".*(param_gather_dispatched|cached_\w+_shard_list)": "the live ones have trained",
    r".*(start_grad_sync|finish_grad_sync|start_param_sync|register_grad_ready)": "seams of ours",
    r".*sharded_(state_dict|param_state_\w+)": "seams of ours",
    r"ddp/(load_state_dict|zero_grad_buffer|scale_gradients)$": "seams of ours",
    r"ddp/(no_sync|config/no_sync_func)$": "seams of ours",
    r".*config/barrier_with_L1_time$": "timers of ours wait for nobody",
    r"(param_groups|optimizer/opt_group_ranges).*/(lr|weight_decay)": "the schedule has moved on",
}


def leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, one in value.items():
            yield from leaves(one, f"{path}/{name}")
    elif isinstance(value, list) and value and value[0] in ("tensor", "group"):
        yield path, value
    elif isinstance(value, list):
        yield f"{path}#", len(value)
        for index, one in enumerate(value):
            yield from leaves(one, f"{path}/{index}")
    else:
        yield path, value


def unknown_differences(pictures: dict[str, Any]) -> list[str]:
    found = []
    for part in pictures["fresh"]:
        live = dict(leaves(pictures["live"][part], part))
        fresh = dict(leaves(pictures["fresh"][part], part))
        for path in sorted(live.keys() | fresh.keys()):
            same = live.get(path, "absent") == fresh.get(path, "absent")
            if not same and not any(re.match(known, path) for known in KNOWN):
                found.append(f"{path}: live {live.get(path)!r}, fresh {fresh.get(path)!r}")
    return found


@proves(Kind.KILL, Promise.FRESH, victim="1", moment="2:backward")
def test_live_objects_after_a_loss_equal_fresh_ones(run: Launch, tmp_path: Path) -> None:
    spec = JobSpec(steps=4, kills=("1@2:backward",), walk=str(tmp_path))
    check_survived(run(spec))
    files = sorted(tmp_path.glob("walk-*.json"))
    assert len(files) == 3
    for file in files:
        pictures = json.loads(file.read_text())
        assert not unknown_differences(pictures)
        ranks = pictures["ranks"]
        assert ranks["kinds"] == ["ElasticProcessGroup"]
        assert len(ranks["lists"]) >= 8
        for name, members in ranks["lists"].items():
            assert members in ranks["groups"], name


@proves(Kind.KILLS, Promise.FRESH, victim="0 2", moment="1:backward 3:backward")
@pytest.mark.parametrize("experts", sampled([((),), (EXPERTS,)]), ids=["dense", "experts"])
def test_live_objects_at_another_tp_position_equal_fresh_ones(
    run: Launch, tmp_path: Path, experts: tuple[str, ...]
) -> None:
    """Both survivors come from tp position 1; one of them is at position 0 now."""
    spec = JobSpec(
        options=("--tensor-model-parallel-size=2", "--sequence-parallel", *experts),
        kills=("0@1:backward", "2@3:backward"),
        walk=str(tmp_path),
    )
    check_survived(run(spec))
    files = sorted(tmp_path.glob("walk-*.json"))
    assert len(files) == 2
    pictures = [json.loads(file.read_text()) for file in files]
    assert [unknown_differences(picture) for picture in pictures] == [[], []]
    if experts:
        assert any("token_dispatcher" in name for name in pictures[0]["live"]["modules"])
    starts = {
        attributes["vocab_start_index"]
        for picture in pictures
        for attributes in picture["live"]["modules"].values()
        if "vocab_start_index" in attributes
    }
    assert len(starts) == 2


@proves(Kind.SABOTAGE, Promise.SEEN, victim="1", moment="2:backward")
def test_a_stale_size_is_found(run: Launch, tmp_path: Path) -> None:
    """Negative control: one cached size that nobody rebinds."""
    spec = JobSpec(steps=4, kills=("1@2:backward",), walk=str(tmp_path))
    check_survived(run(spec))
    pictures = json.loads(sorted(tmp_path.glob("walk-*.json"))[0].read_text())
    pictures["live"]["ddp"]["buffers"][0]["data_parallel_world_size"] = 4
    assert len(unknown_differences(pictures)) == 1
