"""Checkpoints: a loss during a save, checkpoints after a shrink, and jobs that load them."""

import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.checkpoints.disks import mounted
from tests.deepspeed.checkpoints import convert, merged, parts, same
from tests.deepspeed.conftest import Launch
from tests.deepspeed.harness import SCRIPTS, EngineSpec
from tests.faults.harness import Outcome, check_survived, max_relative_difference
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled

SAVING = str(SCRIPTS / "saving.py")
TAGS = ("global_step2", "global_step4", "global_step6")
MOMENTS = {"fp32", "exp_avg", "exp_avg_sq"}
# A kill in a save fires at its first byte; here it fires after the victim's last file, ...
WRITTEN = """
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from elaswave_plugin.recovery.phases import Phases
fire, save, seen = Phases.fire, TorchCheckpointEngine.save, []
def keep(self, phase):
    seen.append(self)
    if phase != "save":
        fire(self, phase)
def write(self, state_dict, path):
    save(self, state_dict, path)
    if path.endswith("optim_states.pt"):
        BREAK(path)
        fire(seen[-1], "save")
Phases.fire, TorchCheckpointEngine.save = keep, write
"""
SAVES = {
    "begun": "",
    "written": WRITTEN.replace("BREAK(path)", ""),
    # ... or in the middle of it.
    "torn": WRITTEN.replace(
        "BREAK(path)",
        "doomed = any(k.step == seen[-1].step for k in seen[-1]._kills)\n"
        "        doomed and open(path, 'r+b').truncate(1000)",
    ),
}


def spec_of(folder: Path, stage: int, **more: object) -> EngineSpec:
    options = (f"--save={folder}",)
    return EngineSpec(script=SAVING, stage=stage, options=options, **more)  # type: ignore[arg-type]


Saved = Callable[..., tuple[Outcome, Path]]


