"""TRL's SFTTrainer: it gathers within its loss, and keeps metrics of each micro-batch."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

from tests.deepspeed.conftest import Launch, Twin
from tests.deepspeed.harness import SCRIPTS, EngineSpec, check_recovered
from tests.deepspeed.hf_runs import AUTO, check_newcomer, check_tapes, tapes
from tests.deepspeed.test_hf_example import ExampleSpec
from tests.deepspeed.test_join import entered
from tests.faults.harness import ROOT, check_survived
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled


def spec_of(*kills: str, stage: int, **changes: Any) -> EngineSpec:
    """A stock script with "auto" values."""
    script, settings = str(SCRIPTS / "trl_sft.py"), json.dumps(AUTO)
    return EngineSpec(script=script, stage=stage, kills=kills, settings=settings, **changes)


@proves(Kind.KILL, Promise.PLANNED)
@pytest.mark.parametrize(
    ("stage", "kill", "options"),
    sampled(
        [
            (0, "3@2:forward", ()),
            (1, "0@3:snapshot", ()),
            (2, "1@2:backward", ("--lora",)),
            (2, "2@3:reduce", ("--packing",)),
            (3, "0@3:forward", ()),
            (3, "2@2:backward", ("--lora",)),
        ]
    ),
)
def test_a_kill_is_absorbed_and_each_step_counts_once(
    run: Launch, twin: Twin, reference: Launch, stage: int, kill: str, options: tuple[str, ...]
) -> None:
    spec = spec_of(kill, stage=stage, options=options)
    killed = run(spec)
    check_recovered(killed, twin=twin(killed), reference=reference(spec))
    check_tapes(killed, reference(spec), survivors=3, pads=True)
    assert "trained 6 steps" in killed.output


@proves(Kind.KILL, Promise.LOGGED)
@pytest.mark.parametrize(("stage", "kill"), sampled([(2, "1@4:evaluation"), (3, "0@4:save")]))
def test_an_evaluation_and_a_save_are_made_as_without_the_loss(
    run: Launch, reference: Launch, stage: int, kill: str
) -> None:
    spec = spec_of(kill, stage=stage, options=("--evaluate=2", "--save=4"))
    killed = run(spec)
    check_survived(killed)
    check_tapes(killed, reference(spec), survivors=3, pads=True)


@proves(Kind.RETURN, Promise.PLANNED, victim="1", moment="1:backward")
def test_a_lost_worker_comes_back(run: Launch, twin: Twin, reference: Launch) -> None:
    spec = spec_of("1@1:backward", stage=2, steps=7, respawn=5, changes=("+1@4",))
    killed = run(spec)
    check_recovered(killed, twin=twin(killed), reference=reference(spec))
    assert entered(killed) == [(1, 1, 4)]
    check_tapes(killed, reference(spec), survivors=3, pads=True)
    check_newcomer(killed, reference(spec), first=4, pads=True)


def preferring(*kills: str, stage: int, options: tuple[str, ...] = ()) -> EngineSpec:
    """A stock script of DPOTrainer."""
    return replace(
        spec_of(*kills, stage=stage, options=options), script=str(SCRIPTS / "trl_dpo.py")
    )


@proves(Kind.KILL, Promise.PLANNED)
@pytest.mark.parametrize(
    ("stage", "kill"),
    sampled([(1, "1@2:backward"), (2, "0@3:forward"), (3, "3@2:reduce")]),
)
def test_a_job_of_preferences_survives_a_kill(
    run: Launch, twin: Twin, reference: Launch, stage: int, kill: str
) -> None:
    """DPO gathers what it has of each sample, of which the workers have unequal numbers then."""
    spec = preferring(kill, stage=stage)
    killed = run(spec)
    check_recovered(killed, twin=twin(killed), reference=reference(spec))
    check_tapes(killed, reference(spec), survivors=3, pads=True)
    assert "trained 6 steps" in killed.output


@proves(Kind.KILL, Promise.PLANNED)
@pytest.mark.parametrize(
    ("stage", "kill", "options"),
    sampled(
        [
            (1, "1@2:backward", ()),
            (2, "0@3:forward", ()),
            (3, "2@2:forward", ()),
            # Loaded in ZeRO-3, which cuts the reference as well before it has an engine.
            (3, "0@3:reduce", ("--reload",)),
        ]
    ),
)
def test_a_reference_model_has_an_engine_beside_the_job(
    run: Launch, twin: Twin, reference: Launch, stage: int, kill: str, options: tuple[str, ...]
) -> None:
    spec = preferring(kill, stage=stage, options=("--full", *options))
    killed = run(spec)
    check_recovered(killed, twin=twin(killed), reference=reference(spec))
    check_tapes(killed, reference(spec), survivors=3, pads=True)
    assert killed.output.count("without an optimizer") == (stage == 3)
    assert killed.output.count("cut: True") == (4 if options else 0)


@proves(Kind.RETURN, Promise.PLANNED, victim="1", moment="1:backward")
@pytest.mark.parametrize(("stage", "options"), sampled([(2, ()), (3, ()), (3, ("--reload",))]))
def test_a_lost_worker_has_its_reference_model_again(
    run: Launch, twin: Twin, reference: Launch, stage: int, options: tuple[str, ...]
) -> None:
    """From the script; in ZeRO-3 from the others, as it may have been cut when it was loaded."""
    more = {"steps": 7, "respawn": 5, "changes": ("+1@4",)}
    spec = replace(preferring("1@1:backward", stage=stage, options=("--full", *options)), **more)
    killed = run(spec)
    check_recovered(killed, twin=twin(killed), reference=reference(spec))
    assert entered(killed) == [(1, 1, 4)]
    check_newcomer(killed, reference(spec), first=4, pads=True)


@proves(Kind.WRONG_SCRIPT, Promise.REFUSED)
@pytest.mark.parametrize(
    ("stage", "option", "words"),
    [
        (2, "--sync", "sync_ref_model is True"),
        (3, "--precompute", "the model has an engine without an optimizer already"),
    ],
)
def test_reference_models_that_change_or_are_the_model_are_refused(
    run: Launch, stage: int, option: str, words: str
) -> None:
    refused = run(preferring(stage=stage, options=("--full", option)))
    assert refused.returncode == 2, refused.output[-4000:]
    assert words in refused.output and "Traceback" not in refused.output


@proves(Kind.KILL, Promise.LOGGED, victim="2", moment="4:evaluation")
def test_an_evaluation_of_preferences_is_made_again(run: Launch, reference: Launch) -> None:
    """Its metrics are means of means of batches, which are others with fewer workers."""
    spec = preferring("2@4:evaluation", stage=2, options=("--evaluate=2",))
    killed = run(spec)
    check_survived(killed)
    wanted = [one[:2] for one in tapes(reference(spec))[0]]
    assert [[one[:2] for one in tape] for tape in tapes(killed)] == 3 * [wanted]
    assert killed.output.count("logs metrics of evaluations that are means of") == 1


class TrlSpec(ExampleSpec):
    """One launch of the example."""

    def arguments(self, data: Path, directory: Path) -> list[str]:
        """TRL's default is bf16, which the Trainer refuses without a GPU."""
        return [*ExampleSpec.arguments(self, data, directory), "--bf16=False"]


@proves(Kind.KILL, Promise.PLANNED, victim="2", moment="2:backward")
def test_the_example_survives_a_kill(run: Launch, twin: Twin, reference: Launch) -> None:
    script = str(ROOT / "examples" / "train_trl.py")
    spec = TrlSpec(script=script, stage=3, settings=json.dumps(AUTO), kills=("2@2:backward",))
    killed = run(spec)
    check_recovered(killed, twin=twin(killed), reference=reference(spec))
    assert (killed.directory / "model" / "adapter_model.safetensors").is_file()
