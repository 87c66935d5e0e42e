"""Rehearsals of DeepSpeed scripts, each compared with the same departures as planned."""

import pytest

from tests.deepspeed.harness import EngineSpec
from tests.proofs import Kind, Promise, proves
from tests.rehearsal.conftest import Rehearse

pytestmark = [pytest.mark.timeout(540), pytest.mark.slow]


@proves(Kind.KILLS, Promise.PLANNED)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_example_is_equal(rehearse_engine: Rehearse, stage: int) -> None:
    """In ZeRO 0 a survivor completes a step that the others begin again without the lost one."""
    spec = EngineSpec(nproc=3, steps=20, global_batch=6, stage=stage)
    found = rehearse_engine(spec, runs=("losses", "returns"))
    assert found.exit_code == 0, found.output
    assert all(kill["fired"] for run in found.verdict["runs"] for kill in run["kills"])
    compared = {run["compared_with"] for run in found.verdict["runs"]}
    assert compared == {"the same changes as planned"}
