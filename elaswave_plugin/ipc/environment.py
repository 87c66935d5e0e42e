"""The environment of agents and trainers, and the program of a job (standard library)."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass

from elaswave_plugin.errors import ConfigurationError

AGENT = "ELASWAVE_AGENT"
"""Where the agent of a trainer's node answers, "host:port", and by a Unix socket beside it."""
JOB_SECRET_FD = "ELASWAVE_JOB_SECRET_FD"
SNAPSHOT_FDS = "ELASWAVE_SNAPSHOT_FDS"
SLOT = "ELASWAVE_SLOT"
INCARNATION = "ELASWAVE_INCARNATION"
HOST = "ELASWAVE_HOST"
LOOPBACK = "127.0.0.1"
QUIESCE = "quiesce_timeout_s"
# The slots beyond the launch; with torchrun it is set by hand.
RESERVE = "ELASWAVE_RESERVE"


_RUNNER = "elaswave_plugin.trainer.script_run"


def read_reserve(env: Mapping[str, str]) -> int:
    """The slots beyond the launch that an environment tells of; raises ConfigurationError."""
    text = env.get(RESERVE, "0")
    if not text.isdecimal():
        raise ConfigurationError(f"{RESERVE} is {text!r}, wanted a number of workers, 0 or more")
    return int(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The program of a trainer: `python [options] script args`, or `-m script` where `module`."""

    script: str
    args: tuple[str, ...]
    module: bool
    options: tuple[str, ...] = ("-u",)

    def command(self) -> list[str]:
        """The command line for a new interpreter."""
        how = ["-m", self.script] if self.module else [self.script]
        return [sys.executable, *self.options, "-m", _RUNNER, *how, *self.args]
