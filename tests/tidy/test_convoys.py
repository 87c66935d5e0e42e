"""The rules of convoys: which cases are in one, in which steps they strike, which is to blame."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.checkpoints.striker import Strike
from tests.convoys import (
    blamed,
    check_case,
    convoys,
    dealt_out,
    first_difference,
    job_of,
    joined,
)
from tests.faults.harness import JobSpec, Trace

NAMES = ("0@2:data", "1@3:backward", "2@4:gather")
KILLS = JobSpec(kills=NAMES).faults
RESTORED = {"0@2:data": 2, "1@3:backward": 3, "2@4:gather": 5}
SPECS = [
    replace(base, kills=(f"{slot}@2:{phase}",))
    for base in (JobSpec(), JobSpec(options=("--bf16",)))
    for slot in range(4)
    for phase in ("data", "forward", "backward")
]


def trace(states: str) -> Trace:
    return {step: ("loss", "norm", state) for step, state in enumerate(states)}


@pytest.mark.parametrize(
    ("ours", "place"),
    [("abXXXX", 0), ("abcXef", 1), ("abcdXX", 2), ("abcde", 2), ("abc", 1), ("", 0), ("X", 0)],
)
def test_the_fault_behind_which_the_first_difference_stands_is_to_blame(
    ours: str, place: int
) -> None:
    """Its case fails, those before it pass, those behind it are not run."""
    differs = first_difference(trace(ours), trace("abcdef"), KILLS, RESTORED)
    for own, kill in enumerate(NAMES):
        if own == place:
            with pytest.raises(AssertionError, match=f"from step {differs} on, after {kill} of 0@"):
                check_case((kill,), KILLS, RESTORED, differs)
        elif own > place:
            with pytest.raises(pytest.skip.Exception, match=f"not run: .* after {NAMES[place]}"):
                check_case((kill,), KILLS, RESTORED, differs)
        else:
            check_case((kill,), KILLS, RESTORED, differs)


def test_an_equal_run_blames_nobody() -> None:
    assert first_difference(trace("abcdef"), trace("abcdef"), KILLS, RESTORED) is None
    for kill in NAMES:
        check_case((kill,), KILLS, RESTORED, None)


def test_a_fault_that_nobody_recovered_from_is_to_blame_in_an_equal_run() -> None:
    without = {kill: step for kill, step in RESTORED.items() if kill != NAMES[1]}
    differs = first_difference(trace("abcdef"), trace("abcdef"), KILLS, without)
    assert differs == 3 and blamed(KILLS, without, differs) == NAMES[1]


def test_a_step_that_is_done_again_belongs_to_the_fault_behind_it() -> None:
    assert blamed(KILLS, {**RESTORED, NAMES[1]: 2}, 2) == NAMES[1]


def test_a_case_of_two_faults_fails_for_each_and_is_not_run_behind_an_earlier_one() -> None:
    for differs in (3, 4):
        with pytest.raises(AssertionError, match=f"after {NAMES[differs - 2]} of"):
            check_case(NAMES[1:], KILLS, RESTORED, differs)
    with pytest.raises(pytest.skip.Exception, match="not run"):
        check_case(NAMES[1:], KILLS, RESTORED, 2)


def slots(kills: Sequence[str], group: int = 1) -> list[int]:
    return [int(kill[0]) // group for kill in kills]


@pytest.mark.parametrize(("most", "group", "jobs"), [(3, 1, 9), (2, 1, 13), (3, 2, 13)])
def test_each_case_is_in_one_convoy_of_its_job_with_other_victims(
    most: int, group: int, jobs: int
) -> None:
    dealt = dealt_out(SPECS, most=most, victim=lambda kill: kill.slot // group)
    assert sorted(index for convoy in dealt for index in convoy) == list(range(len(SPECS)))
    assert dealt[0] == [0] and len(dealt) == jobs
    for convoy in dealt:
        specs = [SPECS[index] for index in convoy]
        assert len({job_of(spec) for spec in specs}) == 1
        victims = slots([spec.kills[0] for spec in specs], group)
        assert len({*victims}) == len(victims) <= most
    # The same in every session, and in no order of slots.
    assert dealt == dealt_out(SPECS, most=most, victim=lambda kill: kill.slot // group)
    assert any(sorted(convoy) != convoy for convoy in dealt)


def test_a_case_of_two_faults_takes_the_place_of_two() -> None:
    two = JobSpec(kills=("0@1:backward", "1@3:forward"))
    specs = [two, two, *(replace(two, kills=(f"{slot}@1:data",)) for slot in range(4))]
    victims = [
        sorted(slot for index in convoy for slot in slots(specs[index].kills))
        for convoy in dealt_out(specs, most=3)
    ]
    assert sorted(victims) == [[0, 1], [0, 1, 2], [0, 1, 3]]


def test_a_case_alone_is_its_own_job() -> None:
    assert joined(SPECS[:1], first=5) == SPECS[0]


def test_faults_follow_each_other_from_the_step_of_the_first_on() -> None:
    job = joined([SPECS[index] for index in (3, 0, 6)])
    assert job == replace(JobSpec(), kills=("1@2:data", "0@3:data", "2@4:data"))


def test_faults_begin_in_a_given_step_and_wait_for_their_phase() -> None:
    class Saving(JobSpec):
        def step_with(self, phase: str, first: int) -> int:
            return first + first % 2 if phase == "save" else first

    two = Saving(kills=("0@1:backward", "3@3:save"))
    specs = [replace(two, kills=("1@3:data",)), two, replace(two, kills=("2@4:gather",))]
    job = joined(specs, first=1)
    assert job.kills == ("1@1:data", "0@2:backward", "3@4:save", "2@5:gather")
    assert job.steps == two.steps


def test_a_fault_keeps_its_own_step_where_no_other_is_in_it() -> None:
    job = joined([JobSpec(kills=(kill,)) for kill in ("0@1:data", "1@1:data", "2@5:gather")])
    assert job.kills == ("0@1:data", "1@2:data", "2@5:gather")


def test_faults_that_are_no_kills_are_dealt_out_by_their_own_victims() -> None:
    strikes = [Strike(step, "open", slot=step % 2) for step in (3, 1, 2)]
    specs = [JobSpec(strikes=(one,)) for one in (strikes[0], *strikes)]
    params = convoys(range(4), lambda index: specs[index], victim=lambda one: one.slot)
    marks = [next(mark.args for mark in one.marks if mark.name == "convoy") for one in params]
    # Two have the same victim, and the later one comes last.
    assert marks[1][0] != marks[2][0]
    (other,) = (index for index in (1, 2) if marks[index][0] == marks[3][0])
    assert (marks[3][1] < marks[other][1]) == (strikes[2].step < strikes[other - 1].step)
    assert joined(specs[1:3]).strikes == (strikes[0], Strike(4, "open", slot=1))
