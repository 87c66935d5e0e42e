"""A worker that hangs is found and lost: equal to its planned departure, close to no loss."""

import pytest

from tests.deepspeed.conftest import Launch, Twin
from tests.deepspeed.harness import EngineSpec, check_recovered
from tests.faults.harness import hang_of
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled

CASES = [(1, "2@4:forward:loop"), (3, "0@4:backward:gil"), (3, "1@4:data:stop")]


@proves(Kind.HANG, Promise.PLANNED)
@pytest.mark.parametrize(("stage", "hang"), sampled(CASES, share=1))
def test_a_hang_equals_the_planned_departure(
    run: Launch, twin: Twin, reference: Launch, stage: int, hang: str
) -> None:
    spec = EngineSpec(stage=stage, kills=(hang,))
    hung = run(spec)
    check_recovered(hung, twin=twin(hung), reference=reference(spec))
    assert hang_of(hung)["phase"] == hang.split(":")[1]
