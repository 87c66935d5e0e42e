"""Workers of pretrain_gpt.py are killed while they save: each checkpoint can be read and loaded."""

import itertools
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.adapters.megatron_lm.conftest import Launch
from tests.adapters.megatron_lm.harness import ScriptSpec, needs_repository, printed
from tests.checkpoints.disks import mounted
from tests.checkpoints.striker import Strike, plan
from tests.checkpoints.struck import (
    check_all,
    check_saves,
    check_struck,
    losses,
    saves_of,
    saving,
)
from tests.convoys import Convoy, convoys
from tests.faults.harness import Outcome, Zygote
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled
from tests.session import each_once

pytestmark = needs_repository

STEPS = 8
MOMENTS = ("open", "exists", "named")
LAYOUTS = {
    "dp4": (),
    "tp2-dp2": ("--tensor-model-parallel-size", "2"),
    "pp2-dp2": ("--pipeline-model-parallel-size", "2"),
}
Undisturbed = Callable[[str], Outcome]


def spec_of(layout: str, saves: Path | str = "SAVED") -> ScriptSpec:
    options = (*ScriptSpec().options, *LAYOUTS[layout])
    options += ("--save", str(saves), "--save-interval", "1")
    return ScriptSpec(steps=STEPS, options=options, dump="never")


def case(layout: str, iteration: int, moment: str) -> ScriptSpec:
    """The job with one strike."""
    return replace(spec_of(layout), strikes=(Strike(iteration, moment, iteration % 4),))


@pytest.fixture(scope="module")
def run(
    run: Launch,
    zygote: Zygote,
    script: Path,
    data: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Launch:
    """Launch a job, which is struck from outside while it saves."""
    return saving(run, zygote, data, tmp_path_factory, script)


@pytest.fixture(scope="module")
def undisturbed(run: Launch) -> Undisturbed:
    """The run of each layout without kills, made once."""
    once = each_once(run)
    return lambda layout: once(spec_of(layout))


@proves(Kind.KILL_IN_SAVE, Promise.WHOLE)
@pytest.mark.parametrize(("layout", "seed"), sampled(list(itertools.product(LAYOUTS, (1, 2)))))
@pytest.mark.timeout(300)
def test_a_kill_in_each_of_eight_saves_with_a_return(
    run: Launch, undisturbed: Undisturbed, layout: str, seed: int
) -> None:
    strikes = plan(seed, range(1, STEPS + 1), MOMENTS, slots=4)
    # Each is back before the next save.
    awaits = tuple((step, step) for step in range(1, STEPS))
    spec = replace(spec_of(layout), respawn=10, awaits=awaits, strikes=strikes)
    check_all(run(spec), undisturbed(layout))


# Of the two groups, so that no stage and no TP position is left without a worker.
@proves(Kind.KILL_IN_SAVE, Promise.WHOLE)
@pytest.mark.parametrize(
    ("layout", "iteration", "moment"),
    convoys(
        itertools.product(LAYOUTS, range(1, STEPS + 1), MOMENTS),
        case,
        most=2,
        victim=lambda strike: strike.slot // 2,
    ),
)
def test_a_kill_in_a_save_without_a_return(
    convoy: Convoy, undisturbed: Undisturbed, layout: str, iteration: int, moment: str
) -> None:
    check_struck(convoy, undisturbed(layout))


@pytest.fixture(scope="module")
def struck_saves(run: Launch) -> Callable[[str], Path]:
    """The saves of a run of each layout, in whose fourth save a worker was killed."""
    made: dict[str, Path] = {}

    def of(layout: str) -> Path:
        if layout not in made:
            killed = run(case(layout, 4, "open"))
            assert killed.returncode == 0, killed.output[-4000:]
            assert killed.spec.strikes[0].has_struck, killed.spec.strikes
            made[layout] = saves_of(killed)
        return made[layout]

    return of


def loading(folder: Path, nproc: int, *more: str) -> ScriptSpec:
    options = (*ScriptSpec().options, "--load", str(folder), *more)
    return ScriptSpec(nproc=nproc, steps=STEPS, options=options, dump="never")


@proves(Kind.KILL_IN_SAVE, Promise.WHOLE)
@pytest.mark.parametrize(("layout", "nproc"), sampled(list(itertools.product(LAYOUTS, (4, 2, 8)))))
def test_a_checkpoint_of_a_save_with_a_kill_is_loaded_by_any_number(
    run: Launch,
    undisturbed: Undisturbed,
    struck_saves: Callable[[str], Path],
    layout: str,
    nproc: int,
) -> None:
    reference = undisturbed(layout)
    more = (*LAYOUTS[layout], "--ckpt-step", "4")
    ours = run(loading(struck_saves(layout), nproc, *more))
    theirs = run(loading(saves_of(reference), nproc, *more))
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
    run: Launch, undisturbed: Undisturbed, tmp_path: Path, damage: str
) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(saves_of(undisturbed("dp4")), folder)
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
    run: Launch, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """Two saves fit, the others do not."""
    reference = undisturbed("dp4")
    reference_saves = saves_of(reference)
    written = sum(path.stat().st_size for path in (reference_saves / "iter_0000001").iterdir())
    with mounted(tmp_path / "small", written * 5 // 2) as small:
        full = run(spec_of("dp4", small))
        assert full.returncode == 0, full.output[-3000:]
        failures = full.events("save_failed")
        assert [failure["step"] for failure in failures] == [3, 4, 5, 6, 7, 8]
        assert all("No space left on device" in failure["reason"] for failure in failures)
        assert full.output.count("was not saved to") == 6 and "Traceback" not in full.output
        assert full.events("view_committed")[-1]["ranks"] == [0, 1, 2, 3]
        check_saves(small, reference_saves, 2)
        assert losses(full) == losses(reference)
