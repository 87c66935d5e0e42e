"""Requests to end a job: signal, phase and launcher, and what becomes of the job.

The table of docs/operations.md is written from these cases, and `test_told.py` runs each.
"""

from enum import StrEnum
from typing import NamedTuple


class Becomes(StrEnum):
    """The end of the job, or none."""

    SAVED = "all leave after one last checkpoint"
    LEFT = "all leave, nothing is saved"
    UNHEARD = "nobody hears it"
    KILLED = "the launcher and all workers end, nothing is saved"


class Case(NamedTuple):
    """``told``: a signal's name, a file, or `elaswave drain`; ``phase``: where worker 0 is then."""

    told: str
    phase: str
    launcher: str
    loop: str
    becomes: Becomes
    # False where the script has no place for a checkpoint.
    saves: bool = True

    @property
    def name(self) -> str:
        """As pytest shows it."""
        words = (self.told, self.phase, self.launcher, self.loop, "" if self.saves else "no-save")
        return "-".join(word.replace(" ", "_") for word in words if word)


OURS, TORCHRUN, DEEPSPEED = "elaswave run", "torchrun", "deepspeed"
CORE, ENGINE = "Megatron-Core", "DeepSpeed"
# What holds worker 0 there until it is told: see test_told.py.
BETWEEN, FIRST, EVALUATION, SAVE = "in a step", "in the first step", "in an evaluation", "in a save"
BEFORE = "before the first step"
SIGNALS = ("SIGTERM", "SIGUSR1")
# As by Slurm's `--signal` without `B:`.
TO_ALL = "SIGTERM to all processes"
WAYS = (*SIGNALS, "a notice file", "elaswave drain")

CASES = (
    *(
        Case(told, phase, OURS, CORE, Becomes.SAVED)
        for told in WAYS
        for phase in (FIRST, BETWEEN, EVALUATION, SAVE)
    ),
    *(Case(told, BEFORE, OURS, CORE, Becomes.LEFT) for told in WAYS[:3]),
    *(Case(told, BETWEEN, OURS, CORE, Becomes.LEFT, saves=False) for told in WAYS[:3]),
    Case("elaswave drain", BETWEEN, DEEPSPEED, ENGINE, Becomes.SAVED),
    *(Case(TO_ALL, BETWEEN, launcher, ENGINE, Becomes.SAVED) for launcher in (TORCHRUN, DEEPSPEED)),
    *(
        Case(told, BETWEEN, launcher, ENGINE, becomes)
        for launcher, *both in (
            (OURS, Becomes.SAVED, Becomes.SAVED),
            (TORCHRUN, Becomes.SAVED, Becomes.KILLED),
            (DEEPSPEED, Becomes.UNHEARD, Becomes.UNHEARD),
        )
        for told, becomes in zip(SIGNALS, both, strict=True)
    ),
)
