"""W&B offline, for real: each step of a job is in one of its owners' files, once."""

import pytest

from tests.faults.conftest import Launch
from tests.faults.harness import JobSpec, check_survived
from tests.proofs import Kind, Promise, proves
from tests.tracking.wandb_files import history

pytest.importorskip("wandb")


@proves(Kind.RETURN, Promise.LOGGED, victim="0", moment="5:backward")
def test_each_step_is_logged_once_though_its_owner_is_lost_and_comes_back(run: Launch) -> None:
    options = ("--elaswave-wandb=offline", "--elaswave-wandb-project=tests")
    spec = JobSpec(
        steps=12,
        kills=("0@5:backward",),
        respawn=10,
        options=options,
        dump="never",
        awaits=((8, 1),),
    )
    killed = run(spec)
    check_survived(killed)
    rows = [row for rows in history(killed.directory).values() for row in rows]
    assert [row["_step"] for row in rows] == list(range(12))
    assert sum("recovered/mttr_s" in row for row in rows) == 2  # the loss and the return
    assert "tracking:" not in killed.output
