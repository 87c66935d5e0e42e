"""A worker that comes back runs the script of a Trainer as written, whatever it finds by now."""

from dataclasses import replace
from typing import Any

import pytest

from tests.deepspeed.conftest import Launch
from tests.deepspeed.harness import FP32_BOUND
from tests.deepspeed.hf_runs import check_newcomer, spec_of
from tests.faults.harness import check_survived, max_relative_difference
from tests.faults.test_join import entered
from tests.proofs import Kind, Promise, proves

BACK: dict[str, Any] = {"respawn": 5, "changes": ("+1@5",)}


def check_back(run: Launch, reference: Launch, spec: Any) -> None:
    """Worker 1 goes on with the others from step 5 on, in their place in the data."""
    undisturbed = reference(replace(spec, options=spec.options[:-1]))
    survived = run(spec)
    check_survived(survived)
    assert entered(survived) == [(1, 1)]
    assert max_relative_difference(survived, undisturbed) <= FP32_BOUND
    check_newcomer(survived, undisturbed, first=5)


@proves(Kind.RETURN, Promise.CLOSE, victim="1", moment="2:backward")
def test_it_finds_checkpoints_of_its_own_job(run: Launch, reference: Launch) -> None:
    """`resume_from_checkpoint=True if get_last_checkpoint(...)`; the oldest are gone by then."""
    options = ("--evaluate=2", "--save=1", "--resume=last")
    spec = spec_of("1@2:backward", nproc=3, global_batch=6, steps=8, options=options, **BACK)
    check_back(run, reference, spec)


@pytest.mark.slow
@proves(Kind.RETURN, Promise.CLOSE, victim="1", moment="2:backward")
def test_it_finds_them_in_a_later_epoch(run: Launch, reference: Launch) -> None:
    options = ("--save=1", "--limit=12", "--resume=last")
    spec = spec_of("1@2:backward", nproc=3, global_batch=6, steps=8, options=options, **BACK)
    check_back(run, reference, spec)


@proves(Kind.RETURN, Promise.CLOSE, victim="1", moment="2:backward")
def test_it_comes_back_with_use_cpu(run: Launch, reference: Launch) -> None:
    """Accelerate makes the group by itself then, before DeepSpeed is asked."""
    spec = spec_of("1@2:backward", nproc=3, global_batch=6, steps=8, options=("--use-cpu",), **BACK)
    check_back(run, reference, spec)
