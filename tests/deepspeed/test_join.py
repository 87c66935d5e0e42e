"""A lost worker comes back: its script runs from the start, dead until it is where the others are.

Who comes back does so before a planned step, which makes a twin: the run in which the same worker
leaves as planned and comes back before the same step.
"""

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elaswave_plugin.config import STEP_PHASES
from tests.deepspeed.conftest import Launch, Twin
from tests.deepspeed.harness import FP32_BOUND, SCRIPTS, EngineSpec, check_recovered
from tests.deepspeed.test_monitor import check_csv, scalars, settings_of
from tests.faults.harness import Outcome, check_survived, max_relative_difference
from tests.faults.test_join import LATER
from tests.faults.test_snapshots import FLIP
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled

EPOCHS = str(SCRIPTS / "epochs.py")
STEPS, BACK = 10, 6


def spec_of(stage: int, slot: int, phase: str, **more: object) -> EngineSpec:
    """Killed in step 2, back before step 6."""
    kills = (f"{slot}@2:{phase}",)
    return EngineSpec(
        stage=stage, steps=STEPS, respawn=5, kills=kills, changes=(f"+{slot}@{BACK}",), **more
    )  # type: ignore[arg-type]


def entered(run: Outcome) -> list[tuple[int, int, int]]:
    """List the returns in order, as (slot, incarnation, step), before which each enters."""
    events = run.events("entered")
    return [(event["slot"], event["incarnation"], event["step"]) for event in events]


def sizes(run: Outcome) -> list[int]:
    """Of the views, in order."""
    return [len(event["ranks"]) for event in run.events("view_committed")]


def drawn() -> list[tuple[int, int, str, bool]]:
    """Every stage in fp32 and bf16; every slot in each of the two, in a random phase."""
    draw = random.Random(6)
    return [
        (stage, slot, draw.choice(STEP_PHASES), bf16)
        for bf16 in (False, True)
        for stage, slot in enumerate(draw.sample(range(4), 4))
    ]


@proves(Kind.RETURN, Promise.PLANNED)
@pytest.mark.parametrize(("stage", "slot", "phase", "bf16"), sampled(drawn()))
def test_a_lost_worker_comes_back_under_every_zero_stage(
    run: Launch, twin: Twin, reference: Launch, stage: int, slot: int, phase: str, bf16: bool
) -> None:
    spec = spec_of(stage, slot, phase, bf16=bf16)
    killed = run(spec)
    check_recovered(killed, twin=twin(killed), reference=reference(spec))
    assert entered(killed) == [(slot, 1, BACK)]
    assert sizes(killed) == [4, 3, 4]
    assert killed.events("view_committed")[-1]["ranks"] == [0, 1, 2, 3]


def seen_by(run: Outcome) -> dict[int, dict[int, Any]]:
    """By process, and by epoch of the script: batches, losses, steps, the frozen parameter."""
    return {
        int(path.stem.rpartition("-")[2]): {
            epoch: rest for epoch, *rest in json.loads(path.read_text())
        }
        for path in run.directory.glob("epochs-*.json")
    }


def files_of(folder: Path, tag: str) -> int:
    """Count the workers that wrote their part of a checkpoint."""
    return len([*(folder / tag).glob("*zero_pp_rank_*_optim_states.pt")])


