"""Losses that a script reports in the storage which Megatron-Core divides: alike after a loss."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.faults import own_scripts
from tests.faults.conftest import Launch, Reference
from tests.faults.harness import JobSpec, check_equal, losses_of
from tests.faults.hybrid_matrix import PP2_DP2, TP2_PP2_DP2
from tests.faults.test_own_scripts import evaluations
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled

EVALUATES = ("--eval-interval=2", "--eval-iters=2")


def evaluating(spec: JobSpec, **changes: Any) -> JobSpec:
    """A job of some steps and two evaluations, or more."""
    return replace(spec, options=(*spec.options, *EVALUATES), **{"steps": 5, **changes})


LAYOUTS = {
    # Three workers for the four replicas of the launch: 3, 3 and 2 of the 8 micro-batches.
    "dp4": evaluating(JobSpec(), kills=("1@1:backward",)),
    "dp3": evaluating(JobSpec(nproc=3, global_batch=12), kills=("0@1:forward",)),
    "dp4, and back": evaluating(
        JobSpec(), steps=6, kills=("1@1:backward",), respawn=10, awaits=((4, 1),)
    ),
    "pp2 dp2": evaluating(PP2_DP2, kills=("3@1:backward",)),
    "tp2 pp2 dp2": evaluating(TP2_PP2_DP2, kills=("6@1:forward",)),
}
FORMS = {
    # As Megatron-LM's QuickStart.md and run_simple_mcore_train_loop.py have it.
    "itself": 'loss = total / tokens\n    return loss, {"lm loss": loss}',
    "detached": 'loss = total / tokens\n    return loss, {"lm loss": loss.detach()}',
    "a view": 'loss = total / tokens\n    return loss, {"lm loss": loss[None]}',
    "a list": "loss = total / tokens\n    return loss, [loss.detach().view(1)]",
    "a pair": "loss = total / tokens\n    return loss, (loss.detach(), tokens)",
    "three": "return total, tokens.to(torch.int), total.detach()",
    "one element": 'loss = total / tokens\n    return loss, {"lm loss": loss.detach().expand(1)}',
    # In one tensor that the script has for all micro-batches.
    "held": (
        'loss, held = total / tokens, loss_func.__dict__.setdefault("held", torch.zeros(2))\n'
        "    held[0], held[1] = loss.detach(), tokens\n"
        '    return loss, {"lm loss": held}'
    ),
    # As pretrain_gpt.py has it: nothing is shared.
    "a clone": 'loss = total / tokens\n    return loss, {"lm loss": loss.clone().detach()}',
}


@proves(Kind.KILL, Promise.EQUAL)
@pytest.mark.parametrize("layout", sampled(LAYOUTS))
@pytest.mark.parametrize("form", sampled(FORMS))
def test_a_report_keeps_its_value(
    run: Launch, reference: Reference, tmp_path: Path, form: str, layout: str
) -> None:
    """In training and in evaluations, to the bit."""
    script = own_scripts.write(tmp_path, *own_scripts.reports(FORMS[form]))
    spec = replace(LAYOUTS[layout], script=script)
    survived, undisturbed = run(spec), reference(spec)
    check_equal(survived, undisturbed)
    assert len(evaluations(undisturbed)) == spec.steps // 2
    assert evaluations(survived) == evaluations(undisturbed)


@proves(Kind.KILL, Promise.EQUAL, victim="3", moment="1:backward")
@pytest.mark.slow
def test_a_loss_that_a_pipeline_empties(run: Launch, reference: Reference, tmp_path: Path) -> None:
    """Reported as it is, it is finite, and a quarter of what is reported apart from it."""
    frees = "        pipeline_dtype=dtype,\n"
    emptied = (frees, f"{frees}        deallocate_pipeline_outputs=True,\n")
    spec = LAYOUTS["pp2 dp2"]
    losses = []
    for form in ("itself", "a clone"):
        (tmp_path / form).mkdir()
        script = own_scripts.write(tmp_path / form, emptied, *own_scripts.reports(FORMS[form]))
        survived = run(replace(spec, script=script))
        undisturbed = reference(replace(spec, script=script))
        check_equal(survived, undisturbed)
        losses.append([losses_of(undisturbed.files)[step] for step in range(spec.steps)])
    # Of the four micro-batches of a replica each.
    assert losses[1] == [4 * loss for loss in losses[0]]


@proves(Kind.KILL, Promise.EQUAL, victim="1", moment="1:backward")
def test_a_model_and_its_data_in_lists(run: Launch, reference: Reference, tmp_path: Path) -> None:
    """As schedules of pipelines take them: after a loss, too, in steps and evaluations."""
    changes = *own_scripts.LISTS, *own_scripts.reports(FORMS["detached"])
    spec = replace(LAYOUTS["dp4"], script=own_scripts.write(tmp_path, *changes))
    survived, undisturbed = run(spec), reference(spec)
    check_equal(survived, undisturbed)
    assert evaluations(survived) == evaluations(undisturbed)
