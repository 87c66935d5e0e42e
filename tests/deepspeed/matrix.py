"""DeepSpeed's fault matrix: ZeRO stage x dtype x slot x phase; `tests/matrix.py` runs it."""

import itertools

from elaswave_plugin.config import STEP_PHASES
from tests.deepspeed.harness import PRELOAD, EngineSpec, as_it_counted, check_recovered
from tests.fault_matrix import FaultMatrix, Runs
from tests.faults.harness import Outcome
from tests.proofs import Promise

KILL_STEP = 3


def cases() -> tuple[EngineSpec, ...]:
    """Every case of the matrix, in order."""
    return tuple(
        EngineSpec(stage=stage, bf16=bf16, kills=(f"{slot}@{KILL_STEP}:{phase}",))
        for stage, bf16, slot, phase in itertools.product(
            (0, 1, 2, 3), (False, True), range(4), STEP_PHASES
        )
    )


def check(run: Outcome, runs: Runs) -> None:
    """Bit-equal to the planned departure, and close to the run that nothing disturbs."""
    check_recovered(run, twin=runs.twin(as_it_counted(run)), reference=runs.reference(run.spec))


MATRIX = FaultMatrix(
    framework="deepspeed",
    cases=cases(),
    fields=("stage", "bf16", "kills"),
    preload=PRELOAD,
    promise=lambda spec: Promise.PLANNED,
    check=check,
)
