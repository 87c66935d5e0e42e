"""Tables of what is refused by its setting, read from the tables that refuse it."""

from collections.abc import Iterator

from elaswave_plugin.adapters import deepspeed_settings, megatron_lm_settings, megatron_settings
from elaswave_plugin.adapters.answers import Answer, Setting

OWNERS = (
    ("ddp", "DistributedDataParallelConfig"),
    ("model", "TransformerConfig"),
    ("experts", "TransformerConfig, mixtures of experts"),
)


def megatron_table() -> str:
    """Settings of Megatron-Core."""
    rows = (
        (
            f"`{one.name}`",
            dict(OWNERS)[one.of],
            _values(one),
            "all" if one.since == "0.16" else one.since,
            one.says,
        )
        for one in megatron_settings.settings()
    )
    return _table(("setting", "of", "supported", "versions", "why, and what to do"), rows)


def megatron_lm_table() -> str:
    """Arguments of Megatron-LM's scripts, from the best answer to the worst."""
    order = list(Answer)
    settings = sorted(megatron_lm_settings.settings(), key=lambda one: order.index(one.answer))
    rows = ((f"`{one.option}`", _values(one), str(one.answer), one.says) for one in settings)
    return _table(("argument", "carried", "any other value is", "what is done, or to do"), rows)


def deepspeed_table() -> str:
    """Keys of a DeepSpeed configuration."""
    rows = (
        (f"`{key}`", " or ".join(f"`{value!r}`" for value in values), advice)
        for key, values, advice in deepspeed_settings.CARRIED
    )
    return _table(("key", "supported", "what to do"), rows)


def _values(setting: Setting) -> str:
    return " or ".join(f"`{one!r}`" for one in setting.carried)


def _table(titles: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    lines = [titles, ("---",) * len(titles), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
