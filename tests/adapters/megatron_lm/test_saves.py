"""Workers of pretrain_gpt.py are killed while they save: each checkpoint can be read and loaded."""

import itertools
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.adapters.megatron_lm.conftest import Launch
from tests.adapters.megatron_lm.harness import ScriptSpec, needs_repository, printed
from tests.checkpoints.disks import mounted
from tests.checkpoints.striker import plan
from tests.checkpoints.struck import check_saves, losses, struck
from tests.faults.harness import Outcome, Zygote
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled

pytestmark = needs_repository

STEPS = 8
MOMENTS = ("open", "exists", "named")
LAYOUTS = {
    "dp4": (),
    "tp2-dp2": ("--tensor-model-parallel-size", "2"),
    "pp2-dp2": ("--pipeline-model-parallel-size", "2"),
}
Saved = tuple[Outcome, Path]


def spec_of(layout: str, saves: Path, script: Path) -> ScriptSpec:
    options = (*ScriptSpec().options, *LAYOUTS[layout])
    options += ("--save", str(saves), "--save-interval", "1")
    return ScriptSpec(steps=STEPS, options=options, dump="never", script=str(script))


@pytest.fixture(scope="module")
def undisturbed(
    zygote: Zygote, script: Path, data: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Saved]:
    """The run of each layout without kills, and where it saved; made when it is asked for."""

    class Made(dict[str, Saved]):
        def __missing__(self, layout: str) -> Saved:
            saves = tmp_path_factory.mktemp("undisturbed")
            directory = tmp_path_factory.mktemp("run")
            spec = spec_of(layout, saves, script)
            run = struck(spec, [], saves, zygote=zygote, data=data, directory=directory)
            assert run.returncode == 0, run.output[-4000:]
            self[layout] = run, saves
            return self[layout]

    return Made()


@proves(Kind.KILL_IN_SAVE, Promise.WHOLE)
@pytest.mark.parametrize(("layout", "seed"), sampled(list(itertools.product(LAYOUTS, (1, 2)))))
@pytest.mark.timeout(300)
def test_a_kill_in_each_of_eight_saves_with_a_return(
    zygote: Zygote,
    script: Path,
    data: Path,
    tmp_path: Path,
    undisturbed: dict[str, Saved],
    layout: str,
    seed: int,
) -> None:
    strikes = plan(seed, range(1, STEPS + 1), MOMENTS, slots=4)
    saves = tmp_path / "saves"
    saves.mkdir()
    # Each is back before the next save.
    awaits = tuple((step, step) for step in range(1, STEPS))
    spec = replace(spec_of(layout, saves, script), respawn=10, awaits=awaits)
    run = struck(spec, strikes, saves, zygote=zygote, data=data, directory=tmp_path / "run")
    assert run.returncode == 0, run.output[-4000:]
    assert all(strike.fired and strike.bytes_written > 0 for strike in strikes), strikes
    reference, reference_saves = undisturbed[layout]
    check_saves(saves, reference_saves, STEPS)
    assert losses(run) == losses(reference)


@proves(Kind.KILL_IN_SAVE, Promise.WHOLE)
@pytest.mark.parametrize(
    ("layout", "iteration", "moment"),
    sampled(list(itertools.product(LAYOUTS, range(1, STEPS + 1), MOMENTS))),
)
def test_a_kill_in_a_save_without_a_return(
    zygote: Zygote,
    script: Path,
    data: Path,
    tmp_path: Path,
    undisturbed: dict[str, Saved],
    layout: str,
    iteration: int,
    moment: str,
) -> None:
    strikes = plan(iteration, [iteration], [moment], slots=4)
    saves = tmp_path / "saves"
    saves.mkdir()
    spec = spec_of(layout, saves, script)
    run = struck(spec, strikes, saves, zygote=zygote, data=data, directory=tmp_path / "run")
    assert run.returncode == 0, run.output[-4000:]
    assert all(strike.fired and strike.bytes_written > 0 for strike in strikes), strikes
    reference, reference_saves = undisturbed[layout]
    check_saves(saves, reference_saves, STEPS)
    assert losses(run) == losses(reference)


