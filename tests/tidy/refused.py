"""Tables of what is refused by its setting, read from the tables that refuse it."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ADAPTERS = Path(__file__).resolve().parents[2] / "elaswave_plugin" / "adapters"
OWNERS = (
    ("ddp", "DistributedDataParallelConfig"),
    ("model", "TransformerConfig"),
    ("experts", "TransformerConfig, mixtures of experts"),
)


def carried(adapter: str) -> tuple[tuple[Any, ...], ...]:
    """Return the table CARRIED of an adapter's unsupported.py, without importing its framework."""
    tree = ast.parse((ADAPTERS / adapter / "unsupported.py").read_text("utf-8"))
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == "CARRIED":
            assert node.value is not None
            table: tuple[tuple[Any, ...], ...] = ast.literal_eval(node.value)
            return table
    raise ValueError(f"adapters/{adapter}/unsupported.py has no table CARRIED")


def megatron_table() -> str:
    """Settings of Megatron-Core."""
    rows = (
        (f"`{name}`", dict(OWNERS)[whose], f"`{value!r}`", "all" if since == "0.16" else since)
        for whose, name, value, since in carried("megatron")
    )
    return _table(("setting", "of", "supported", "versions"), rows)


def megatron_lm_table() -> str:
    """Arguments of Megatron-LM's scripts."""
    rows = (
        (f"`--{name.replace('_', '-')}`", " or ".join(f"`{one!r}`" for one in _each(value)))
        for name, value in carried("megatron_lm")
    )
    return _table(("argument", "supported"), rows)


def deepspeed_table() -> str:
    """Keys of a DeepSpeed configuration."""
    rows = (
        (f"`{key}`", f"`{value!r}`", advice) for key, value, advice in carried("deepspeed/compat")
    )
    return _table(("key", "supported", "what to do"), rows)


def _each(value: object) -> tuple[object, ...]:
    return value if isinstance(value, tuple) else (value,)


def _table(titles: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    lines = [titles, ("---",) * len(titles), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