@pytest.fixture(scope="module")
def saved(run: Launch, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A run that saves, and its folder of checkpoints; each is made once."""
    made: dict[tuple[object, ...], tuple[Outcome, Path]] = {}

    def made_once(stage: int, **more: object) -> tuple[Outcome, Path]:
        key = (stage, *sorted(more.items()))
        if key not in made:
            folder = tmp_path_factory.mktemp("saved")
            made[key] = run(spec_of(folder, stage, **more)), folder
        return made[key]

    return made_once


def state_of(folder: Path, tmp_path: Path) -> dict[str, torch.Tensor]:
    """Weights and moments of one checkpoint, whatever the number of its writers."""
    state = merged(convert(folder, tmp_path / f"universal-{folder.parent.name}-{folder.name}"))
    assert {name.rpartition("/")[2] for name in state} >= MOMENTS
    return state


def evaluations(folder: Path) -> list[dict[str, float]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("evaluations-*"))]


def check_saved(run: Outcome, folder: Path, reference_folder: Path) -> None:
    check_survived(run)
    assert (folder / "latest").read_text() == TAGS[-1]
    # The checkpoints and nothing else: no half of one, no former one.
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == sorted(TAGS)
    wanted = evaluations(reference_folder)[0]
    for values in evaluations(folder):
        # A body that was interrupted evaluates once more, at the step that was restored: in ZeRO-3,
        # where it cannot, that is not a number, and never a wrong one.
        assert {step: values[step] for step in wanted} == pytest.approx(wanted, rel=1e-5)
        more = [values[step] for step in values.keys() - wanted.keys()]
        assert len(more) <= 1
        if isinstance(run.spec, EngineSpec) and run.spec.stage == 3:
            assert all(math.isnan(value) for value in more)


def writers(folder: Path) -> int:
    """Workers that have written a part of a checkpoint."""
    return len([*folder.glob("*zero_pp_rank_*optim_states.pt")])


@proves(Kind.KILL_IN_SAVE, Promise.WHOLE)
@pytest.mark.parametrize("stage", sampled([1, 2, 3]))
@pytest.mark.parametrize(
    ("kill", "when"),
    sampled(
        [
            ("1@4:save", "begun"),
            ("0@2:save", "torn"),
            ("3@4:save", "written"),
            ("3@1:snapshot", "begun"),
            ("2@4:finalize", "begun"),
        ]
    ),
)
def test_a_save_is_made_again_and_is_whole(
    saved: Saved, tmp_path: Path, stage: int, kill: str, when: str
) -> None:
    reference, reference_folder = saved(stage)
    killed, folder = saved(stage, kills=(kill,), sabotage=SAVES[when])
    check_saved(killed, folder, reference_folder)
    assert max_relative_difference(killed, reference) <= 1e-6
    # Nobody writes before all have sealed the step: then three workers write what four computed.
    tag = f"global_step{kill[2]}"
    if "snapshot" not in kill:
        ours, theirs = state_of(folder / tag, tmp_path), state_of(reference_folder / tag, tmp_path)
        assert writers(folder / tag) == 3
        assert same(ours, theirs)


@proves(Kind.KILL, Promise.WHOLE, victim="2", moment="3:backward")
@pytest.mark.parametrize("stage", sampled([1, 2, 3]))
def test_checkpoints_after_a_loss_equal_those_after_a_planned_departure(
    saved: Saved, tmp_path: Path, stage: int
) -> None:
    _, reference_folder = saved(stage)
    killed, folder = saved(stage, kills=("2@3:backward",))
    twin, twin_folder = saved(stage, changes=("2@3",))
    check_saved(killed, folder, reference_folder)
    check_saved(twin, twin_folder, reference_folder)
    for tag, width in zip(TAGS, (4, 3, 3), strict=True):
        ours, theirs = parts(folder / tag), parts(twin_folder / tag)
        assert writers(folder / tag) == width
        assert ours.keys() == theirs.keys() and len(ours) > width
        assert all(same(ours[name], theirs[name]) for name in ours), tag
    undisturbed = state_of(reference_folder / TAGS[-1], tmp_path)
    ours = state_of(folder / TAGS[-1], tmp_path)
    assert ours.keys() == undisturbed.keys() and not same(ours, undisturbed)
    for name, tensor in ours.items():
        # Adam moves an element of rounding noise by its learning rate at most, per step.
        assert torch.allclose(tensor, undisturbed[name], atol=4e-3), name


@pytest.fixture
def small_disk(tmp_path: Path, saved: Saved) -> Iterator[Path]:
    """A file system that has room for one checkpoint and a half."""
    written = sum(path.stat().st_size for path in (saved(1)[1] / TAGS[0]).iterdir())
    with mounted(tmp_path / "small", written * 3 // 2) as folder:
        yield folder


@proves(Kind.DISK, Promise.WHOLE)
def test_a_full_disk_costs_a_checkpoint_and_no_worker(
    run: Launch, saved: Saved, small_disk: Path
) -> None:
    """The first save fits, the others do not: it stays the latest, and nothing half is left."""
    full = run(spec_of(small_disk, 1))
    assert full.returncode == 0, full.output[-3000:]
    failures = full.events("save_failed")
    assert [failure["step"] for failure in failures] == [4, 6]
    assert all("No space left on device" in failure["reason"] for failure in failures)
    assert full.output.count("was not saved to") == 2 and "Traceback" not in full.output
    assert full.events("view_committed")[-1]["ranks"] == [0, 1, 2, 3]
    assert (small_disk / "latest").read_text() == TAGS[0]
    assert [path.name for path in small_disk.iterdir() if path.is_dir()] == [TAGS[0]]
    reference, reference_folder = saved(1)
    ours, theirs = parts(small_disk / TAGS[0]), parts(reference_folder / TAGS[0])
    assert ours.keys() == theirs.keys() and all(same(ours[name], theirs[name]) for name in ours)
    assert max_relative_difference(full, reference) == 0


@proves(Kind.BAD_CHECKPOINT, Promise.NAMED)
@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: (folder / "latest").write_text(""), "has '', wanted the name of a tag"),
        (
            lambda folder: os.truncate(
                folder / TAGS[-1] / "zero_pp_rank_1_mp_rank_00_optim_states.pt", 1000
            ),
            "zero_pp_rank_1_mp_rank_00_optim_states.pt (1000 bytes) was not written to its end",
        ),
    ],
    ids=["no tag", "cut"],
)
def test_a_checkpoint_that_cannot_be_read_is_named(
    run: Launch, saved: Saved, tmp_path: Path, damage: Callable[[Path], object], said: str
) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(saved(1)[1], folder)
    damage(folder)
    spec = spec_of(tmp_path / "second", 1)
    refused = run(replace(spec, options=(*spec.options, f"--load={folder}")))
    assert refused.returncode == 1, refused.output[-3000:]
    (sentence,) = [line for line in refused.output.splitlines() if said in line]
    assert "the newest whole checkpoint is" in sentence
    assert "Traceback" not in refused.output and "queue it again" not in refused.output


def check_loaded(run: Outcome, folder: Path) -> None:
    assert run.returncode == 0, run.output[-3000:]
    assert (folder / "latest").read_text() == "global_step12"


@proves(Kind.KILL, Promise.WHOLE, victim="2", moment="3:backward")
@pytest.mark.parametrize("stage", sampled([1, 2, 3]))
def test_a_checkpoint_of_three_workers_is_loaded_by_three(
    run: Launch, saved: Saved, tmp_path: Path, stage: int
) -> None:
    """Saved after a loss, loaded by a new job, which then loses a worker of its own."""
    _, folder = saved(stage, kills=("2@3:backward",))
    target = tmp_path / "second"
    spec = spec_of(target, stage, nproc=3, global_batch=12)
    spec = replace(spec, options=(*spec.options, f"--load={folder}"))
    second, killed = run(spec), run(replace(spec, kills=("0@1:forward",)))
    for loading in (second, killed):
        check_loaded(loading, target)
    assert max_relative_difference(killed, second) <= 1e-6
    ours, theirs = parts(target / "loaded"), parts(folder / TAGS[-1])
    assert ours.keys() == theirs.keys() and len(ours) > 3
    assert all(same(ours[name], theirs[name]) for name in ours)


@proves(Kind.KILL, Promise.WHOLE, victim="2", moment="3:backward")
@pytest.mark.parametrize(("stage", "width"), sampled([(1, 2), (2, 4), (3, 2)]))
def test_a_checkpoint_of_three_workers_is_loaded_by_another_number(
    run: Launch, saved: Saved, tmp_path: Path, stage: int, width: int
) -> None:
    """Through DeepSpeed's universal checkpoint; the new job loses a worker of its own."""
    _, folder = saved(stage, kills=("2@3:backward",))
    universal, target = tmp_path / "universal", tmp_path / "second"
    state = merged(convert(folder / TAGS[-1], universal / TAGS[-1]))
    (universal / "latest_universal").write_text(TAGS[-1])
    spec = spec_of(
        target,
        stage,
        nproc=width,
        global_batch=4 * width,
        settings=json.dumps({"checkpoint": {"load_universal": True}}),
    )
    spec = replace(spec, options=(*spec.options, f"--load={universal}"))
    loading = run(replace(spec, kills=("0@1:forward",)))
    check_survived(loading)
    check_loaded(loading, target)
    assert writers(target / "loaded") == width
    assert same(state_of(target / "loaded", tmp_path), state)


@proves(Kind.WIDTH, Promise.REFUSED)
def test_a_checkpoint_of_another_number_of_workers_is_refused(
    run: Launch, saved: Saved, tmp_path: Path
) -> None:
    """DeepSpeed does not load what it does not convert; the sentence's own command does that."""
    _, before = saved(1)
    folder = Path(shutil.copytree(before, tmp_path / "saved"))
    spec = spec_of(tmp_path, 1, nproc=2)
    refused = run(replace(spec, options=(*spec.options, f"--load={folder}")))
    assert refused.returncode == 2 and not refused.orphans
    (sentence,) = [line for line in refused.output.splitlines() if "ds_to_universal" in line]
    assert "was written by 4 workers, and this job has 2: start as many" in sentence
    assert "Traceback" not in refused.output
    (command,) = re.findall("`python (.*)`", sentence)
    words = [sys.executable, *shlex.split(command)]
    subprocess.run(words, check=True, timeout=120, cwd=tmp_path, capture_output=True)
    (setting,) = re.findall('with ("checkpoint": .*}) in the', sentence)
    target = tmp_path / "second"
    spec = spec_of(target, 1, nproc=2, global_batch=8, settings=f"{{{setting}}}")
    loading = run(replace(spec, options=(*spec.options, f"--load={folder}")))
    check_loaded(loading, target)
