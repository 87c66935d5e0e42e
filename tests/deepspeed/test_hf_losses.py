"""Losses of Trainers by what divides them: after a loss of workers each has another weight."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from elaswave_plugin.observer.observer import losses_of
from tests.deepspeed.conftest import Launch, Twin
from tests.deepspeed.harness import FP32_BOUND, SCRIPTS, EngineSpec, check_recovered
from tests.deepspeed.hf_runs import AUTO, check_tapes, logs
from tests.faults.harness import Outcome
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled


def spec_of(*kills: str, loss: str, options: Sequence[str] = (), **changes: Any) -> EngineSpec:
    """Samples have 2 to 31 labels, two are in a micro-batch."""
    batch = 8 if "--batch-size=1" in options else 16
    given = {"stage": 2, "global_batch": batch, "settings": json.dumps(AUTO), **changes}
    return EngineSpec(
        script=str(SCRIPTS / "hf_losses.py"),
        kills=kills,
        options=(f"--loss={loss}", *options),
        **given,
    )


def check(run: Launch, twin: Twin, reference: Launch, spec: EngineSpec) -> Outcome:
    """The losses after a loss of workers are those of the undisturbed run."""
    killed = run(spec)
    assert killed.returncode == 0, killed.output[-4000:]
    check_recovered(killed, twin=twin(killed), reference=reference(spec))
    check_tapes(killed, reference(spec), survivors=3, pads="--padded" in spec.options)
    return killed


@proves(Kind.KILL, Promise.PLANNED)
@pytest.mark.parametrize(
    ("loss", "options", "stage"),
    sampled(
        [
            ("labels", (), 2),
            ("terms", (), 2),
            ("items", (), 2),
            ("items", ("--own-items",), 2),
            ("samples", (), 2),
            ("label terms", (), 3),
            ("labels", (), 3),
            ("labels", (), 0),
            ("items", ("--own-items",), 3),
            ("items", ("--padded",), 2),
            ("classes", ("--batch-size=1",), 2),
            ("labels", ("--padded",), 3),
        ]
    ),
)
def test_the_losses_are_those_of_the_undisturbed_run(
    run: Launch, twin: Twin, reference: Launch, loss: str, options: Sequence[str], stage: int
) -> None:
    check(run, twin, reference, spec_of("1@2:backward", loss=loss, options=options, stage=stage))


@proves(Kind.KILL, Promise.CLOSE)
def test_what_is_set_before_the_first_pass_of_an_update_stays_set_after_a_loss(
    run: Launch, reference: Launch
) -> None:
    """The update has one micro-batch, the one before had two, and a callback has set a weight."""
    spec = spec_of("1@1:backward", loss="set", options=("--limit=24",), steps=4)
    killed = run(spec)
    assert killed.returncode == 0 and len(killed.events("fault_fired")) == 1
    check_tapes(killed, reference(spec), survivors=3)


@proves(Kind.KILL, Promise.PLANNED)
def test_a_micro_batch_without_a_label_says_nothing_of_the_loss(
    run: Launch, twin: Twin, reference: Launch
) -> None:
    """It is the first one with unequal shares."""
    spec = spec_of("1@2:backward", loss="items")
    served = reference(spec).files.ledger
    items = [item for one in served if (one["step"], one["k"]) == (2, 0) for item in one["items"]]
    assert len(items) == 8
    option = f"--unlabelled={','.join(map(str, items))}"
    check(run, twin, reference, replace(spec, options=(*spec.options, option)))


@proves(Kind.KILL, Promise.CLOSE)
def test_the_kind_of_a_loss_that_is_not_finite_at_first_is_found_later(
    run: Launch, reference: Launch
) -> None:
    """The log has the Trainer's 0 for it, by its filter."""
    spec = spec_of("1@2:backward", loss="labels", options=("--not-finite=0",))
    killed = run(spec)
    assert killed.returncode == 0, killed.output[-4000:]
    assert len(killed.events("fault_fired")) == 1
    check_tapes(killed, reference(spec), survivors=3)
    first, second = [loss for _, _, loss in logs(killed)[:2]]
    assert first == 0.0 and second > 1.0 and "is not finite, so" not in killed.output


@proves(Kind.KILL, Promise.CLOSE)
@pytest.mark.slow
@pytest.mark.parametrize("says", [None, "tokens"])
def test_a_loss_of_unknown_kind_is_weighed_as_declared_where_a_worker_is_lost_in_its_step(
    run: Launch, reference: Launch, says: str | None
) -> None:
    """Nothing else tells the weight of its gradient."""
    options = ("--not-finite=0", *((f"--says={says}",) if says else ()))
    spec = spec_of("1@0:backward", loss="labels", options=options)
    killed, whole = run(spec), reference(spec)
    assert killed.returncode == 0 and len(killed.events("fault_fired")) == 1
    losses = (
        [one for step, one in losses_of(run.files).items() if step] for run in (killed, whole)
    )
    far = max(abs(one / other - 1) for one, other in zip(*losses, strict=True))
    assert (far < FP32_BOUND) is (says is not None), far
    told = killed.output.count("the loss of step 0 is not finite, so nothing tells")
    assert told == (says is None)
    assert ('have the key "loss" of the section "elaswave" say' in killed.output) is (says is None)


@proves(Kind.WRONG_INPUT, Promise.REFUSED)
@pytest.mark.parametrize(
    ("loss", "told", "advice"),
    [
        ("mixed", "with twice the items of a step the loss is", "elaswave_plugin.terms("),
        pytest.param("pairs", "the loss", "elaswave_plugin.terms(", marks=pytest.mark.slow),
        pytest.param(
            "places", "where a batch is padded more", "to one length", marks=pytest.mark.slow
        ),
    ],
)
def test_a_loss_that_no_weight_is_right_for_is_refused_in_the_first_step(
    run: Launch, loss: str, told: str, advice: str
) -> None:
    refused = run(spec_of(loss=loss, options=("--padded",) if loss == "places" else ()))
    assert refused.returncode == 2
    assert told in refused.output and advice in refused.output
    assert not refused.files.steps
