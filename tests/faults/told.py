"""Requests to end a job: signal, phase and launcher, and what becomes of the job.

The table of docs/operations.md is written from these cases. `test_told.py` runs each, those of
Slurm `tests/schedulers/test_told_by_slurm.py`.
"""

import itertools
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import NamedTuple


class Becomes(StrEnum):
    """The end of the job, or none."""

    SAVED = "one last checkpoint, all leave"
    LEFT = "all leave, nothing saved"
    UNHEARD = "nobody hears it"
    KILLED = "all are killed, nothing saved"
    STAYS = "all but one leave"


class Case(NamedTuple):
    """``told``: a signal's name, a file, a command; ``phase``: what worker 0 is in then."""

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
CORE, ENGINE, TRAINER = "Megatron-Core", "DeepSpeed", "a Trainer"
JIT = "enable_jit_checkpoint"
# What holds worker 0 there until it is told: see test_told.py.
BETWEEN, FIRST, EVALUATION, SAVE = "a step", "the first step", "an evaluation", "a save"
# Of the first step.
BEFORE, COMPILING = "no step yet", "a compilation"
# Batch scripts of Slurm's, whose last line this is.
SRUN, BATCH = "sbatch: exec srun elaswave run", "sbatch: exec elaswave run"
TASKS = "sbatch: exec srun python -m elaswave_plugin.run"
SIGNALS = ("SIGTERM", "SIGUSR1")
# As systemd does, and most schedulers.
TO_ALL = "SIGTERM to all"
NOTICE, DRAIN = "a notice file", "elaswave drain"
WAYS = (*SIGNALS, NOTICE, DRAIN)


def pairwise(*factors: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Choose of all combinations so many that any two values of two factors come together."""
    rest = list(itertools.product(*factors))
    pairs = [set(itertools.combinations(enumerate(one), 2)) for one in rest]
    left = set().union(*pairs)
    while left:
        best = max(range(len(rest)), key=lambda place: len(pairs[place] & left))
        left -= pairs[best]
        yield rest[best]


def of_trainer(told: str, phase: str, launcher: str, loop: str) -> Case:
    """The case of a Trainer, which has a place for a checkpoint by its own setting only."""
    saves = loop == JIT
    becomes = Becomes.SAVED if saves and phase != BEFORE else Becomes.LEFT
    if told == DRAIN and not saves:
        becomes = Becomes.STAYS
    if launcher == TORCHRUN and told == "SIGUSR1":
        becomes = Becomes.KILLED
    if launcher == DEEPSPEED and told in SIGNALS:
        becomes = Becomes.UNHEARD
    return Case(told, phase, launcher, loop, becomes, saves)


# Beyond the pairs, under `elaswave run`: a signal that a trainer's own handler may take (to all),
# and requests that agents make, in each phase that they meet in another way.
OF_TRAINERS = (
    *(
        of_trainer(told, phase, OURS, JIT)
        for told, phases in {
            "SIGTERM": (COMPILING, BETWEEN, EVALUATION),
            "SIGUSR1": (BEFORE, SAVE),
            TO_ALL: (BEFORE, COMPILING, BETWEEN, SAVE),
            NOTICE: (BEFORE, COMPILING, BETWEEN, EVALUATION, SAVE),
            DRAIN: (FIRST, COMPILING, BETWEEN, EVALUATION, SAVE),
        }.items()
        for phase in phases
    ),
    *(
        of_trainer(told, phase, OURS, TRAINER)
        for told, phases in {
            "SIGTERM": (FIRST, SAVE),
            TO_ALL: (BEFORE, SAVE),
            NOTICE: (COMPILING, BETWEEN, SAVE),
            DRAIN: (COMPILING, BETWEEN, EVALUATION, SAVE),
        }.items()
        for phase in phases
    ),
)

CASES = (
    *(
        Case(told, phase, OURS, CORE, Becomes.SAVED)
        for told in WAYS
        for phase in (FIRST, COMPILING, BETWEEN, EVALUATION, SAVE)
    ),
    Case(TO_ALL, COMPILING, OURS, CORE, Becomes.SAVED),
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
    *itertools.starmap(
        of_trainer,
        pairwise(
            (*SIGNALS, TO_ALL),
            (BEFORE, FIRST, COMPILING, BETWEEN, EVALUATION, SAVE),
            (OURS, TORCHRUN, DEEPSPEED),
            (JIT, TRAINER),
        ),
    ),
    *OF_TRAINERS,
)

# `scancel --signal` is what `#SBATCH --signal` does, now; with `--batch` as with `B:`.
SLURM_CASES = tuple(
    Case(told, BETWEEN, launcher, CORE, becomes)
    for launcher, told, becomes in (
        (SRUN, "scancel", Becomes.SAVED),
        (SRUN, "scancel --signal=TERM", Becomes.SAVED),
        (SRUN, "scancel --signal=USR1", Becomes.SAVED),
        (SRUN, "#SBATCH --signal=TERM@S", Becomes.SAVED),
        (SRUN, "scancel --batch --signal=USR1", Becomes.SAVED),
        (SRUN, "scancel --batch --signal=TERM", Becomes.KILLED),
        (BATCH, "scancel", Becomes.SAVED),
        (BATCH, "scancel --batch --signal=TERM", Becomes.SAVED),
        (BATCH, "scancel --batch --signal=USR1", Becomes.SAVED),
        (BATCH, "#SBATCH --signal=B:TERM@S", Becomes.SAVED),
        (BATCH, "scancel --signal=TERM", Becomes.UNHEARD),
        (TASKS, "scancel", Becomes.SAVED),
    )
) + tuple(
    Case(told, BETWEEN, launcher, loop, becomes, loop == JIT)
    for launcher, told, loop, becomes in (
        (SRUN, "scancel", JIT, Becomes.SAVED),
        (SRUN, "scancel --signal=USR1", JIT, Becomes.SAVED),
        (SRUN, "#SBATCH --signal=TERM@S", JIT, Becomes.SAVED),
        (BATCH, "#SBATCH --signal=B:TERM@S", JIT, Becomes.SAVED),
        (TASKS, "scancel", JIT, Becomes.SAVED),
        (SRUN, "scancel", TRAINER, Becomes.LEFT),
        (BATCH, "scancel --batch --signal=USR1", TRAINER, Becomes.LEFT),
    )
)
