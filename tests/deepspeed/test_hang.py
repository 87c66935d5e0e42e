"""A worker that hangs is found and lost: equal to its planned departure, close to no loss."""

from dataclasses import replace

import pytest

from elaswave_plugin.config import ElasticConfig
from tests.deepspeed.conftest import Launch, Twin
from tests.deepspeed.harness import FP32_BOUND, SCRIPTS, EngineSpec, check_recovered
from tests.faults.harness import check_survived, hang_of, max_relative_difference
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled

# A loop in the eighth pass of a worker's evaluations, between two of its layers.
IN_A_PASS = """
import os
from elaswave_plugin.recovery.phases import Phases
begin, passes = Phases.begin_pass, []
def hang(self):
    begin(self)
    passes.append(self.step)
    if self._slot == 1 and len(passes) == 8:
        self._events.emit(
            "fault_fired", slot=1, step=self.step, phase="evaluation", pid=os.getpid(), at_s=0.0
        )
        while True:
            pass
Phases.begin_pass = hang
"""
EVALUATING = str(SCRIPTS / "evaluating.py")
CASES = [(1, "2@4:forward:loop"), (3, "0@4:backward:gil"), (3, "1@4:data:stop")]


@proves(Kind.HANG, Promise.PLANNED)
@pytest.mark.parametrize(("stage", "hang"), sampled(CASES))
def test_a_hang_equals_the_planned_departure(
    run: Launch, twin: Twin, reference: Launch, stage: int, hang: str
) -> None:
    spec = EngineSpec(stage=stage, kills=(hang,))
    hung = run(spec)
    check_recovered(hung, twin=twin(hung), reference=reference(spec))
    assert hang_of(hung)["phase"] == hang.split(":")[1]


@proves(Kind.HANG, Promise.CLOSE)
@pytest.mark.parametrize("stage", sampled([1, 3]))
def test_a_hang_in_a_pass_of_an_evaluation_is_found(
    run: Launch, reference: Launch, stage: int
) -> None:
    spec = EngineSpec(script=EVALUATING, stage=stage, options=("--passes=3",))
    hung = run(replace(spec, sabotage=IN_A_PASS))
    check_survived(hung)
    assert len(hung.events("fault_fired")) == 1
    (found,) = hung.events("hang_found")
    assert (found["slot"], found["phase"]) == (1, "evaluation")
    assert found["limit_s"] == ElasticConfig().hang_timeout_s
    assert max_relative_difference(hung, reference(spec)) <= FP32_BOUND
