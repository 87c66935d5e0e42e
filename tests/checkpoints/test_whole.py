"""A checkpoint is whole when everyone has written of the width that it itself declares."""

import io
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter, save

from elaswave_plugin.checkpoints.archives import archive_flaw, outline
from elaswave_plugin.checkpoints.directory import (
    DEEPSPEED_TRACKER,
    MEGATRON_TRACKER,
    check_loadable,
)
from elaswave_plugin.errors import CheckpointUnreadableError


def write_tag(tag: Path, *, width: int = 3, parts: int = 1, stage: int = 2) -> None:
    """A tag as DeepSpeed's engine writes it (``_common_checkpoint_state``, ``_save_zero...``)."""
    tag.mkdir(parents=True)
    count = width if stage == 3 else [width, width]
    said: dict[str, Any] = {
        "dp_world_size": width,
        "mp_world_size": parts,
        "module": torch.nn.Linear(2, 2),
    }
    said["param_shapes"] = [{"weight": torch.Size([2, 2])}] if stage else None
    for part in range(parts):
        for rank in range(width):
            shard = f"zero_pp_rank_{rank}_mp_rank_{part:02d}"
            if stage:
                state = {"optimizer_state_dict": {"partition_count": count}}
                torch.save(state, tag / f"{shard}_optim_states.pt")
            model = shard if stage == 3 else f"mp_rank_{part:02d}"
            torch.save(said, tag / f"{model}_model_states.pt")


@pytest.mark.parametrize(
    ("form", "missing"),
    [
        ({}, "zero_pp_rank_2_mp_rank_00_optim_states.pt"),
        ({}, "zero_pp_rank_*_mp_rank_00_optim_states.pt"),
        ({"stage": 3}, "zero_pp_rank_2_mp_rank_00_*"),
        ({"stage": 3}, "zero_pp_rank_2_mp_rank_00_model_states.pt"),
        ({"parts": 2}, "*mp_rank_01_*"),
        ({"parts": 2, "stage": 0}, "mp_rank_01_model_states.pt"),
    ],
)
def test_a_tag_is_whole_when_all_that_it_says_have_written(
    tmp_path: Path, form: dict[str, int], missing: str
) -> None:
    """Also where the last ones are missing, whose files no other one's name tells of."""
    for number in (2, 4):
        write_tag(tmp_path / f"global_step{number}", **form)
    (tmp_path / DEEPSPEED_TRACKER).write_text("global_step4")
    check_loadable(tmp_path)
    files = list((tmp_path / "global_step4").glob(missing))
    assert files
    for file in files:
        file.unlink()
    with pytest.raises(CheckpointUnreadableError, match=r" is missing; .* is .*global_step2"):
        check_loadable(tmp_path)


@pytest.mark.parametrize("missing", ["mp_rank_00_001", "mp_rank_01_001"])
def test_the_format_torch_is_whole_when_all_that_it_says_have_written(
    tmp_path: Path, missing: str
) -> None:
    args = Namespace(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    for number in (2, 4):
        for rank in ("00_000", "00_001", "01_000", "01_001"):
            folder = tmp_path / f"iter_{number:07d}" / f"mp_rank_{rank}"
            folder.mkdir(parents=True)
            torch.save({"args": args}, folder / "model_optim_rng.pt")
    (tmp_path / MEGATRON_TRACKER).write_text("4")
    check_loadable(tmp_path)
    shutil.rmtree(tmp_path / "iter_0000004" / missing)
    with pytest.raises(CheckpointUnreadableError, match=rf"{missing} is missing; .*iter_0000002"):
        check_loadable(tmp_path)


RERUNS = "rerun_state_machine_state/shard_"


@pytest.mark.parametrize(
    ("objects", "workers", "flaw"),
    [
        ([f"{RERUNS}{rank}_3" for rank in range(3)], 3, None),
        (["rng_state/shard_0.0_1.2", "rng_state/shard_0.1_1.2"], 3, None),
        ([f"{RERUNS}0_3", f"{RERUNS}2_3"], 3, f"has no {RERUNS}1_3"),
        (["rng_state/shard_0.0_1.2"], 3, "has no rng_state/shard_0.1_1.2"),
        # What one worker writes of a job that calls itself one of three.
        ([f"{RERUNS}0_1"], 3, f"says 3 workers, .* has {RERUNS}0_1"),
    ],
)
def test_an_object_in_shards_is_whole_when_all_that_it_says_are_there(
    tmp_path: Path, objects: list[str], workers: int, flaw: str | None
) -> None:
    """As Megatron-Core names them (``ShardedObject.unique_key``)."""
    for number in (2, 4):
        folder = tmp_path / f"iter_{number:07d}"
        here = objects if number == 4 else ()
        state = {"a": torch.ones(3), **{name: io.BytesIO(b"state") for name in here}}
        save(state, storage_writer=FileSystemWriter(folder), no_dist=True)
        torch.save({"args": Namespace(world_size=workers)}, folder / "common.pt")
        (folder / "metadata.json").write_text("{}")
    (tmp_path / MEGATRON_TRACKER).write_text("4")
    if flaw is None:
        check_loadable(tmp_path)
    else:
        with pytest.raises(CheckpointUnreadableError, match=rf"{flaw}; .*iter_0000002"):
            check_loadable(tmp_path)


class Hostile:
    """An object whose pickle ends the process that reads it."""

    def __reduce__(self) -> tuple[object, ...]:
        return exit, (3,)


def test_looking_at_a_file_runs_nothing_of_it(tmp_path: Path) -> None:
    file = tmp_path / "some.pt"
    state = {"width": 3, "hostile": Hostile(), "hosts": [Hostile()], "tensor": torch.ones(2)}
    torch.save(state, file)
    found = outline(file)
    assert found["width"] == 3 and found.keys() == state.keys()
    assert archive_flaw(file) is None
