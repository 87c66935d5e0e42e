"""A cyclic order in later passes of the data: lost workers, and resumes from a checkpoint."""

from dataclasses import replace

import pytest

from tests.adapters.megatron_lm.conftest import Launch
from tests.adapters.megatron_lm.harness import ScriptSpec, needs_repository
from tests.faults.harness import check_equal, check_survived
from tests.proofs import Kind, Promise, proves

pytestmark = needs_repository

# The training data ends behind two and a half steps.
SHORT = """
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
native = BlendedMegatronDatasetBuilder.build
def build(self):
    train, *others = native(self)
    return torch.utils.data.Subset(train, range(22)), *others
BlendedMegatronDatasetBuilder.build = build
"""
SPEC = ScriptSpec(
    options=(*ScriptSpec().options, "--dataloader-type", "cyclic"), sabotage=SHORT, steps=7
)
# A pass is a step, of 6 of 10 samples; the first replica alone has samples for two.
UNEVEN = replace(
    SPEC,
    options=(*SPEC.options, "--no-data-sharding", "--micro-batch-size", "2"),
    sabotage=SHORT.replace("22", "10"),
    nproc=3,
    global_batch=6,
)


@proves(Kind.KILL, Promise.EQUAL, victim="1", moment="4:backward")
def test_a_loss_in_the_second_pass(run: Launch, reference: Launch) -> None:
    check_survived(reference(SPEC))
    check_equal(run(replace(SPEC, kills=("1@4:backward",))), reference(SPEC))


@proves(Kind.KILL, Promise.EQUAL, victim="0", moment="3:backward")
def test_a_loss_of_the_replica_that_has_samples_for_one_batch_more(
    run: Launch, reference: Launch
) -> None:
    killed = run(replace(UNEVEN, kills=("0@3:backward",)))
    check_survived(killed)
    check_equal(killed, reference(UNEVEN))
    assert "data_sharding is False: a pass over the data ends for all" in killed.output


@proves(Kind.NOTHING, Promise.SAME)
@pytest.mark.parametrize(("spec", "done"), [(SPEC, 3), (SPEC, 5), (UNEVEN, 3)])
def test_a_resume_in_a_later_pass_goes_on_there(
    run: Launch, reference: Launch, spec: ScriptSpec, done: int
) -> None:
    """In the middle of the second pass, and where one begins."""
    place = f"{{data}}/passes-{spec.nproc}-{done}"
    saving = ("--save", place, "--save-interval", "9", "--exit-interval", str(done))
    saved = run(replace(spec, options=(*spec.options, *saving)))
    assert sorted(saved.trace()) == [*range(done)], saved.output[-4000:]
    resumed = run(replace(spec, options=(*spec.options, "--load", place)))
    assert resumed.returncode == 0, resumed.output[-4000:]
    later = {step: bits for step, bits in reference(spec).trace().items() if step >= done}
    assert resumed.trace() == later
    assert "samples: 0 lost, 0 repeated" in resumed.output
