"""A script without a line of ours has a W&B run on rank 0: it goes on where rank 0 is."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("wandb")

from tests.faults import own_loop
from tests.faults.conftest import Launch
from tests.faults.harness import JobSpec, Outcome, check_survived
from tests.faults.test_join import entered
from tests.faults.test_own_loop import TRAINS, spec_of
from tests.proofs import Kind, Promise, proves
from tests.tracking.wandb_files import history, run_ids

_LOOP = "    for iteration in range(args.train_iters):\n"
_OPENS = """\
    import wandb

    if torch.distributed.get_rank() == 0:
        wandb.init(project="own", mode="offline", dir="{folder}")
    elif torch.distributed.get_rank() == 3:
        wandb.init(project="another", mode="offline", dir="{folder}/of_3")
"""
_LOGS = """\
        if os.environ["ELASWAVE_SLOT"] == "3":
            wandb.log({"of 3": iteration})
        if torch.distributed.get_rank() == 0:
            wandb.log({"iteration": iteration, "norm": float(grad_norm)})
            print(f"norm {iteration} {float(grad_norm)!r}\\n", end="")
"""


def logging(spec: JobSpec, folder: Path, *, step: str = "") -> JobSpec:
    """Such a job, whose script logs to a folder; ``step``: the place that it gives a row."""
    logs = _LOGS.replace("})\n", "}" + step + ")\n")
    changes = (_LOOP, _OPENS.format(folder=folder) + _LOOP), (TRAINS, TRAINS + logs)
    return replace(spec, script=own_loop.write(folder, *changes))


def check_rows(run: Outcome, folder: Path, *, folders: int, lost: int | None = None) -> None:
    """One run has each step's row once, in order, whoever wrote it; except for a ``lost`` one."""
    parts = history(folder)
    assert len(parts) == folders and len({*run_ids(folder)}) == 1
    every = [row for part in parts.values() for row in part if "iteration" in row]
    rows = sorted(every, key=lambda row: row["_step"])
    wanted = [step for step in range(run.spec.steps) if step != lost]
    assert [row["iteration"] for row in rows] == wanted
    assert len({row["_step"] for row in rows}) == len(rows)
    printed = {int(step): float(norm) for step, norm in re.findall(r"norm (\d) (\S+)", run.output)}
    assert {row["iteration"]: row["norm"] for row in rows} == {k: printed[k] for k in wanted}


@proves(Kind.KILL, Promise.GOES_ON, victim="0, 1", moment="2:backward, 4:optimizer")
def test_its_run_goes_on_through_two_losses_of_rank_0(run: Launch, tmp_path: Path) -> None:
    spec = replace(spec_of(0, "backward"), kills=("0@2:backward", "1@4:optimizer"))
    survived = run(logging(spec, tmp_path))
    check_survived(survived)
    check_rows(survived, tmp_path, folders=3)
    said = "worker 0 is gone, which was rank 0: what the script does by a rank that it has"
    assert survived.output.count(said) == 1


@proves(Kind.RETURN, Promise.GOES_ON, victim="0", moment="2:backward")
def test_its_run_goes_back_to_a_worker_that_returns(run: Launch, tmp_path: Path) -> None:
    """W&B holds a row whose place is given until the next: the last one dies with its worker."""
    spec = replace(spec_of(0, "backward"), respawn=1, changes=("+0@4",))
    survived = run(logging(spec, tmp_path, step=", step=iteration"))
    check_survived(survived)
    assert entered(survived) == [(0, 1)]
    check_rows(survived, tmp_path, folders=3, lost=1)
