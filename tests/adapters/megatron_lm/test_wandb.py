"""--wandb-project: one W&B run, offline for real, whichever rank is the last one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.adapters.megatron_lm.conftest import Launch
from tests.adapters.megatron_lm.harness import NO_EVALUATION, ScriptSpec, needs_repository
from tests.faults.harness import Outcome, check_survived
from tests.proofs import Kind, Promise, proves
from tests.tracking.wandb_files import history, run_ids

pytestmark = needs_repository
pytest.importorskip("wandb")
THEIRS, OURS = "lm loss", "train/loss"
WANDB = ("--wandb-project", "tests", "--wandb-exp-name", "one")


@pytest.fixture
def logged(run: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """A script that logs to W&B offline, and whose owner of the run is lost in step 3."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    # Without a TensorBoard writer Megatron-LM writes nothing to W&B either.
    folders = ("--wandb-save-dir", str(tmp_path), "--tensorboard-dir", str(tmp_path / "tb"))

    def launched(**more: Any) -> Outcome:
        options = (*NO_EVALUATION, *WANDB, *folders)
        survived = run(ScriptSpec(dump="never", options=options, kills=("3@3:backward",), **more))
        check_survived(survived)
        return survived

    return launched


@proves(Kind.KILL, Promise.LOGGED)
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_run_that_the_script_opens_goes_on_when_its_owner_is_lost(
    logged: Callable[..., Outcome], tmp_path: Path
) -> None:
    spec = logged(steps=40).spec
    first, second = history(tmp_path).values()
    assert len(run_ids(tmp_path)) == 1
    # Theirs and ours lie under the same iterations, of which none comes twice.
    steps = [[row["_step"] for row in rows if THEIRS in row] for rows in (first, second)]
    # W&B holds back the newest row, which is lost with its owner.
    assert steps[0] in ([1, 2], [1, 2, 3])
    assert steps[1][0] > 3 and steps[1] == list(range(steps[1][0], spec.steps + 1))
    for rows in (first, second):
        assert [row["_step"] for row in rows if OURS in row] == sorted(
            {row["_step"] for row in rows if OURS in row}
        )
        assert all(row[OURS] == pytest.approx(row[THEIRS]) for row in rows if THEIRS in row)
    recovered = [row for rows in (first, second) for row in rows if "recovered/mttr_s" in row]
    assert all(row["recovered/mttr_s"] > 0 for row in recovered)


@proves(Kind.WRONG_INPUT, Promise.REFUSED)
@pytest.mark.slow
def test_a_run_of_ours_beside_it_is_refused(run: Launch) -> None:
    options = (*NO_EVALUATION, *WANDB, "--elaswave-wandb=offline")
    refused = run(ScriptSpec(options=options, steps=2))
    assert refused.returncode == 2
    assert "the script's own run is logged to; leave --elaswave-wandb out" in refused.output


@proves(Kind.RETURN, Promise.LOGGED)
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_it_goes_back_to_the_worker_that_comes_back(
    logged: Callable[..., Outcome], tmp_path: Path
) -> None:
    """The owner between the two has hardly opened the run when it is to close it."""
    survived = logged(steps=80, respawn=3)
    assert survived.events("view_committed")[-1]["ranks"] == [0, 1, 2, 3]
    folders = history(tmp_path)
    assert len(run_ids(tmp_path)) == 1 and 2 <= len(folders) <= 3
    steps = [row["_step"] for rows in folders.values() for row in rows if THEIRS in row]
    assert len(steps) == len(set(steps)) and steps[-1] == survived.spec.steps
