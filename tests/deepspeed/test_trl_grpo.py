"""TRL's GRPOTrainer and RLOOTrainer: they generate their samples, and compare them over workers."""

import json
from typing import Any

import pytest

pytest.importorskip("trl")

from tests.deepspeed.conftest import Launch, Twin
from tests.deepspeed.harness import SCRIPTS, EngineSpec, check_recovered, rates
from tests.deepspeed.hf_runs import AUTO, check_tapes, tapes
from tests.deepspeed.test_join import entered
from tests.faults.harness import Outcome, check_survived
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled


def spec_of(*kills: str, stage: int, options: tuple[str, ...] = (), **more: Any) -> EngineSpec:
    """A stock script: two prompts a step, with four completions each.

    Each of the two micro-batches of a step is served the samples of its generation.
    """
    script, settings = str(SCRIPTS / "trl_grpo.py"), json.dumps(AUTO)
    more = {
        "script": script,
        "settings": settings,
        "options": options,
        "reads": 2,
        "steps": 4,
        **more,
    }
    return EngineSpec(stage=stage, kills=kills, **more)


def check_planned(run: Outcome, *, twin: Outcome, reference: Outcome) -> None:
    """Losses, state and log are those of the planned departure, bit by bit.

    Shares draw other completions than those of the launch, so the numbers are not the undisturbed
    run's. What callbacks see, and when, is.
    """
    check_survived(run)
    check_survived(twin)
    assert run.trace() == twin.trace()
    assert rates(run) == rates(reference)
    wanted, undisturbed = tapes(twin)[0], tapes(reference)[0]
    assert [one[:2] for one in wanted] == [one[:2] for one in undisturbed]
    seen = tapes(run)
    assert len(seen) == len(tapes(twin)) == 4 - len(run.spec.kills)
    assert all(tape == wanted for tape in seen)


LORA, BETA = "--lora", "--beta=0.1"


@proves(Kind.KILL, Promise.PLANNED)
@pytest.mark.parametrize(
    ("stage", "kill", "options"),
    sampled(
        [
            (0, "2@2:data", ()),
            (0, "1@1:forward", (LORA, BETA)),
            (1, "0@2:backward", (LORA, BETA)),
            (1, "3@1:optimizer", (BETA,)),
            (2, "1@2:forward", (BETA,)),
            (2, "2@0:forward", (LORA,)),
            (2, "0@2:gather", ("--generations=8",)),
            (2, "3@1:snapshot", ("--loss=grpo",)),
            (3, "3@2:reduce", ()),
            (3, "0@1:forward", (LORA, BETA)),
            (3, "2@0:forward", ()),
            (3, "0@2:optimizer", ("--loss=bnpo",)),
        ]
    ),
)
def test_a_kill_equals_the_planned_departure(
    run: Launch, twin: Twin, reference: Launch, stage: int, kill: str, options: tuple[str, ...]
) -> None:
    """A step generates in its forward phase."""
    spec = spec_of(kill, stage=stage, options=options)
    killed = run(spec)
    check_planned(killed, twin=twin(killed), reference=reference(spec))
    told = "logs metrics beside its loss (kl, entropy, clip ratios"
    assert killed.output.count(told) == 1 and told not in reference(spec).output


@pytest.mark.slow
@proves(Kind.KILL, Promise.PLANNED)
@pytest.mark.parametrize("stage", [2, 3])
def test_two_losses_equal_their_departures(
    run: Launch, twin: Twin, reference: Launch, stage: int
) -> None:
    spec = spec_of("1@1:backward", "3@2:forward", stage=stage, options=(LORA, BETA))
    killed = run(spec)
    check_planned(killed, twin=twin(killed), reference=reference(spec))


