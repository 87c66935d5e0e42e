"""A DeepSpeed script in the shipped array job: it loses a node, and is whole again without a hand.

The workers come back before a planned step, which makes a twin: see `tests/deepspeed/test_join.py`.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.deepspeed.conftest import Launch, Twin
from tests.deepspeed.conftest import twin as twin
from tests.deepspeed.harness import EngineSpec, check_recovered
from tests.deepspeed.test_join import entered, sizes
from tests.proofs import Kind, Promise, proves
from tests.schedulers.batch import JOB_S, hold, submit_shipped
from tests.schedulers.slurm import OVER, Slurm
from tests.schedulers.test_array import tasks_of

pytestmark = pytest.mark.timeout(400)
LOST, BACK, STEPS = 6, 10, 14
SLOTS = (2, 3)


@proves(Kind.NODE_RETURN, Promise.PLANNED)
@pytest.mark.slow  # beside the same with Megatron-Core, in tests/schedulers/test_array.py
def test_slurm_brings_a_lost_node_of_an_engine_back(
    slurm: Slurm, tmp_path: Path, twin: Twin, reference: Launch
) -> None:
    spec = EngineSpec(
        nodes=2,
        stage=2,
        steps=STEPS,
        respawn=5,
        changes=tuple(f"+{slot}@{BACK}" for slot in SLOTS),
        dump="last",
    )
    go_on, back = tmp_path / "go_on", tmp_path / "back"
    job = submit_shipped(
        slurm,
        "array.sbatch",
        spec,
        "--array=0-1",
        data=tmp_path,
        folder=tmp_path,
        before=hold({LOST: go_on, BACK - 1: back}),
    )
    job.wait(lambda: job.step == LOST - 1, f"step {LOST - 1}")
    task, other = tasks_of(job)
    lost = slurm.shown(task)["NodeList"]
    slurm.lose_node(lost)
    try:
        go_on.touch()
        job.wait_for_workers_back(2)
        back.touch()
        for one in (task, other):
            assert slurm.wait_for(one, *OVER, limit_s=JOB_S) == "COMPLETED"
        assert slurm.shown(task)["Restarts"] == "1"
    finally:
        slurm.bring_back(lost)
    run = job.outcome()
    lost_before = min(event["restored_step"] for event in run.events("recovered"))
    assert LOST - 1 <= lost_before < BACK
    undisturbed = replace(spec, nodes=1)
    leaving = replace(undisturbed, kills=tuple(f"{slot}@{lost_before}" for slot in SLOTS))
    check_recovered(run, twin=twin(leaving), reference=reference(undisturbed))
    assert sorted(entered(run)) == [(slot, 1, BACK) for slot in SLOTS]
    # Before that step they may come one after the other.
    assert sizes(run)[:2] == [4, 2] and sizes(run)[-1] == 4
