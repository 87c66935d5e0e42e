"""A survivor of pretrain_gpt.py that runs out of memory holds less, or the job ends once."""

from dataclasses import replace

import pytest

from tests.adapters.megatron_lm.conftest import Launch
from tests.adapters.megatron_lm.harness import ScriptSpec, needs_repository, printed
from tests.faults.harness import check_equal
from tests.faults.test_out_of_memory import IN_STEP, check_ended, check_told, full
from tests.proofs import Kind, Promise, proves

pytestmark = needs_repository

# Layers that moved would leave the survivor fewer, and room for more samples.
PP2 = ("--pipeline-model-parallel-size", "2", "--elaswave-move-layers=never")


@proves(Kind.OUT_OF_MEMORY, Promise.EQUAL, victim="0", moment="3:backward")
def test_the_survivor_of_a_stage_of_megatron_lm(run: Launch, reference: Launch) -> None:
    spec = ScriptSpec(kills=("0@3:backward",))
    spec = replace(spec, options=(*spec.options, *PP2))
    relieved = run(replace(spec, sabotage=full((1,), room=3)))
    undisturbed = reference(spec)
    check_equal(relieved, undisturbed)
    assert printed(relieved) == printed(undisturbed)
    check_told(relieved, times={1: 1})


@proves(Kind.OUT_OF_MEMORY, Promise.STOPS, victim="2", moment="3:backward")
@pytest.mark.slow
def test_a_data_parallel_job_of_megatron_lm_ends_once(run: Launch) -> None:
    spec = ScriptSpec(nproc=3, global_batch=6, kills=("2@3:backward",), sabotage=IN_STEP)
    check_ended(run(spec))
