"""Workers are killed from outside while DeepSpeed saves; every file of every checkpoint is read."""

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.checkpoints.striker import DEEPSPEED, Strike, plan
from tests.checkpoints.struck import losses, struck
from tests.deepspeed.checkpoints import State, convert, merged, parts, same
from tests.deepspeed.conftest import Launch
from tests.deepspeed.harness import SCRIPTS, EngineSpec
from tests.faults.harness import Outcome, Zygote, check_survived
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled

STEPS, STRUCK = 9, range(1, 9)
STAGES, MOMENTS = (1, 2, 3), ("open", "exists", "named")


def spec_of(stage: int, folder: Path, steps: int = STEPS, **more: object) -> EngineSpec:
    """A checkpoint after each step."""
    return EngineSpec(
        script=str(SCRIPTS / "saving.py"),
        stage=stage,
        steps=steps,
        options=(f"--save={folder}", "--every=1"),
        dump="never",
        **more,
    )  # type: ignore[arg-type]


Saved = Callable[..., tuple[Outcome, Path]]


@pytest.fixture(scope="module")
def planned(run: Launch, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A run that nothing disturbs but planned departures, and its folder; each is made once."""
    made: dict[tuple[int, tuple[str, ...], int], tuple[Outcome, Path]] = {}

    def made_once(
        stage: int, changes: tuple[str, ...] = (), steps: int = STEPS
    ) -> tuple[Outcome, Path]:
        key = stage, changes, steps
        if key not in made:
            folder = tmp_path_factory.mktemp("planned")
            made[key] = run(spec_of(stage, folder, steps, changes=changes)), folder
            check_survived(made[key][0])
        return made[key]

    return made_once


@pytest.fixture
def strike(zygote: Zygote, tmp_path: Path) -> Saved:
    """A run whose workers are killed while they save, and its folder."""

    def struck_run(stage: int, strikes: list[Strike], **more: object) -> tuple[Outcome, Path]:
        saves, directory = tmp_path / "saves", tmp_path / "run"
        saves.mkdir()
        spec = spec_of(stage, saves, **more)
        where = {"zygote": zygote, "data": directory, "directory": directory}
        run = struck(spec, strikes, saves, kind=DEEPSPEED, **where)
        assert run.returncode == 0, run.output[-4000:]
        assert all(one.fired and one.bytes_written > 0 for one in strikes), strikes
        assert (saves / "latest").read_text() == f"global_step{spec.steps}"
        # The checkpoints and nothing else: no half of one, no former one.
        wanted = {f"global_step{step}" for step in range(1, spec.steps + 1)}
        assert {path.name for path in saves.iterdir() if path.is_dir()} == wanted
        return run, saves

    return struck_run


def state_of(saves: Path, step: int, scratch: Path) -> State:
    """Weights and moments of a checkpoint, whatever the number of its writers."""
    universal = scratch / f"universal-{saves.name}-{step}"
    state = merged(convert(saves / f"global_step{step}", universal))
    assert {name.rpartition("/")[2] for name in state} >= {"fp32", "exp_avg", "exp_avg_sq"}
    return state


def check_files(saves: Path, reference: Path, step: int, writers: int) -> None:
    """The same files with the same content."""
    ours, theirs = (parts(folder / f"global_step{step}") for folder in (saves, reference))
    assert ours.keys() == theirs.keys()
    assert len([name for name in ours if name.endswith("optim_states.pt")]) == writers
    assert all(same(ours[name], theirs[name]) for name in ours), step


def check_redone(saves: Path, reference: Path, step: int, scratch: Path) -> None:
    """Three workers have written what four computed."""
    folder = saves / f"global_step{step}"
    assert len([*folder.glob("*zero_pp_rank_*optim_states.pt")]) == 3
    ours, theirs = state_of(saves, step, scratch), state_of(reference, step, scratch)
    assert ours.keys() == theirs.keys() and same(ours, theirs), step


@proves(Kind.KILL_IN_SAVE, Promise.WHOLE)
@pytest.mark.parametrize(("stage", "seed"), sampled(list(itertools.product(STAGES, (1, 2)))))
@pytest.mark.timeout(300)
def test_a_kill_in_each_of_eight_saves_with_a_return(
    planned: Saved, strike: Saved, tmp_path: Path, stage: int, seed: int
) -> None:
    strikes = plan(seed, STRUCK, MOMENTS, slots=4)
    # Each is back before the next step.
    changes = tuple(f"+{one.slot}@{one.iteration}" for one in strikes)
    run, saves = strike(stage, strikes, respawn=10, changes=changes)
    undisturbed, reference = planned(stage)
    assert [event["slot"] for event in run.events("entered")] == [one.slot for one in strikes]
    for step in STRUCK:
        check_redone(saves, reference, step, tmp_path)
    check_files(saves, reference, STEPS, writers=4)
    assert losses(run) == losses(undisturbed)


@proves(Kind.KILL_IN_SAVE, Promise.WHOLE)
@pytest.mark.parametrize(
    ("stage", "step", "moment"),
    sampled(list(itertools.product(STAGES, STRUCK, MOMENTS))),
)
def test_a_kill_in_a_save_without_a_return(
    planned: Saved, strike: Saved, tmp_path: Path, stage: int, step: int, moment: str
) -> None:
    """Saves before it are as without it, those after it as where that worker left as planned."""
    strikes = plan(7 * step + stage, [step], [moment], slots=4)
    steps = min(STEPS, step + 2)
    run, saves = strike(stage, strikes, steps=steps)
    check_survived(run)
    _, reference = planned(stage)
    twin, twin_folder = planned(stage, (f"{strikes[0].slot}@{step}",), steps)
    for earlier in range(1, step):
        check_files(saves, reference, earlier, writers=4)
    check_redone(saves, reference, step, tmp_path)
    for later in range(step + 1, steps + 1):
        check_files(saves, twin_folder, later, writers=3)
    assert losses(run) == losses(twin)


@proves(Kind.KILL_IN_SAVE, Promise.WHOLE)
@pytest.mark.parametrize(("stage", "width"), sampled(list(itertools.product(STAGES, (3, 2, 4)))))
def test_a_checkpoint_of_a_save_with_a_kill_is_loaded_by_any_number(
    run: Launch, planned: Saved, strike: Saved, tmp_path: Path, stage: int, width: int
) -> None:
    """As many as wrote it load it as it is, others through DeepSpeed's universal checkpoint.

    The losses that follow are those after the undisturbed run's checkpoint of the same step.
    """
    step, tag = 4, "global_step4"
    _, saves = strike(stage, plan(4, [step], ["open"], slots=4), steps=step + 1)
    _, reference = planned(stage)

    def loaded(folder: Path, settings: dict[str, object]) -> Outcome:
        target = tmp_path / f"on-{folder.name}"
        spec = spec_of(
            stage, target, nproc=width, global_batch=4 * width, settings=json.dumps(settings)
        )
        outcome = run(replace(spec, steps=3, options=(*spec.options, f"--load={folder}")))
        assert outcome.returncode == 0, outcome.output[-4000:]
        return outcome

    universal = {"checkpoint": {"load_universal": True}}
    for name, folder in (("ours", saves), ("theirs", reference)):
        convert(folder / tag, tmp_path / name / tag)
        (tmp_path / name / "latest_universal").write_text(tag)
    ours, theirs = (loaded(tmp_path / name, universal) for name in ("ours", "theirs"))
    loaded_state = merged(convert(tmp_path / "on-ours" / "loaded", tmp_path / "loaded"))
    assert same(loaded_state, state_of(reference, step, tmp_path))
    assert len(losses(ours)) == 3 and losses(ours) == losses(theirs)
    if width == 3:
        (saves / "latest").write_text(tag)
        assert losses(loaded(saves, {})) == losses(theirs)
