"""Megatron's fault matrix: every slot x every phase x options; `tests/matrix.py` runs it."""

import itertools
import sysconfig
from pathlib import Path

from elaswave_plugin.config import STEP_PHASES
from elaswave_plugin.demo.text import find_text, write_dataset
from tests.fault_matrix import FaultMatrix, Runs
from tests.faults.harness import PRELOAD, JobSpec, Outcome, check_equal
from tests.proofs import Promise

RECOVERY_PHASES = ("detect", "agree", "edit", "move", "rebind", "verify", "replay")
OPTIONS = (
    (),
    ("--calculate-per-token-loss",),
    ("--recompute-granularity=full",),
    ("--bf16", "--calculate-per-token-loss"),
    ("--no-overlap-grad-reduce",),
)
SLOTS = range(4)
# Each worker in each phase of a step, in one job of the smallest kind.
PAIRS = tuple(itertools.product(SLOTS, STEP_PHASES))
# The steps of kills that are not those of the plain cases.
OTHER_STEPS = (1, 2, 4)


def cases() -> tuple[JobSpec, ...]:
    """Every case of the matrix, in order."""
    single = [
        JobSpec(
            kills=(f"{slot}@{OTHER_STEPS[(slot + index) % len(OTHER_STEPS)]}:{phase}",),
            options=OPTIONS[(slot + index) % len(OPTIONS)],
        )
        for slot, (index, phase) in itertools.product(SLOTS, enumerate(STEP_PHASES))
    ]
    plain = [JobSpec(kills=(f"{slot}@3:{phase}",)) for slot, phase in PAIRS]
    pairs = [
        JobSpec(kills=(f"{first}@2:{phase}", f"{second}@2:{other}"))
        for (first, second), (phase, other) in zip(
            itertools.permutations(SLOTS, 2),
            itertools.cycle(itertools.permutations(STEP_PHASES, 2)),
            strict=False,
        )
    ]
    during = [
        JobSpec(kills=(f"{first}@3:backward", f"{(first + 1) % 4}@3:{phase}"))
        for first, phase in itertools.product((0, 2), RECOVERY_PHASES)
    ]
    outside = [
        JobSpec(options=("--eval-interval=2",), kills=(f"{slot}@4:evaluation",)) for slot in SLOTS
    ]
    wide = [
        JobSpec(nproc=8, steps=4, kills=(f"{first}@1:{phase}", f"{7 - first}@2:{phase}"))
        for first, phase in zip(range(4), STEP_PHASES, strict=False)
    ]
    return (*plain, *single, *pairs, *during, *outside, *wide)


def check(run: Outcome, runs: Runs) -> None:
    """Bit-equal to the run that nothing disturbs."""
    check_equal(run, runs.reference(run.spec))


def write_text(data: Path) -> None:
    """The dataset of all runs."""
    write_dataset(find_text(Path(sysconfig.get_path("stdlib")) / "json"), data / "text")


MATRIX = FaultMatrix(
    framework="megatron",
    cases=cases(),
    fields=("nproc", "kills", "options"),
    preload=PRELOAD,
    promise=lambda spec: Promise.EQUAL,
    check=check,
    prepare=write_text,
)