@proves(Kind.KILL, Promise.PLANNED)
@pytest.mark.parametrize(
    ("stage", "kill", "loss"),
    sampled([(2, "1@1:backward", "dapo"), (3, "0@2:forward", "grpo")]),
)
def test_prompts_are_weighed_as_without_the_loss(
    run: Launch, twin: Twin, reference: Launch, stage: int, kill: str, loss: str
) -> None:
    """Completions that nobody draws are the same wherever they are generated."""
    options = ("--greedy", LORA, "--beta=0.5", f"--loss={loss}")
    spec = spec_of(kill, stage=stage, options=options)
    killed = run(spec)
    check_recovered(killed, twin=twin(killed), reference=reference(spec))
    check_tapes(killed, reference(spec), survivors=3, pads=True)
    # Groups are whole: all rewards of a prompt are the same.
    logged = [seen for _, _, seen in tapes(killed)[0] if "frac_reward_zero_std" in seen]
    assert len(logged) == spec.steps
    assert {seen["frac_reward_zero_std"] for seen in logged} == {1.0}


@proves(Kind.KILL, Promise.PLANNED)
@pytest.mark.parametrize(("stage", "kill"), sampled([(2, "2@2:evaluation"), (3, "0@2:save")]))
def test_an_evaluation_and_a_save_are_made_again(
    run: Launch, twin: Twin, reference: Launch, stage: int, kill: str
) -> None:
    spec = spec_of(kill, stage=stage, options=("--evaluate=2", "--save=2"))
    killed = run(spec)
    check_survived(killed)
    assert killed.trace() == twin(killed).trace()
    wanted = [one[:2] for one in tapes(reference(spec))[0]]
    assert [[one[:2] for one in tape] for tape in tapes(killed)] == 3 * [wanted]


@proves(Kind.KILL, Promise.PLANNED, victim="1", moment="1:backward")
def test_an_evaluation_after_a_loss_keeps_groups_whole(run: Launch, reference: Launch) -> None:
    """Its batches have two prompts with four completions each, for three workers."""
    options = ("--greedy", LORA, "--beta=0.5", "--evaluate=1")
    spec = spec_of("1@1:backward", stage=2, options=options, steps=3)
    killed = run(spec)
    check_survived(killed)
    check_tapes(killed, reference(spec), survivors=3, pads=True)


@proves(Kind.RETURN, Promise.PLANNED, victim="1", moment="1:backward")
def test_a_lost_worker_comes_back(run: Launch, twin: Twin, reference: Launch) -> None:
    spec = spec_of("1@1:backward", stage=2, steps=7, respawn=5, changes=("+1@4",))
    killed = run(spec)
    planned, undisturbed = twin(killed), reference(spec)
    check_planned(killed, twin=planned, reference=undisturbed)
    assert entered(killed) == [(1, 1, 4)]
    survivors = tapes(killed)[0]
    (newcomers,) = tapes(killed, incarnation=1)
    place = [one[:2] for one in survivors].index(["on_step_begin", 4])
    assert newcomers[place - len(survivors) :] == survivors[place:]


@proves(Kind.KILL, Promise.PLANNED)
@pytest.mark.parametrize(
    ("stage", "kill", "options"),
    sampled([(2, "3@2:backward", (BETA,)), (3, "1@1:forward", (LORA, BETA))]),
)
def test_a_job_that_leaves_one_out_survives_a_kill(
    run: Launch, twin: Twin, reference: Launch, stage: int, kill: str, options: tuple[str, ...]
) -> None:
    """RLOOTrainer compares a completion with the others of its prompt."""
    spec = spec_of(kill, stage=stage, options=("--rloo", *options))
    killed = run(spec)
    check_planned(killed, twin=twin(killed), reference=reference(spec))


@proves(Kind.WRONG_SCRIPT, Promise.REFUSED)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--per-generation=4",), "steps_per_generation is 4 and num_iterations 1"),
        (("--iterations=2",), "steps_per_generation is 2 and num_iterations 2"),
    ],
)
def test_samples_of_several_steps_are_refused(
    run: Launch, options: tuple[str, ...], words: str
) -> None:
    refused = run(spec_of(stage=2, options=options))
    assert refused.returncode == 2, refused.output[-4000:]
    assert words in refused.output and "Traceback" not in refused.output
