"""How a job is told its reserve, the slots beyond those of its launch (standard library only)."""

from __future__ import annotations

from collections.abc import Mapping

from elaswave_plugin.errors import ConfigurationError

# What supervisors and trainers are told; with torchrun it is set by hand.
RESERVE = "ELASWAVE_RESERVE"


def read_reserve(env: Mapping[str, str]) -> int:
    """The slots beyond the launch that an environment tells of; raises ConfigurationError."""
    text = env.get(RESERVE, "0")
    if not text.isdecimal():
        raise ConfigurationError(f"{RESERVE} is {text!r}, wanted a number of workers, 0 or more")
    return int(text)
