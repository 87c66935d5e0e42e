"""Losses of a loop that the script owns: what the model returns, or the section says of them."""

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("transformers")

from elaswave_plugin.observer.observer import losses_of
from tests.deepspeed.conftest import Launch, Twin
from tests.deepspeed.harness import FP32_BOUND, SCRIPTS, EngineSpec, check_recovered
from tests.faults.harness import max_relative_difference
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled

OUTSIDE = "the script computes its loss outside of the model"
MIXED = "the script makes its loss of one that the model returns"
TOLD = "the samples of a micro-batch have"


def spec_of(*kills: str, by: str, says: str | None = None, **changes: Any) -> EngineSpec:
    """Samples have 2 to 31 labels, two are in a micro-batch of 16 for four workers."""
    options = (f"--by={by}", *(() if says is None else (f"--says={says}",)))
    given = {"stage": 2, "global_batch": 16, **changes}
    script = str(SCRIPTS / "own_losses.py")
    return EngineSpec(script=script, kills=kills, options=options, **given)


@proves(Kind.KILL, Promise.PLANNED)
@pytest.mark.parametrize(
    ("by", "says", "stage"),
    sampled(
        [
            ("model", None, 2),
            ("model", None, 3),
            ("made", None, 2),
            ("terms", None, 2),
            ("sum", "sum", 1),
            ("sum", "sum", 3),
            ("model", "tokens", 0),
            ("all", "samples", 2),
            ("classes", None, 3),
            ("smooth", None, 1),
        ]
    ),
)
def test_the_losses_are_those_of_the_undisturbed_run(
    run: Launch, twin: Twin, reference: Launch, by: str, says: str | None, stage: int
) -> None:
    batch = 8 if by == "classes" else 16
    spec = spec_of("1@2:backward", by=by, says=says, stage=stage, global_batch=batch)
    killed = run(spec)
    assert killed.returncode == 0, killed.output[-4000:]
    check_recovered(killed, twin=twin(killed), reference=reference(spec))
    assert TOLD not in killed.output


@pytest.mark.slow
@proves(Kind.KILL, Promise.CLOSE)
def test_a_mean_over_labels_outside_of_the_model_is_told(run: Launch, reference: Launch) -> None:
    """It cannot be computed apart for parts of two micro-batches, and is nearer by labels."""
    far = {}
    for says in (None, "tokens"):
        spec = spec_of("1@2:backward", by="labels", says=says)
        killed = run(spec)
        assert killed.returncode == 0, killed.output[-4000:]
        assert (TOLD in killed.output) is (says is None)
        assert ("a mean over labels, which the script computes outside" in killed.output) is bool(
            says
        )
        far[says] = max_relative_difference(killed, reference(spec))
    assert far["tokens"] < 0.05


@proves(Kind.KILL, Promise.PLANNED)
def test_a_worker_that_comes_back_asks_for_a_kind_with_the_others(
    run: Launch, twin: Twin, reference: Launch
) -> None:
    """In step 8 kinds are asked for that are unknown; this loss is outside of the model."""
    spec = spec_of(
        "1@2:backward", by="sum", says="sum", steps=10, respawn=5, changes=("+1@6",), stage=3
    )
    killed = run(spec)
    assert killed.returncode == 0, killed.output[-4000:]
    check_recovered(killed, twin=twin(killed), reference=reference(spec))
    assert [one["step"] for one in killed.events("entered")] == [6]
    assert "exit code" not in killed.output, killed.output[-4000:]


@pytest.mark.slow
@proves(Kind.KILL, Promise.CLOSE)
@pytest.mark.parametrize(("by", "told"), [("sum", OUTSIDE), ("added", MIXED)])
def test_a_loss_that_may_be_weighed_wrong_is_told(run: Launch, by: str, told: str) -> None:
    killed = run(spec_of("1@2:backward", by=by))
    assert killed.returncode == 0, killed.output[-4000:]
    assert killed.events("fault_fired") and killed.output.count(told) == 1


@proves(Kind.KILL, Promise.CLOSE)
@pytest.mark.parametrize("says", sampled([None, "tokens"]))
def test_a_loss_that_is_not_finite_is_told_or_weighed_as_declared(
    run: Launch, reference: Launch, says: str | None
) -> None:
    spec = spec_of("1@0:backward", by="model", says=says)
    spec = replace(spec, options=(*spec.options, "--not-finite=0"))
    killed, whole = run(spec), reference(spec)
    assert killed.returncode == 0 and len(killed.events("fault_fired")) == 1
    losses = (
        [one for step, one in losses_of(run.files).items() if step] for run in (killed, whole)
    )
    far = max(abs(one / other - 1) for one, other in zip(*losses, strict=True))
    assert (far < FP32_BOUND) is (says is not None), far
    told = "the loss of step 0 is not finite, so nothing tells"
    assert killed.output.count(told) == (says is None)


@proves(Kind.WRONG_INPUT, Promise.REFUSED)
def test_a_loss_of_pairs_is_refused_in_the_first_step(run: Launch) -> None:
    refused = run(spec_of(by="pairs"))
    assert refused.returncode == 2
    assert "is not made up of those of its parts" in refused.output
    assert not refused.files.steps
