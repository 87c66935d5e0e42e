"""Finds out whether the folder of a tag that DeepSpeed saved can be read."""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from elaswave_plugin.checkpoints.archives import archive_flaw, outline

_MODEL, _OPTIMIZER = "model_states.pt", "optim_states.pt"
_SHARD = re.compile(r"(.*?)zero_pp_rank_(\d+)_mp_rank_(.*)_states\.pt")


def flaw_of(folder: Path) -> str | None:
    """Say what keeps a checkpoint from being read, naming the file; None where it is whole.

    Every rank of the widths that its files say has written its own. No tensor is read. Source:
    deepspeed/runtime/engine.py, ``_get_ckpt_name``, ``_get_zero_ckpt_name`` and
    ``_common_checkpoint_state``.
    """
    files = sorted(folder.glob("*.pt"))
    if not any(file.name.endswith(_MODEL) for file in files):
        return f"{folder} has no *{_MODEL}"
    for file in files:
        if (flaw := archive_flaw(file)) is not None:
            return flaw
    for wanted in _parts(folder):
        if not any(folder.glob(wanted)):
            return f"{folder / wanted} is missing"
    width = shards_of(folder) or 0
    for name, found in sorted(_ranks(files).items()):
        for rank in range(max(width, max(found) + 1)):
            if rank not in found:
                return f"{folder / name.format(rank)} is missing"
    return None


def shards_of(folder: Path) -> int | None:
    """Return how many data-parallel ranks ZeRO says its state is cut for; None without ZeRO."""
    for file in sorted(folder.glob(f"*{_OPTIMIZER}")):
        count = outline(file).get("optimizer_state_dict", {}).get("partition_count")
        # Of each group of parameters, in the stages 1 and 2.
        counts = count if isinstance(count, list) else [count]
        return max((one for one in counts if isinstance(one, int)), default=None)
    return None


def _parts(folder: Path) -> Iterator[str]:
    """Yield the patterns of what each part of the model writes: weights, and ZeRO's state."""
    for file in sorted(folder.glob(f"*mp_rank_*_{_MODEL}")):
        said: dict[str, Any] = outline(file)
        for part in range(said.get("mp_world_size", 0)):
            yield f"*mp_rank_{part:02d}_{_MODEL}"
            # The engine writes them where ZeRO keeps the optimizer's state apart.
            if said.get("param_shapes") is not None:
                yield f"*zero_pp_rank_*_mp_rank_{part:02d}_{_OPTIMIZER}"
        return


def _ranks(files: Sequence[Path]) -> dict[str, set[int]]:
    """The data-parallel ranks of each kind of file, by its name with a hole for the rank."""
    ranks: defaultdict[str, set[int]] = defaultdict(set)
    for file in files:
        if (named := _SHARD.fullmatch(file.name)) is not None:
            before, rank, kind = named.groups()
            ranks[f"{before}zero_pp_rank_{{}}_mp_rank_{kind}_states.pt"].add(int(rank))
    return ranks
