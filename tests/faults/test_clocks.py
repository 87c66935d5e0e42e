"""Clocks of the stages change after a loss in the running processes, and steps get shorter."""

from dataclasses import replace

import pytest

from tests.faults.conftest import Launch, Reference
from tests.faults.harness import JobSpec, Outcome, check_equal, check_survived
from tests.faults.test_layer_moves import PP2
from tests.proofs import Kind, Promise, proves

LOSS_STEP = 1
KILL = f"1@{LOSS_STEP}:backward"
LAYER_S = 0.02
# Tensors that take next to no time of the processors, which all workers share.
TINY = ("--hidden-size=16", "--num-attention-heads=1", "--seq-length=16")
SPEC = replace(PP2, steps=6, options=(*PP2.options, *TINY, "--elaswave-move-layers=never"))
EMULATED = """
from benchmarks.emulated_compute import slow_down
slow_down({layer_s})
"""


def fastest_s(run: Outcome) -> float:
    """The shortest step after the loss, as its slowest worker had it."""
    slowest: dict[int, float] = {}
    for line in run.files.steps:
        slowest[line["step"]] = max(line["step_s"], slowest.get(line["step"], 0.0))
    return min(slowest[step] for step in range(LOSS_STEP + 1, SPEC.steps))


def with_clocks(layer_s: float) -> JobSpec:
    """Slot 1 is lost: stage 0 has one worker left, stage 1 two."""
    options = (*SPEC.options, "--elaswave-clocks=emulated", "--elaswave-clock-table=0.8 1 1.3")
    emulated = EMULATED.format(layer_s=layer_s)
    return replace(SPEC, kills=(KILL,), options=options, sabotage=emulated)


@proves(Kind.KILL, Promise.EQUAL)
def test_the_narrow_stage_runs_at_a_higher_clock(run: Launch, reference: Reference) -> None:
    survived = run(with_clocks(0.001))
    check_equal(survived, reference(SPEC))
    set_to = {event["slot"]: event["clock"] for event in survived.events("clock_set")}
    assert set_to == {0: 1.3, 2: 0.8, 3: 0.8}
    assert all(event["clocks"] == [1.3, 0.8] for event in survived.events("recovered"))


@proves(Kind.KILL, Promise.SHORTER)
@pytest.mark.slow
def test_steps_are_shorter_at_these_clocks(run: Launch) -> None:
    fast = run(with_clocks(LAYER_S))
    # The same device at the clock of the launch: it takes the share of the highest clock longer.
    plain = run(replace(SPEC, kills=(KILL,), sabotage=EMULATED.format(layer_s=1.3 * LAYER_S)))
    for one in (fast, plain):
        check_survived(one)
    assert fast.trace() == plain.trace()
    ratio = fastest_s(fast) / fastest_s(plain)
    print(f"step with clocks / without, after the loss: {ratio:.3f}")
    # 0.83 of the compute; messages, the optimizer and what shares the processors are not faster.
    assert ratio < 0.95
