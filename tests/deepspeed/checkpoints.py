"""The contents of a DeepSpeed checkpoint: by file, and merged by DeepSpeed's own converter."""

import argparse
import contextlib
import io
from pathlib import Path
from typing import Any

import torch

State = dict[str, torch.Tensor]


def parts(folder: Path) -> dict[str, Any]:
    """The content of every file of one checkpoint, by its name."""
    return {
        path.name: torch.load(path, map_location="cpu", weights_only=False)
        for path in sorted(folder.glob("*.pt"))
    }


def same(left: Any, right: Any) -> bool:
    """Return whether two contents are equal, tensors bit for bit; the configurations may differ."""
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and torch.equal(left, right)
    if isinstance(left, dict):
        names = left.keys() - {"ds_config"}
        return names == right.keys() - {"ds_config"} and all(
            same(left[name], right[name]) for name in names
        )
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if hasattr(left, "__dict__") and not isinstance(left, type):
        return type(left) is type(right) and same(vars(left), vars(right))
    return bool(left == right)


def convert(folder: Path, target: Path) -> Path:
    """Convert one checkpoint with ``deepspeed.checkpoint.ds_to_universal``."""
    from deepspeed.checkpoint import ds_to_universal

    arguments = argparse.Namespace(
        input_folder=str(folder),
        output_folder=str(target),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    target.mkdir(parents=True)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        ds_to_universal.main(arguments)
    return target


def merged(universal: Path) -> State:
    """Weights and moments of a universal checkpoint, "NAME/fp32", "NAME/exp_avg" and so on."""
    state = {}
    for path in sorted((universal / "zero").glob("*/*.pt")):
        content = torch.load(path, map_location="cpu", weights_only=False)
        tensor = content["param"] if isinstance(content, dict) else content
        if isinstance(tensor, torch.Tensor):
            state[f"{path.parent.name}/{path.stem}"] = tensor.reshape(-1)
    return state