@pytest.fixture(scope="module")
def struck_saves(
    zygote: Zygote, script: Path, data: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """The saves of a run of each layout, in whose fourth save a worker was killed."""

    class Made(dict[str, Path]):
        def __missing__(self, layout: str) -> Path:
            saves, directory = tmp_path_factory.mktemp("struck"), tmp_path_factory.mktemp("run")
            strikes = plan(4, [4], ["open"], slots=4)
            spec = spec_of(layout, saves, script)
            run = struck(spec, strikes, saves, zygote=zygote, data=data, directory=directory)
            assert run.returncode == 0, run.output[-4000:]
            assert strikes[0].fired and strikes[0].bytes_written > 0, strikes
            self[layout] = saves
            return saves

    return Made()


def loading(folder: Path, nproc: int, *more: str) -> ScriptSpec:
    options = (*ScriptSpec().options, "--load", str(folder), *more)
    return ScriptSpec(nproc=nproc, steps=STEPS, options=options, dump="never")


@proves(Kind.KILL_IN_SAVE, Promise.WHOLE)
@pytest.mark.parametrize(("layout", "nproc"), sampled(list(itertools.product(LAYOUTS, (4, 2, 8)))))
def test_a_checkpoint_of_a_save_with_a_kill_is_loaded_by_any_number(
    run: Launch,
    undisturbed: dict[str, Saved],
    struck_saves: dict[str, Path],
    layout: str,
    nproc: int,
) -> None:
    reference, reference_saves = undisturbed[layout]
    more = (*LAYOUTS[layout], "--ckpt-step", "4")
    ours = run(loading(struck_saves[layout], nproc, *more))
    theirs = run(loading(reference_saves, nproc, *more))
    assert ours.returncode == theirs.returncode == 0, ours.output[-4000:]
    assert printed(ours) == printed(theirs)
    assert losses(ours).keys() == {4, 5, 6, 7}
    if nproc == 4:
        assert losses(ours) == {step: losses(reference)[step] for step in losses(ours)}


DAMAGES = {
    "no number": (
        lambda saves: (saves / "latest_checkpointed_iteration.txt").write_text(""),
        "latest_checkpointed_iteration.txt has '', wanted a number",
    ),
    "cut": (
        lambda saves: os.truncate(saves / "iter_0000008" / "__0_0.distcp", 1000),
        "__0_0.distcp has 1000 bytes, wanted",
    ),
    "no metadata": (
        lambda saves: (saves / "iter_0000008" / "metadata.json").unlink(),
        "metadata.json is missing",
    ),
}


@proves(Kind.BAD_CHECKPOINT, Promise.NAMED)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_checkpoint_that_cannot_be_read_is_named(
    run: Launch, undisturbed: dict[str, Saved], tmp_path: Path, damage: str
) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(undisturbed["dp4"][1], folder)
    strike, said = DAMAGES[damage]
    strike(folder)
    refused = run(loading(folder, 4))
    assert refused.returncode == 1, refused.output[-4000:]
    (sentence,) = [line for line in refused.output.splitlines() if said in line]
    newest = 8 if damage == "no number" else 7
    assert f"write {newest} into" in sentence
    assert "Traceback" not in refused.output and "queue it again" not in refused.output


@proves(Kind.DISK, Promise.WHOLE)
def test_a_full_disk_costs_a_checkpoint_and_no_worker(
    zygote: Zygote, script: Path, data: Path, undisturbed: dict[str, Saved], tmp_path: Path
) -> None:
    """Two saves fit, the others do not."""
    reference, reference_saves = undisturbed["dp4"]
    written = sum(path.stat().st_size for path in (reference_saves / "iter_0000001").iterdir())
    with mounted(tmp_path / "small", written * 5 // 2) as small:
        spec = spec_of("dp4", small, script)
        full = struck(spec, [], small, zygote=zygote, data=data, directory=tmp_path / "run")
        assert full.returncode == 0, full.output[-3000:]
        failures = full.events("save_failed")
        assert [failure["step"] for failure in failures] == [3, 4, 5, 6, 7, 8]
        assert all("No space left on device" in failure["reason"] for failure in failures)
        assert full.output.count("was not saved to") == 6 and "Traceback" not in full.output
        assert full.events("view_committed")[-1]["ranks"] == [0, 1, 2, 3]
        check_saves(small, reference_saves, 2)
        assert losses(full) == losses(reference)
