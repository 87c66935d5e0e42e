"""Finds out whether a checkpoint in Megatron-LM's format torch can be read."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from elaswave_plugin.checkpoints.archives import archive_flaw, outline

RANKS, MODEL = "mp_rank_", "model_optim_rng.pt"


def flaw_of(folder: Path) -> str | None:
    """Say what keeps a checkpoint from being read, naming the file; None where it is whole.

    Each rank of the width that its arguments say has its folder with its file, and each file its
    end. No data is read. Source: megatron/training/checkpointing.py, ``get_checkpoint_name``.
    """
    ranks = sorted(path for path in folder.glob(f"{RANKS}*") if path.is_dir())
    if not ranks:
        return f"{folder} has no folder {RANKS}*"
    for rank in ranks:
        if not (rank / MODEL).is_file():
            return f"{rank / MODEL} is missing"
        for file in sorted(rank.glob("*.pt")):
            if (flaw := archive_flaw(file)) is not None:
                return flaw
    for name in _names(outline(ranks[0] / MODEL).get("args")):
        if not any(f"{rank.name}_".startswith(f"{name}_") for rank in ranks):
            return f"{folder / name} is missing"
    return None


def _names(args: Any) -> Iterator[str]:
    """Yield the folders of all ranks of a model; those of experts have more behind the name."""
    stages = getattr(args, "pipeline_model_parallel_size", 1)
    for tp, stage in product(range(getattr(args, "tensor_model_parallel_size", 0)), range(stages)):
        yield f"{RANKS}{tp:02d}" if stages == 1 else f"{RANKS}{tp:02d}_{stage:03d}"
