"""Workers are killed from outside while DeepSpeed saves; every file of every checkpoint is read."""

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.checkpoints.striker import DEEPSPEED, Strike, plan
from tests.checkpoints.struck import counted, losses, saved_in, saves_of, struck, struck_in
from tests.convoys import Convoy, convoys, verdicts
from tests.deepspeed.checkpoints import State, convert, merged, parts, same
from tests.deepspeed.conftest import Launch
from tests.deepspeed.harness import SCRIPTS, EngineSpec
from tests.faults.harness import Outcome, Zygote, check_survived
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled

STEPS, STRUCK = 9, range(1, 9)
STAGES, MOMENTS = (1, 2, 3), ("open", "exists", "named")


def spec_of(
    stage: int, folder: Path | str = "SAVED", steps: int = STEPS, **more: object
) -> EngineSpec:
    """A checkpoint after each step."""
    return EngineSpec(
        script=str(SCRIPTS / "saving.py"),
        stage=stage,
        steps=steps,
        options=(f"--save={folder}", "--every=1"),
        dump="never",
        **more,
    )  # type: ignore[arg-type]


def case(stage: int, step: int, moment: str) -> EngineSpec:
    """The job with one strike."""
    return spec_of(stage, strikes=(Strike(step, moment, step % 4),))


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


@pytest.fixture(scope="module")
def run(
    run: Launch, zygote: Zygote, data: Path, tmp_path_factory: pytest.TempPathFactory
) -> Launch:
    """Launch a job; one that is struck while it saves ends two steps behind that."""

    def launched(spec: EngineSpec) -> Outcome:
        if not spec.strikes:
            return run(spec)
        directory = tmp_path_factory.mktemp("struck")
        spec = replace(spec, steps=min(STEPS, spec.strikes[-1].step + 2))
        return struck(spec, zygote=zygote, data=data, directory=directory, kind=DEEPSPEED)

    return launched


def check_struck(run: Outcome) -> None:
    """All strikes struck, and what is left is the checkpoints: no half of one, no former one."""
    assert run.returncode == 0, run.output[-4000:]
    assert all(strike.has_struck for strike in run.spec.strikes), run.spec.strikes
    saves, steps = saves_of(run), run.spec.steps
    assert (saves / "latest").read_text() == f"global_step{steps}"
    wanted = {f"global_step{step}" for step in range(1, steps + 1)}
    assert {path.name for path in saves.iterdir() if path.is_dir()} == wanted


def state_of(saves: Path, step: int, scratch: Path) -> State:
    """Weights and moments of a checkpoint, whatever the number of its writers."""
    universal = scratch / f"universal-{saves.name}-{step}"
    if not universal.exists():
        convert(saves / f"global_step{step}", universal)
    state = merged(universal)
    assert {name.rpartition("/")[2] for name in state} >= {"fp32", "exp_avg", "exp_avg_sq"}
    return state


def check_files(saves: Path, reference: Path, step: int, writers: int) -> None:
    """The same files with the same content."""
    ours, theirs = (parts(folder / f"global_step{step}") for folder in (saves, reference))
    assert ours.keys() == theirs.keys()
    assert len([name for name in ours if name.endswith("optim_states.pt")]) == writers
    assert all(same(ours[name], theirs[name]) for name in ours), step


def check_redone(saves: Path, reference: Path, step: int, scratch: Path, writers: int) -> None:
    """Those that were left have written what one more computed."""
    folder = saves / f"global_step{step}"
    assert len([*folder.glob("*zero_pp_rank_*optim_states.pt")]) == writers
    ours, theirs = state_of(saves, step, scratch), state_of(reference, step, scratch)
    assert ours.keys() == theirs.keys() and same(ours, theirs), step


def another(run: Outcome, reference: Path, step: int, scratch: Path) -> str:
    """Say what is wrong with a checkpoint; empty if nothing is."""
    struck_steps = [strike.step for strike in run.spec.strikes]
    writers = 4 - sum(one <= step for one in struck_steps)
    try:
        if step in struck_steps:
            check_redone(saves_of(run), reference, step, scratch, writers)
        else:
            check_files(saves_of(run), reference, step, writers)
    except Exception as error:  # of whatever kind that which cannot be read has
        return repr(error)
    return ""


