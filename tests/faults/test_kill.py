"""Any worker, killed in any phase of a step: the survivors finish the run bit for bit."""

from dataclasses import replace

import pytest

from tests.convoys import Convoy, convoys
from tests.faults.conftest import Launch, Reference
from tests.faults.harness import JobSpec, check_equal, check_survived
from tests.faults.matrix import PAIRS
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled

OPTIONS = (
    (),
    ("--calculate-per-token-loss",),
    ("--no-overlap-grad-reduce",),
    ("--recompute-granularity=full",),
    ("--bf16", "--calculate-per-token-loss"),
)


def spec_of(slot: int, phase: str) -> JobSpec:
    """The job that loses a worker once it has made two steps."""
    return JobSpec(kills=(f"{slot}@2:{phase}",))


@proves(Kind.KILL, Promise.EQUAL)
@pytest.mark.parametrize(("slot", "phase"), convoys(PAIRS, spec_of))
def test_kill_in_a_phase_of_a_step_changes_nothing(
    convoy: Convoy, reference: Reference, slot: int, phase: str
) -> None:
    undisturbed = reference(convoy.run.spec)
    convoy.check(undisturbed.trace(), lambda: check_equal(convoy.run, undisturbed))
    in_place = [event["in_place"] for event in convoy.recovered]
    assert in_place
    if phase in ("data", "forward", "backward"):
        assert all(0 < one["weights"] == one["parts"] for one in in_place)
    if phase == "gather":
        assert not any(one["weights"] for one in in_place)


# bf16 has losses per token as well.
@proves(Kind.KILL, Promise.EQUAL, victim="1", moment="2:backward")
@pytest.mark.parametrize(
    "options",
    sampled([(one,) for one in OPTIONS]),
    ids=lambda options: " ".join(options) or "mean",
)
def test_kill_under_a_training_option_changes_nothing(
    run: Launch, reference: Reference, options: tuple[str, ...]
) -> None:
    spec = JobSpec(options=options, kills=("1@2:backward",))
    check_equal(run(spec), reference(spec))


@proves(Kind.KILLS, Promise.EQUAL)
@pytest.mark.parametrize(
    "kills",
    [
        ("0@2:backward", "3@2:backward"),
        ("1@2:forward", "2@2:optimizer"),
        ("3@1:data", "0@3:gather", "2@4:snapshot"),
    ],
    ids=" ".join,
)
def test_several_kills_change_nothing(
    run: Launch, reference: Reference, kills: tuple[str, ...]
) -> None:
    spec = JobSpec(kills=kills)
    check_equal(run(spec), reference(spec))


# Each bucket of these tiny models is exchanged in many parts, the last one smaller.
SLICED = """
from elaswave_plugin.adapters.megatron.sums import reduction
reduction.SLICE_ELEMENTS = 999
"""


@proves(Kind.KILLS, Promise.EQUAL, victim="0 2", moment="1:backward 3:reduce")
@pytest.mark.parametrize(
    "options", sampled([(one,) for one in (OPTIONS[0], OPTIONS[2], OPTIONS[4])])
)
def test_sums_in_small_parts_have_the_same_bits(
    run: Launch, reference: Reference, options: tuple[str, ...]
) -> None:
    spec = JobSpec(options=options, kills=("0@1:backward", "2@3:reduce"))
    check_equal(run(replace(spec, sabotage=SLICED)), reference(spec))


RAISE = """
from elaswave_plugin.adapters.megatron.microbatches import Microbatches
consume = Microbatches.consume
def fail(self, step, microbatch, ids):
    if self._worker.slot == 1 and step == 2:
        raise ValueError("a broken sample")
    consume(self, step, microbatch, ids)
Microbatches.consume = fail
"""


@proves(Kind.RAISE, Promise.EQUAL)
def test_exception_in_one_worker_is_the_loss_of_that_worker(
    run: Launch, reference: Reference
) -> None:
    broken = run(JobSpec(sabotage=RAISE, failing=(1,)))
    check_equal(broken, reference(JobSpec()))
    assert "a broken sample" in broken.output
    assert [e["status"] for e in broken.events("worker_exited") if e["slot"] == 1] == [
        "exit code 1"
    ]


@proves(Kind.IN_RECOVERY, Promise.EQUAL, victim="2")
@pytest.mark.parametrize(
    "phase",
    sampled(["detect", "agree", "edit", "move", "rebind", "verify", "replay"]),
)
def test_second_kill_during_a_recovery_changes_nothing(
    run: Launch, reference: Reference, phase: str
) -> None:
    spec = JobSpec(kills=("2@3:backward", f"1@3:{phase}"))
    check_equal(run(spec), reference(spec))


DETERMINISTIC = """
import torch
from megatron.core.transformer import TransformerConfig
torch.use_deterministic_algorithms(True)
check = TransformerConfig.__post_init__
def deterministic(self):
    check(self)
    self.deterministic_mode = True
TransformerConfig.__post_init__ = deterministic
"""


@proves(Kind.KILL, Promise.EQUAL, victim="2", moment="3:backward")
@pytest.mark.slow
def test_kill_in_deterministic_mode_changes_nothing(run: Launch) -> None:
    undisturbed = run(JobSpec(sabotage=DETERMINISTIC))
    killed = run(JobSpec(sabotage=DETERMINISTIC, kills=("2@3:backward",)))
    check_survived(killed)
    assert killed.events("fault_fired") and killed.trace() == undisturbed.trace()