@proves(Kind.RETURN, Promise.PLANNED)
@pytest.mark.parametrize(
    ("stage", "kill", "back"),
    sampled(
        [
            (1, "1@1:backward", 7),  # epochs 0 and 1 are over, 2 is not
            (2, "0@4:backward", 6),  # the first step of an epoch
            (3, "3@1:backward", 6),
            (3, "0@4:gather", 8),
        ]
    ),
)
def test_its_loop_over_epochs_arrives_where_the_others_are(
    run: Launch, twin: Twin, tmp_path: Path, stage: int, kill: str, back: int
) -> None:
    frozen = ("--frozen",) if stage < 3 else ()
    spec = EngineSpec(
        script=EPOCHS,
        stage=stage,
        steps=12,
        global_batch=4,
        accumulation=1,
        dump="last",
        respawn=5,
        kills=(kill,),
        changes=(f"+{kill[0]}@{back}",),
        options=(f"--save={tmp_path}", *frozen),
    )
    killed = run(spec)
    check_survived(killed)
    there = [files_of(tmp_path, f"epoch{epoch}") for epoch in range(4)]
    assert there == [3 if int(kill[2]) < 3 * (n + 1) <= back else 4 for n in range(4)]
    assert killed.trace() == twin(killed).trace()
    assert sizes(killed) == [4, 3, 4]
    seen = seen_by(killed)
    (pid,) = [e["pid"] for e in killed.events("worker_started") if e["incarnation"] == 1]
    newcomer, others = seen.pop(pid), [*seen.values()]
    assert len(others) == 3
    for epoch in range(4):
        (mean, _, steps, kept), *rest = [one[epoch][1:] for one in others]
        assert all((one[0], one[2], one[3]) == (mean, steps, kept) for one in rest)
        if epoch < back // 3:
            assert (newcomer[epoch][0], newcomer[epoch][1]) == (0, None)
            assert stage < 3 or math.isnan(newcomer[epoch][2])
        else:
            assert newcomer[epoch][0] == 3 * (epoch + 1) - max(back, 3 * epoch)
            assert [newcomer[epoch][n] for n in (1, 3, 4)] == [mean, steps, kept]
            assert newcomer[epoch][2] == others[0][epoch][2]


@proves(Kind.RETURN, Promise.SENT_AWAY, victim="2", moment="1:gather")
def test_a_script_that_counts_its_batches_itself_is_refused_and_the_others_go_on(
    run: Launch, tmp_path: Path
) -> None:
    spec = EngineSpec(
        script=EPOCHS,
        steps=12,
        global_batch=4,
        accumulation=1,
        dump="never",
        respawn=5,
        kills=("2@1:gather",),
        changes=("+2@3",),
        options=(f"--save={tmp_path}", "--count"),
    )
    killed = run(spec)
    assert killed.returncode == 0, killed.output[-4000:]
    assert "count by engine.global_steps, or set respawn to 0" in killed.output
    assert sizes(killed) == [4, 3, 4, 3]
    assert [event["status"] for event in killed.events("worker_exited")][:2] == [
        "killed by SIGKILL",
        "exit code 2",
    ]


@proves(Kind.KILLS, Promise.PLANNED, victim="2 0", moment="2:backward 4:reduce")
@pytest.mark.slow
def test_four_workers_become_two_and_four_again(run: Launch, reference: Launch) -> None:
    """The second loss comes while the first newcomer is being built; each enters by itself."""
    spec = EngineSpec(
        stage=2,
        steps=90,
        dump="last",
        respawn=5,
        kills=("2@2:backward", "0@4:reduce"),
        sabotage=LATER.format(slot=0),
    )
    killed = run(spec)
    check_survived(killed)
    assert sizes(killed) == [4, 3, 2, 3, 4]
    assert [one[:2] for one in entered(killed)] == [(2, 1), (0, 1)]
    assert max_relative_difference(killed, reference(spec)) <= 1e-6


@proves(Kind.NEWCOMER, Promise.PLANNED)
@pytest.mark.parametrize(
    ("stage", "death"),
    sampled([(1, "0:startup"), (0, "0:agree"), (3, "0:move"), (1, "0:verify"), (3, "6:backward")]),
)
def test_a_newcomer_dies_while_it_is_built_or_enters(
    run: Launch, twin: Twin, reference: Launch, stage: int, death: str
) -> None:
    spec = spec_of(stage, 1, "backward")
    spec = replace(spec, kills=(*spec.kills, f"1.1@{death}"))
    killed = run(spec)
    check_recovered(killed, twin=twin(killed), reference=reference(spec))
    assert entered(killed)[-1] == (1, 2, BACK)


