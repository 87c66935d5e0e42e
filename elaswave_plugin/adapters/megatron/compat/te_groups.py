"""Clears Transformer Engine's caches of groups, whose handles stay when their members change."""

import sys

_MODULE = "transformer_engine.pytorch.distributed"
# Each keeps its answer by handle (transformer_engine/pytorch/distributed.py).
_REMEMBERED = ("get_distributed_world_size", "get_distributed_rank")


def forget_groups() -> None:
    """Have sizes and ranks asked again; nothing where Transformer Engine is not in use.

    Its modules hold the handle of their TP group, which stays valid, and that group's size, which
    is the same in every layout.
    """
    module = sys.modules.get(_MODULE)
    for name in _REMEMBERED:
        # Versions before 1.12 ask each time.
        clear = getattr(getattr(module, name, None), "cache_clear", None)
        if clear is not None:
            clear()
