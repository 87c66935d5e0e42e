"""The life of a trainer goes one way, but for views of the job, also where it is told once more."""

import pytest

from elaswave_plugin.core.agreement.life import Life, Process, Stage


def test_the_phases_of_a_worker_of_the_launch_and_of_the_one_in_its_place() -> None:
    first, second = Life(incarnation=0), Life(incarnation=1)
    seen = [first.phase]
    for stage in (Stage.JOINED, Stage.TRAINING, Stage.STOPPING):
        first.reach(stage)
        seen.append(first.phase)
    first.announced = "evaluation"
    seen.append(first.phase)
    for stage in (Stage.QUIESCED, Stage.TRAINING):
        first.reach(stage)
        seen.append(first.phase)
    first.process = Process.GONE
    assert [*seen, first.phase] == [
        *("starting", "joined", "training", "stopping", "evaluation", "quiesced", "training"),
        "exited",
    ]
    seen = [second.phase]
    for stage in (Stage.BUILDING, Stage.WAITING_TO_ENTER, Stage.TRAINING, Stage.LEAVING):
        second.reach(stage)
        seen.append(second.phase)
    second.process = Process.GONE
    assert [*seen, second.phase] == [
        *("starting", "building", "waiting to enter", "training", "leaving", "leaving"),
    ]


@pytest.mark.parametrize("now", Stage)
def test_what_is_said_once_more_takes_it_back_nowhere(now: Stage) -> None:
    in_the_job = {Stage.TRAINING, Stage.STOPPING, Stage.QUIESCED}
    for stage in Stage:
        life = Life(incarnation=0, stage=now)
        life.reach(stage)
        stays = stage < now and not {stage, now} <= in_the_job
        assert stays <= (life.stage is now)
        assert life.stage >= now or {now, stage} <= in_the_job


@pytest.mark.parametrize("stage", [Stage.STOPPING, Stage.QUIESCED])
def test_one_that_stops_to_be_let_in_has_not_entered(stage: Stage) -> None:
    life = Life(incarnation=1, stage=Stage.WAITING_TO_ENTER)
    life.reach(stage)
    assert not life.has_entered and life.phase == "waiting to enter"
    life.reach(Stage.TRAINING)
    assert life.has_entered


@pytest.mark.parametrize("process", Process)
def test_one_that_counts_as_gone_takes_no_part(process: Process) -> None:
    life = Life(incarnation=0, stage=Stage.TRAINING, process=process)
    assert life.lives is life.works is life.is_member is (process is Process.RUNS)