@proves(Kind.RETURN, Promise.LOGGED)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_monitors_go_back_to_the_first_worker(run: Launch, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    settings = settings_of(tmp_path, "csv_monitor", "tensorboard")
    killed = run(spec_of(1, 0, "backward", settings=settings))
    check_survived(killed)
    check_csv(killed, tmp_path)
    files = [*scalars(tmp_path)]
    # The first owner's and its own again; who took its place may have opened its own too late.
    assert 2 <= len(files) <= 3
    points = [place for file in files for place, _ in file]
    assert points == [8 * (step + 1) for step in range(STEPS)]
    owners = [event["pid"] for event in killed.events("worker_started")]
    newest = max((tmp_path / "job").glob("events.*"), key=lambda one: one.stat().st_mtime)
    assert newest.name.split(".")[-2] == str(owners[-1])


@proves(Kind.RETURN, Promise.WHOLE, victim="2", moment="4:backward")
@pytest.mark.parametrize("stage", sampled([1, 3]))
def test_it_comes_back_to_a_job_that_has_saved_and_had_nothing_to_load(
    run: Launch, twin: Twin, tmp_path: Path, stage: int
) -> None:
    """The script loads a checkpoint where there is one: the job's own, when it comes back."""
    spec = EngineSpec(
        script=str(SCRIPTS / "saving.py"),
        stage=stage,
        steps=8,
        respawn=5,
        options=(f"--save={tmp_path}", "--resume"),
        kills=("2@4:backward",),
        changes=("+2@6",),
    )
    killed = run(spec)
    check_survived(killed)
    assert entered(killed) == [(2, 1, 6)]
    assert killed.output.count("loaded None") == 1 and killed.output.count("loaded ") == 1
    (tmp_path / "latest").unlink()
    assert killed.trace() == twin(killed).trace()


@proves(Kind.RETURN, Promise.WHOLE, victim="2", moment="1:backward")
def test_it_loads_what_the_job_had_loaded_and_not_a_later_checkpoint(
    run: Launch, tmp_path: Path
) -> None:
    script, save = str(SCRIPTS / "saving.py"), f"--save={tmp_path}"
    first = run(EngineSpec(script=script, stage=3, options=(save,), dump="never"))
    assert (tmp_path / "latest").read_text() == "global_step6", first.output
    spec = EngineSpec(
        script=script,
        stage=3,
        dump="never",
        respawn=5,
        options=(save, f"--load={tmp_path}"),
        kills=("2@1:backward",),
        changes=("+2@4",),
    )
    second = run(spec)
    check_survived(second)
    assert entered(second) == [(2, 1, 4)]
    assert (tmp_path / "latest").read_text() == "global_step12"
    assert files_of(tmp_path, "loaded") == files_of(tmp_path, "global_step12") == 4


@proves(Kind.DAMAGE, Promise.OLDER, victim="0", moment="6:optimizer")
@pytest.mark.parametrize("stage", sampled([1, 2, 3]))
def test_who_came_in_a_step_redoes_the_one_before_as_well(
    run: Launch, reference: Launch, stage: int
) -> None:
    """Its script's state begins with the step that it entered; the others have the older one."""
    whole = EngineSpec(stage=stage, steps=STEPS)
    damage = FLIP.format(slot=0, steps=(BACK,), damaged=(BACK,))
    changes = ("2@2", f"+2@{BACK}")
    survived = run(
        replace(whole, changes=changes, kills=(f"0@{BACK}:optimizer",), sabotage=damage, respawn=5)
    )
    check_survived(survived)
    assert entered(survived)[0] == (2, 1, BACK)
    # Worker 0 may be back before the run ends, and then at a step of its own.
    losses = [event for event in survived.events("recovered") if not event["newcomers"]]
    assert {event["restored_step"] for event in losses} == {2, BACK - 1}
    assert max_relative_difference(survived, reference(whole)) <= FP32_BOUND
