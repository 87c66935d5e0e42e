"""The environment of supervisors and trainers: names, and the reserve (standard library only)."""

from __future__ import annotations

from collections.abc import Mapping

from elaswave_plugin.errors import ConfigurationError

CONTROL_FD = "ELASWAVE_CONTROL_FD"
SNAPSHOT_FDS = "ELASWAVE_SNAPSHOT_FDS"
SLOT = "ELASWAVE_SLOT"
INCARNATION = "ELASWAVE_INCARNATION"
HOST = "ELASWAVE_HOST"
LOOPBACK = "127.0.0.1"
QUIESCE = "quiesce_timeout_s"
# The slots beyond the launch; with torchrun it is set by hand.
RESERVE = "ELASWAVE_RESERVE"


def read_reserve(env: Mapping[str, str]) -> int:
    """The slots beyond the launch that an environment tells of; raises ConfigurationError."""
    text = env.get(RESERVE, "0")
    if not text.isdecimal():
        raise ConfigurationError(f"{RESERVE} is {text!r}, wanted a number of workers, 0 or more")
    return int(text)


def variable(name: str) -> str:
    """Name the environment variable of an option, as ELASWAVE_NOTICE_TIMEOUT_S."""
    return f"ELASWAVE_{name.upper()}"
