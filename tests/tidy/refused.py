"""Lists of what is refused by its setting, by reason, read from the tables that refuse it."""

from collections.abc import Iterable
from typing import Any

from elaswave_plugin.adapters import deepspeed_settings, megatron_lm_settings, megatron_settings
from elaswave_plugin.adapters.answers import Answer

OWNERS = (
    ("ddp", "Of DistributedDataParallelConfig"),
    ("model", "Of TransformerConfig"),
    ("experts", "Of TransformerConfig, in mixtures of experts"),
    ("optimizer", "Of OptimizerConfig"),
)
# The reason of an argument that sets a setting of Megatron-Core.
ABOVE = "as the setting of Megatron-Core"


def megatron_list() -> str:
    """Settings of Megatron-Core, by the class that has them."""
    settings = megatron_settings.settings()
    return "\n\n".join(
        f"{owner}:\n\n"
        + _by_reason(
            (f"{_valued(one.name, one.carried)}{_of_versions(one.since)}", one.says)
            for one in settings
            if one.of == key
        )
        for key, owner in OWNERS
    )


def megatron_lm_list() -> str:
    """Arguments of Megatron-LM's scripts, by the answer to any other value.

    Without those that are a setting of Megatron-Core by their name.
    """
    settings = megatron_lm_settings.settings()
    core = megatron_settings.settings()
    above, named = {one.says for one in core}, {f"--{one.name.replace('_', '-')}" for one in core}
    return "\n\n".join(
        f"Any other value is *{answer}*:\n\n"
        + _by_reason(
            (_valued(one.option, one.carried), ABOVE if one.says in above else one.says)
            for one in settings
            if one.answer == answer and not (one.says in above and one.option in named)
        )
        for answer in Answer
        if any(one.answer == answer for one in settings)
    )


def deepspeed_list() -> str:
    """Keys of a DeepSpeed configuration."""
    rows = (*deepspeed_settings.CARRIED, *deepspeed_settings.EXACT)
    return _by_reason((_valued(key, values), advice) for key, values, advice in rows)


def _valued(name: str, carried: tuple[Any, ...]) -> str:
    values = " or ".join(f"`{one!r}`" for one in carried)
    return f"`{name}={carried[0]!r}`" if len(carried) == 1 else f"`{name}` ({values})"


def _of_versions(since: str) -> str:
    return "" if since == "0.16" else f" ({since})"


def _by_reason(rows: Iterable[tuple[str, str]]) -> str:
    """An item a reason, with all that it is for."""
    found: dict[str, list[str]] = {}
    for name, says in rows:
        found.setdefault(says, []).append(name)
    return "\n".join(f"- {', '.join(names)}: {says}" for says, names in found.items())