@proves(Kind.KILL_IN_SAVE, Promise.WHOLE)
@pytest.mark.parametrize(("stage", "seed"), sampled(list(itertools.product(STAGES, (1, 2)))))
@pytest.mark.timeout(300)
def test_a_kill_in_each_of_eight_saves_with_a_return(
    run: Launch, planned: Saved, tmp_path: Path, stage: int, seed: int
) -> None:
    strikes = plan(seed, STRUCK, MOMENTS, slots=4)
    # Each is back before the next step.
    changes = tuple(f"+{one.slot}@{one.step}" for one in strikes)
    killed = run(spec_of(stage, strikes=strikes, respawn=10, changes=changes))
    check_struck(killed)
    undisturbed, reference = planned(stage)
    assert [event["slot"] for event in killed.events("entered")] == [one.slot for one in strikes]
    for step in STRUCK:
        check_redone(saves_of(killed), reference, step, tmp_path, writers=3)
    check_files(saves_of(killed), reference, STEPS, writers=4)
    assert losses(killed) == losses(undisturbed)


@proves(Kind.KILL_IN_SAVE, Promise.WHOLE)
@pytest.mark.parametrize(
    ("stage", "step", "moment"), convoys(itertools.product(STAGES, STRUCK, MOMENTS), case)
)
def test_a_kill_in_a_save_without_a_return(
    convoy: Convoy, planned: Saved, tmp_path: Path, stage: int, step: int, moment: str
) -> None:
    check_case(convoy, planned, tmp_path)


def check_case(convoy: Convoy, planned: Saved, scratch: Path) -> None:
    """Saves are as where that worker left as planned, and the struck one is by fewer writers."""
    killed = convoy.run
    changes = tuple(f"{strike.slot}@{strike.step}" for strike in killed.spec.strikes)
    twin, reference = planned(killed.spec.stage, changes, killed.spec.steps)

    def whole() -> None:
        check_struck(killed)
        check_survived(killed)
        assert losses(killed) == losses(twin)

    convoy.check(
        counted(twin, dict.fromkeys(saved_in(twin), "")),
        whole,
        ours=counted(
            killed, {one: another(killed, reference, one, scratch) for one in saved_in(twin)}
        ),
        struck=struck_in(killed),
    )


@proves(Kind.SABOTAGE, Promise.SEEN)
def test_the_strike_behind_which_a_checkpoint_is_another_is_named(
    run: Launch, planned: Saved, tmp_path: Path
) -> None:
    whole = run(spec_of(2, strikes=(Strike(2, "exists", 1), Strike(4, "named", 2))))

    def found(scratch: Path) -> list[str]:
        return verdicts(whole, lambda convoy: check_case(convoy, planned, scratch))

    assert found(tmp_path / "whole") == ["passes", "passes"]
    # Another one than was saved behind the first strike, and before the second.
    third, fifth = (saves_of(whole) / f"global_step{step}" for step in (3, 5))
    (state,) = third.glob("zero_pp_rank_0*_optim_states.pt")
    state.write_bytes((fifth / state.name).read_bytes())
    assert found(tmp_path / "damaged") == ["fails", "not run"]


@proves(Kind.KILL_IN_SAVE, Promise.WHOLE)
@pytest.mark.parametrize(("stage", "width"), sampled(list(itertools.product(STAGES, (3, 2, 4)))))
def test_a_checkpoint_of_a_save_with_a_kill_is_loaded_by_any_number(
    run: Launch, planned: Saved, tmp_path: Path, stage: int, width: int
) -> None:
    """As many as wrote it load it as it is, others through DeepSpeed's universal checkpoint.

    The losses that follow are those after the undisturbed run's checkpoint of the same step.
    """
    step, tag = 4, "global_step4"
    killed = run(case(stage, step, "open"))
    check_struck(killed)
    saves = saves_of(killed)
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
