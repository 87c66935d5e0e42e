"""The rules of convoys: which cases are in one, what it does, and which case is to blame."""

from dataclasses import replace

import pytest

from elaswave_plugin.config import parse_kill
from tests.convoys import blamed, check_case, dealt_out, first_difference, joined, kill_of
from tests.faults.harness import JobSpec, Trace

KILLS = ("0@2:data", "1@3:backward", "2@4:gather")
RESTORED = {"0@2:data": 2, "1@3:backward": 3, "2@4:gather": 5}
WANTED = "abcdef"


def trace(states: str) -> Trace:
    return {step: ("loss", "norm", state) for step, state in enumerate(states)}


@pytest.mark.parametrize(
    ("ours", "place"),
    [
        ("abcdef", None),
        ("abXXXX", 0),
        ("abcXef", 1),
        ("abcdXX", 2),
        ("abcde", 2),
        ("abc", 1),
        ("XXXXXX", 0),
    ],
)
def test_the_fault_before_the_first_difference_is_to_blame(ours: str, place: int | None) -> None:
    """Its case fails, those before it pass, those behind it are not run."""
    differs = first_difference(trace(ours), trace(WANTED))
    assert (differs is None) == (place is None)
    for own, kill in enumerate(KILLS):
        if own == place:
            with pytest.raises(AssertionError, match=f"from step {differs} on, after {kill} of 0@"):
                check_case(own, KILLS, RESTORED, differs)
        elif place is not None and own > place:
            with pytest.raises(pytest.skip.Exception, match=f"not run: .* after {KILLS[place]}"):
                check_case(own, KILLS, RESTORED, differs)
        else:
            check_case(own, KILLS, RESTORED, differs)


def test_a_step_that_is_made_again_belongs_to_the_fault_behind_it() -> None:
    """A fault that nobody recovered from counts by its own step."""
    assert blamed(KILLS, {**RESTORED, KILLS[1]: 2}, 2) == 1
    assert blamed(KILLS, {}, 3) == 1


SPECS = [
    replace(base, kills=(f"{slot}@2:{phase}",))
    for base in (JobSpec(), JobSpec(options=("--bf16",)))
    for slot in range(4)
    for phase in ("data", "forward", "backward")
]


def test_each_case_is_in_one_convoy_of_one_job_with_other_victims() -> None:
    dealt = dealt_out(SPECS, most=3)
    assert sorted(index for convoy in dealt for index in convoy) == list(range(len(SPECS)))
    assert dealt[0] == [0] and len(dealt) == 1 + 4 + 4
    for convoy in dealt:
        specs = [SPECS[index] for index in convoy]
        assert len({replace(spec, kills=()) for spec in specs}) == 1
        assert len({kill_of(spec).slot for spec in specs}) == len(convoy) <= 3
    # The same in every session, and in no order of slots.
    assert dealt == dealt_out(SPECS, most=3)
    assert any(sorted(convoy) != convoy for convoy in dealt)


def test_a_case_alone_is_its_own_job() -> None:
    for returns in (False, True):
        assert joined(SPECS[:1], returns=returns) == SPECS[0]


def test_faults_follow_each_other_with_returns_between_or_none() -> None:
    specs = [SPECS[index] for index in (3, 0, 6)]
    plain = joined(specs, returns=False)
    assert plain == replace(JobSpec(), kills=("1@2:data", "0@3:data", "2@4:data"))
    back = joined(specs, returns=True)
    assert back.kills == ("1@2:data", "0@6:data", "2@10:data")
    assert back.changes == ("+1@4", "+0@8")
    assert back.steps - parse_kill(back.kills[-1]).step == specs[0].steps - 2
