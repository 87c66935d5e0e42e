"""Checkpoints: a loss during a save, checkpoints after a shrink, and loading before the loop."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.deepspeed.conftest import Launch
from tests.deepspeed.harness import SCRIPTS, EngineSpec
from tests.faults.harness import Outcome, check_survived, max_relative_difference

SAVING = str(SCRIPTS / "saving.py")


def spec_of(folder: Path, stage: int, **more: object) -> EngineSpec:
    options = (f"--save={folder}",)
    return EngineSpec(script=SAVING, stage=stage, options=options, **more)  # type: ignore[arg-type]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """The fp32 weights of the last checkpoint, whatever the number of its writers."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    state: dict[str, torch.Tensor] = get_fp32_state_dict_from_zero_checkpoint(str(folder))
    return state


def evaluations(folder: Path) -> list[dict[str, float]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("evaluations-*"))]


def check_saved(run: Outcome, folder: Path, reference_folder: Path) -> None:
    check_survived(run)
    assert (folder / "latest").read_text() == "global_step6"
    names = sorted(path.name for path in folder.glob("global_step*"))
    assert names == ["global_step2", "global_step4", "global_step6"]
    ours, theirs = weights(folder), weights(reference_folder)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        # Adam moves an element of rounding noise by its learning rate at most, per step.
        assert torch.allclose(tensor, theirs[name], atol=4e-3), name
    wanted = evaluations(reference_folder)[0]
    for values in evaluations(folder):
        # A body that was interrupted evaluates once more, at the step that was restored: in ZeRO-3,
        # where it cannot, that is not a number, and never a wrong one.
        assert {step: values[step] for step in wanted} == pytest.approx(wanted, rel=1e-5)
        assert len(values) <= len(wanted) + 1


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("kill", ["1@4:save", "0@2:save", "2@3:backward", "3@1:snapshot"])
def test_a_save_is_made_again_and_is_whole(
    run: Launch, tmp_path: Path, stage: int, kill: str
) -> None:
    folder, reference_folder = tmp_path / "run", tmp_path / "reference"
    reference = run(spec_of(reference_folder, stage))
    killed = run(spec_of(folder, stage, kills=(kill,)))
    check_saved(killed, folder, reference_folder)
    assert max_relative_difference(killed, reference) <= 1e-6


@pytest.mark.parametrize("stage", [1, 3])
def test_a_checkpoint_of_three_workers_is_loaded_by_three(
    run: Launch, tmp_path: Path, stage: int
) -> None:
    """Saved after a loss, loaded by a new job, which then loses a worker of its own."""
    folder = tmp_path / "first"
    first = run(spec_of(folder, stage, kills=("2@3:backward",)))
    check_survived(first)
    spec = spec_of(tmp_path / "second", stage, nproc=3, global_batch=12)
    spec = replace(spec, options=(*spec.options, f"--load={folder}"))
    second, killed = run(spec), run(replace(spec, kills=("0@1:forward",)))
    for run_ in (second, killed):
        assert run_.returncode == 0, run_.output[-3000:]
    assert max_relative_difference(killed, second) <= 1e-6
    assert (tmp_path / "second" / "latest").read_text() == "global_step12"
