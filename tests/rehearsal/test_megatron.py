"""Rehearsals of Megatron-Core scripts: what is equal passes, what is not is found and named."""

from pathlib import Path

import pytest

from tests.faults import own_scripts, two_models
from tests.faults.harness import JobSpec
from tests.proofs import Kind, Promise, proves
from tests.rehearsal.conftest import Rehearse

# Four jobs in one test, on a machine that others share.
pytestmark = [pytest.mark.timeout(1200), pytest.mark.slow]


@proves(Kind.KILLS, Promise.EQUAL)
def test_the_example_is_equal_and_every_kill_fires(rehearse: Rehearse, tmp_path: Path) -> None:
    """With saves, which go elsewhere, and an evaluation."""
    save = tmp_path / "checkpoints"
    options = (f"--save={save}", "--save-interval=2", "--eval-interval=3", "--eval-iters=1")
    found = rehearse(JobSpec(nproc=3, steps=20, global_batch=6, options=options))
    assert found.exit_code == 0, found.output
    assert [run["name"] for run in found.verdict["runs"]] == [
        "dealt-otherwise",
        "losses",
        "returns",
    ]
    assert all(kill["fired"] for run in found.verdict["runs"] for kill in run["kills"])
    assert {run["compared_with"] for run in found.verdict["runs"]} == {"undisturbed"}
    assert found.verdict["changed_files"] == []
    assert not save.exists()


@proves(Kind.SABOTAGE, Promise.SEEN)
def test_an_average_that_nobody_keeps_is_found(rehearse: Rehearse, tmp_path: Path) -> None:
    unkept = own_scripts.without_keep(own_scripts.AVERAGES)
    script = own_scripts.write(tmp_path, *unkept)
    found = rehearse(JobSpec(nproc=3, steps=20, global_batch=6, script=script), runs=("returns",))
    assert found.exit_code == 1, found.output
    assert found.first["kind"] == "script"
    assert found.first["name"].startswith("main.average.values")
    assert any("average.update(model[0])" in line for line in found.first["where"])


@proves(Kind.KILLS, Promise.EQUAL)
def test_one_that_is_kept_is_equal(rehearse: Rehearse, tmp_path: Path) -> None:
    script = own_scripts.write(tmp_path, *own_scripts.AVERAGES)
    found = rehearse(JobSpec(nproc=3, steps=20, global_batch=6, script=script), runs=("returns",))
    assert found.exit_code == 0, found.output


@proves(Kind.KILLS, Promise.EQUAL)
def test_two_models_are_equal(rehearse: Rehearse, tmp_path: Path) -> None:
    script = own_scripts.write(tmp_path, *two_models.ACTOR_AND_CRITIC)
    found = rehearse(JobSpec(nproc=3, steps=20, global_batch=6, script=script))
    assert found.exit_code == 0, found.output
