"""A checkpoint takes its place, and is the latest, only once every worker has written its part.

DeepSpeed writes straight into the folder of the tag, and rank 0 names it in `latest` while others
may still write. A loss meanwhile would leave a torn checkpoint there, and the files of the former
number of workers beside those of the new one, which no reader of DeepSpeed's can tell apart.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

# What is being written, and what was in its place before.
_PART, _FORMER = ".part", ".former"
_LATEST = "latest"


def save_whole(
    native: Callable[..., Any],
    engine: Any,
    save_dir: str,
    tag: object = None,
    client_state: dict[str, Any] | None = None,
    save_latest: bool = True,
    exclude_frozen_parameters: bool = False,
) -> bool:
    """``engine.save_checkpoint``; may be called again after an interruption anywhere in it.

    Source: deepspeed/runtime/engine.py, ``save_checkpoint``.
    """
    if not save_dir:
        raise ValueError(f"save_dir must be a non-empty string, got {save_dir!r}")
    name = f"global_step{engine.global_steps}" if tag is None else str(tag)
    place, writes = Path(save_dir, name), dist.get_rank() == 0
    if writes:
        _remove(_beside(place, _PART))
    # Its first barrier comes before its first file, and a barrier is its end.
    native(
        save_dir,
        tag=name + _PART,
        client_state=client_state or {},
        save_latest=False,
        exclude_frozen_parameters=exclude_frozen_parameters,
    )
    if writes:
        _take_place(place)
        if save_latest:
            _point_to(Path(save_dir, _LATEST), name)
    return True


def _beside(place: Path, ending: str) -> Path:
    return place.with_name(place.name + ending)


def _take_place(place: Path) -> None:
    former = _beside(place, _FORMER)
    if place.exists():
        _remove(former)
        place.rename(former)
    _beside(place, _PART).rename(place)
    _remove(former)


def _point_to(latest: Path, name: str) -> None:
    fresh = _beside(latest, _PART)
    fresh.write_text(name)
    os.replace(fresh, latest)


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
