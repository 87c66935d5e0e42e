"""Rehearsals of Megatron-Core scripts: what is equal passes, what is not is found and named."""

import sys
from pathlib import Path

import pytest

from tests.faults import own_scripts, two_models
from tests.faults.harness import JobSpec
from tests.proofs import Kind, Promise, proves
from tests.rehearsal.conftest import Rehearse, rehearsed

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


@proves(Kind.KILLS, Promise.EQUAL)
def test_two_workers_are_equal(rehearse: Rehearse) -> None:
    """One of them is lost while the other one, which has come back, learns the loop."""
    found = rehearse(JobSpec(nproc=2, steps=20))
    assert found.exit_code == 0, found.output
    assert [run["name"] for run in found.verdict["runs"]][2:] == ["returns", "returns-2"]
    assert all(kill["fired"] for run in found.verdict["runs"] for kill in run["kills"])


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


STEPS = "        _, grad_norm, _ = optimizer.step()\n"
UNORDERED = """class Unordered(torch.utils.data.Dataset):
    def __init__(self, dataset):
        names = {f"sample {number}" for number in range(len(dataset))}
        self.dataset, self.order = dataset, [int(name.split()[1]) for name in names]

    def __len__(self):
        return len(self.order)

    def __getitem__(self, place):
        return self.dataset[self.order[place]]


"""


@proves(Kind.SABOTAGE, Promise.SEEN)
def test_an_order_by_a_set_is_found(data: Path, tmp_path: Path) -> None:
    """All workers of a job have it alike on one node, whose processes one zygote forks."""
    changes = (
        own_scripts.before_model(UNORDERED),
        ("job.batches(train)", "job.batches(Unordered(train))"),
    )
    spec = JobSpec(nproc=2, steps=20, script=own_scripts.write(tmp_path, *changes))
    run = [sys.executable, "-m", "elaswave_plugin.cli.main", "run", "--nproc-per-node", "2"]
    command = [*run, spec.script, *spec.arguments(data, tmp_path / "unused")]
    found = rehearsed(command, "--run=dealt-otherwise", folder=tmp_path)
    assert found.exit_code == 1, found.output
    assert found.first["kind"] == "sample"
    assert any("names = {f" in line for line in found.first["where"])


@proves(Kind.SABOTAGE, Promise.SEEN)
def test_gradients_that_are_reduced_by_hand_are_found(rehearse: Rehearse, tmp_path: Path) -> None:
    code = "        for param in model[0].parameters():\n"
    code += "            torch.distributed.all_reduce(param.main_grad)\n"
    script = own_scripts.write(tmp_path, (STEPS, code + STEPS))
    spec = JobSpec(nproc=2, steps=20, script=script)
    found = rehearse(spec, runs=("dealt-otherwise",))
    assert found.exit_code == 1, found.output
    assert found.first["kind"] == "gradient norm"
    assert any("all_reduce(param.main_grad)" in line for line in found.first["where"])
