"""The program that a job trains with (standard library only)."""

from __future__ import annotations

import sys
from dataclasses import dataclass

_RUNNER = "elaswave_plugin.trainer.script_run"


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
