"""Rehearsals of a script without a line of ours."""

import pytest

from tests.faults import own_loop
from tests.faults.harness import JobSpec
from tests.proofs import Kind, Promise, proves
from tests.rehearsal.conftest import Rehearse

OPTIONS = ("--eval-interval=1",)


@proves(Kind.KILL, Promise.EQUAL)
@pytest.mark.parametrize("workers", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_its_loop_is_equal_through_losses_and_returns(rehearse: Rehearse, workers: int) -> None:
    found = rehearse(JobSpec(nproc=workers, steps=20, script=own_loop.__file__, options=OPTIONS))
    assert found.exit_code == 0, found.output
