"""fp16 with a loss scale that adapts: a lost worker changes nothing in which steps are skipped.

Which steps overflow follows from the scale, which halves at each one that does and doubles after
two that do not: a scaler whose state was not that of the step would skip others.
"""

from dataclasses import replace
from itertools import pairwise

import pytest

from tests.faults.conftest import Launch, Reference
from tests.faults.harness import JobSpec, Outcome, check_equal, check_survived
from tests.faults.hybrid_matrix import PP2_DP2, TP2_PP2_DP2
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled

FP16 = (
    "--fp16",
    f"--initial-loss-scale={2**20}",
    "--loss-scale-window=2",
    "--hysteresis=1",
)
DP4 = JobSpec(steps=9, options=FP16)
TP2_DP2 = replace(DP4, options=(*FP16, "--tensor-model-parallel-size=2", "--sequence-parallel"))


def in_fp16(spec: JobSpec, *options: str) -> JobSpec:
    return replace(spec, steps=9, options=(*spec.options, *FP16, *options))


def skipped(run: Outcome) -> list[int]:
    """Steps that left the state as it was; the first one is told by the norm that it lacks."""
    steps = sorted(run.trace().items())
    same = [step for (_, before), (step, after) in pairwise(steps) if before[2] == after[2]]
    lacks_norm = [step for step, (_, norm, _) in steps if float.fromhex(norm) == 0.0]
    assert [step for step in lacks_norm if step > 0] == same
    return lacks_norm


@proves(Kind.KILL, Promise.EQUAL)
@pytest.mark.parametrize(
    ("base", "kill"),
    sampled(
        [
            # Of a TP group, whose other worker is free: its scaler follows the others.
            (TP2_DP2, "1@4:backward"),
            (DP4, "0@4:optimizer"),
            (DP4, "3@5:reduce"),
            # Long enough for another overflow behind it, with whatever text.
            (replace(DP4, steps=12), "2@6:forward"),
            (in_fp16(PP2_DP2), "1@4:backward"),
            # Sums over tokens are larger than means, and overflow at a lower scale.
            (in_fp16(TP2_PP2_DP2, f"--initial-loss-scale={2**15}"), "6@4:backward"),
        ]
    ),
)
def test_overflow_steps_before_and_after_a_loss(
    run: Launch, reference: Reference, base: JobSpec, kill: str
) -> None:
    survived = run(replace(base, kills=(kill,)))
    check_equal(survived, reference(base))
    at = int(kill[2])
    steps = skipped(survived)
    assert min(steps) < at <= max(steps) and len(steps) < base.steps


FORGET_THE_SCALE = """
from elaswave_plugin.adapters.megatron.framework import MegatronFramework
write = MegatronFramework.write_capsule
def forget(self, capsule):
    scale = self._distributed.grad_scaler.state_dict()
    write(self, capsule)
    self._distributed.grad_scaler.load_state_dict({**scale, "scale": scale["scale"] * 2**10})
MegatronFramework.write_capsule = forget
"""


@proves(Kind.SABOTAGE, Promise.SEEN, victim="3", moment="4:backward")
@pytest.mark.slow
def test_with_another_loss_scale_other_steps_are_skipped(run: Launch, reference: Reference) -> None:
    """A negative control: the scaler's state is part of what is compared."""
    survived = run(replace(DP4, kills=("3@4:backward",), sabotage=FORGET_THE_SCALE))
    check_survived(survived)
    assert skipped(survived) != skipped(reference(DP4))
