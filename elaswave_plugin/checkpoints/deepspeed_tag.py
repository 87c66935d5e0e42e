"""Finds out whether the folder of a tag that DeepSpeed saved can be read."""

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from elaswave_plugin.checkpoints.archives import archive_flaw

_SHARD = re.compile(r"(.*?)zero_pp_rank_(\d+)_mp_rank_(.*)_states\.pt")


def flaw_of(folder: Path, *, shards: int | None = None) -> str | None:
    """Say what keeps a checkpoint from being read, naming the file; None where it is whole.

    ``shards``: the number that ZeRO is to have written of each kind, where known. No data is read.
    Source: deepspeed/runtime/engine.py, ``_get_ckpt_name`` and ``_get_zero_ckpt_name``.
    """
    files = sorted(folder.glob("*.pt"))
    if not any(file.name.endswith("model_states.pt") for file in files):
        return f"{folder} has no *model_states.pt"
    for file in files:
        if (flaw := archive_flaw(file)) is not None:
            return flaw
    for name, found in sorted(_ranks(files).items()):
        for rank in range(shards or max(found) + 1):
            if rank not in found:
                return f"{folder / name.format(rank)} is missing"
    return None


def shards_of(folder: Path) -> int | None:
    """Count the data-parallel ranks that ZeRO has written a checkpoint for; None without ZeRO."""
    counts = [max(found) + 1 for found in _ranks(sorted(folder.glob("*optim_states.pt"))).values()]
    return max(counts, default=None)


def _ranks(files: Sequence[Path]) -> dict[str, set[int]]:
    """The data-parallel ranks of each kind of file, by its name with a hole for the rank."""
    ranks: defaultdict[str, set[int]] = defaultdict(set)
    for file in files:
        if (named := _SHARD.fullmatch(file.name)) is not None:
            before, rank, kind = named.groups()
            ranks[f"{before}zero_pp_rank_{{}}_mp_rank_{kind}_states.pt"].add(int(rank))
    return ranks
