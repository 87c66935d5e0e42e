"""The comparison can fail: one part of a recovery is broken, and the bits or the losses show it."""

from dataclasses import replace

import pytest

from tests.convoys import Convoy, verdicts
from tests.deepspeed.conftest import Launch, Twin
from tests.deepspeed.harness import FP32_BOUND, EngineSpec, check_recovered
from tests.faults.harness import check_survived, max_relative_difference
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled

ZERO = "from elaswave_plugin.adapters.deepspeed.zero import zero_state as zero"
BROKEN_BITS = {
    # Adam begins to count its steps again.
    "step count": f"{ZERO}; zero.set_applied_steps = lambda *_: None",
    # One second moment a shard is off by its last bits.
    "one element": (
        f"{ZERO}; write = zero.write_moments; "
        "zero.write_moments = lambda i, m, p: (p[1, -1:].mul_(1.0000002), write(i, m, p))"
    ),
    # The schedule goes on where the interrupted step left it.
    "schedule": (
        "from deepspeed.runtime.lr_schedules import WarmupLR; "
        "WarmupLR.load_state_dict = lambda *_: None"
    ),
}
# Each worker's mean counts the same, whatever its share.
EQUAL_WEIGHTS = (
    "from elaswave_plugin.adapters.deepspeed.engine.own_loss import OwnLoss;"
    " OwnLoss.weight = lambda *_: 1.0"
)


@proves(Kind.SABOTAGE, Promise.SEEN, victim="2", moment="3:snapshot")
@pytest.mark.parametrize("stage", sampled([1, 3]))
@pytest.mark.parametrize(
    "sabotage",
    # Verbs that miss a part are seen in one process too (adapters/test_verbs_deepspeed.py).
    [
        pytest.param(sabotage, id=part, marks=() if part == "one element" else pytest.mark.slow)
        for part, sabotage in BROKEN_BITS.items()
    ],
)
def test_a_recovery_that_misses_a_part_is_seen(
    run: Launch, twin: Twin, reference: Launch, stage: int, sabotage: str
) -> None:
    spec = EngineSpec(stage=stage, kills=("2@3:snapshot",), sabotage=sabotage)
    whole = replace(spec, sabotage="")
    broken = run(spec)
    check_survived(broken)
    with pytest.raises(AssertionError):
        check_recovered(broken, twin=twin(whole), reference=reference(whole))


# Adam begins to count its steps again where the third loss leaves one worker.
OF_ONE = f"""
{ZERO}
from elaswave_plugin.recovery.worker import Worker
install = Worker.install_view
def install_and_forget(self, commit):
    install(self, commit)
    if len(self.view.ranks) == 1:
        zero.set_applied_steps = lambda *_: None
Worker.install_view = install_and_forget
"""


@proves(Kind.SABOTAGE, Promise.SEEN, victim="1 0 3", moment="2:forward 3:data 4:snapshot")
def test_the_fault_of_a_convoy_that_breaks_it_is_named(
    run: Launch, twin: Twin, reference: Launch
) -> None:
    spec = EngineSpec(kills=("1@2:forward", "0@3:data", "3@4:snapshot"), sabotage=OF_ONE)
    broken = run(spec)
    check_survived(broken)
    planned = twin(replace(Convoy(broken, ()).planned, sabotage=""))
    whole = reference(replace(spec, sabotage=""))
    found = verdicts(
        broken,
        lambda one: one.check(
            planned.trace(), lambda: check_recovered(broken, twin=planned, reference=whole)
        ),
    )
    assert found == ["passes", "passes", "fails"]


@proves(Kind.SABOTAGE, Promise.SEEN, victim="2", moment="3:backward")
def test_equal_weights_of_unequal_shares_are_seen(run: Launch, reference: Launch) -> None:
    spec = EngineSpec(stage=2, kills=("2@3:backward",), sabotage=EQUAL_WEIGHTS)
    broken = run(spec)
    check_survived(broken)
    assert max_relative_difference(broken, reference(replace(spec, sabotage=""))) > FP32_BOUND


@proves(Kind.SABOTAGE, Promise.SEEN, victim="2", moment="99:backward")
def test_a_missing_kill_is_seen(run: Launch, twin: Twin, reference: Launch) -> None:
    spec = EngineSpec(kills=("2@99:backward",))
    late = run(spec)
    with pytest.raises(AssertionError, match="'fired': False"):
        check_recovered(late, twin=reference(spec), reference=reference(spec))
