"""Random sequences of faults: what is drawn, and some seeds of Megatron's jobs."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tests.chaos.draws import STEPS, Event, draw, kinds
from tests.chaos.runs import Played, Stage
from tests.chaos.verdict import judge
from tests.faults.harness import Zygote
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled


def test_a_seed_draws_the_same_events_every_time_and_others_draw_others() -> None:
    for name in kinds():
        drawn = [str(draw(name, seed)) for seed in range(50)]
        assert drawn == [str(draw(name, seed)) for seed in range(50)]
        assert len(set(drawn)) == 50


def test_everything_is_drawn_and_leaves_steps_to_go_on_in() -> None:
    events = [event for seed in range(200) for event in draw("dp", seed).events]
    found = Counter(event.kind for event in events)
    assert found.keys() == {
        *(
            "kill",
            "agent",
            "node",
            "stop",
            "loop",
            "gil",
            "sever",
            "drain",
            "whole",
            "join",
            "grow",
        ),
        *("slow", "flip", "ruin"),
    }
    assert any(event.on_entry for event in events)
    assert {event.phase for event in events} >= {"save", "evaluation", "replay", "startup"}
    assert max(event.step for event in events if event.kind != "ruin") <= STEPS - 4
    # The job ends with it: no step has to follow.
    assert max(event.step for event in events) < STEPS


@pytest.fixture
def stage(zygote: Zygote, data: Path, tmp_path: Path) -> Stage:
    return Stage(zygote, data=data, folder=tmp_path)


@proves(Kind.CHAOS, Promise.EQUAL)
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "seed"), sampled([("dp", 0), ("dp", 2), ("hybrid", 1)]))
def test_a_seed_of_megatron(stage: Stage, name: str, seed: int) -> None:
    scenario = draw(name, seed)
    played, reference = stage.play(scenario), stage.reference(scenario.spec)
    judge(played, reference)
    check_that_it_sees(played)
    # Negative control: another run has other losses.
    other = replace(scenario.spec, options=(*scenario.spec.options, "--seed=4321"))
    with pytest.raises(AssertionError, match="not bit-equal"):
        judge(played, stage.reference(other))


def check_that_it_sees(played: Played) -> None:
    """Negative control: an event that did not happen is missed."""
    never = Event(number=len(played.scenario.events), kind="kill", step=1, phase="forward")
    scenario = replace(played.scenario, events=(*played.scenario.events, never))
    with pytest.raises(AssertionError, match="did not happen"):
        judge(replace(played, scenario=scenario), played.outcome)
