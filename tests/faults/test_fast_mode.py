"""Fast mode: close to the undisturbed run, and bit-equal to the twin that made the same change."""

import math

import pytest

from tests.faults.conftest import Launch, Reference
from tests.faults.harness import JobSpec, check_survived, max_relative_difference
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled


@proves(Kind.KILL, Promise.PLANNED)
@pytest.mark.parametrize("slot", sampled([0, 2]))
# Losses per token, in fast mode: micro-batches that are cut have them in `make test`.
@pytest.mark.parametrize(
    "options",
    sampled([((),), (("--calculate-per-token-loss",),)]),
    ids=["mean", "token"],
)
def test_kill_in_fast_mode_equals_the_planned_departure(
    run: Launch, reference: Reference, slot: int, options: tuple[str, ...]
) -> None:
    killed = run(JobSpec(consistency="fast", options=options, kills=(f"{slot}@3:backward",)))
    twin = run(JobSpec(consistency="fast", options=options, changes=(f"{slot}@3",)))
    check_survived(killed)
    check_survived(twin)
    assert killed.trace() == twin.trace()


@proves(Kind.KILL, Promise.CLOSE, victim="1", moment="2:forward")
def test_kill_in_fast_mode_keeps_the_losses_close(run: Launch, reference: Reference) -> None:
    spec = JobSpec(consistency="fast", kills=("1@2:forward",))
    killed, undisturbed = run(spec), reference(spec)
    check_survived(killed)
    assert max_relative_difference(killed, undisturbed) <= 1e-6
    # Negative control: the sums are really made in another order.
    assert killed.trace() != undisturbed.trace()


@proves(Kind.NOTHING, Promise.CLOSE)
def test_exact_and_fast_mode_agree_while_healthy(reference: Reference) -> None:
    exact, fast = reference(JobSpec()), reference(JobSpec(consistency="fast"))
    assert max_relative_difference(exact, fast) <= 1e-6
    assert not math.isnan(max_relative_difference(exact, fast))
