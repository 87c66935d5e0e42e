"""Trainers whose batches have losses of several kinds: of two tasks by turns, and of experts."""

import json

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from tests.deepspeed.conftest import Launch
from tests.deepspeed.harness import FP32_BOUND, SCRIPTS, EngineSpec
from tests.deepspeed.hf_runs import AUTO
from tests.faults.harness import max_relative_difference
from tests.proofs import Kind, Promise, proves


def spec_of(*kills: str, options: tuple[str, ...]) -> EngineSpec:
    """Two samples are in a micro-batch, eight in those of all workers, 16 in a step."""
    script = str(SCRIPTS / "hf_tasks.py")
    settings = json.dumps(AUTO)
    return EngineSpec(
        script=script, kills=kills, options=options, stage=2, global_batch=16, settings=settings
    )


def apart(run: Launch, reference: Launch, kill: str, *options: str) -> float:
    """Return how far the losses are from those of the undisturbed run."""
    killed = run(spec_of(kill, options=options))
    assert killed.returncode == 0, killed.output[-4000:]
    assert len(killed.events("fault_fired")) == 1
    return max_relative_difference(killed, reference(spec_of(options=options)))


@pytest.mark.slow
@proves(Kind.KILL, Promise.CLOSE)
@pytest.mark.parametrize(
    ("block", "kill"), [(8, "1@2:backward"), (16, "1@1:backward"), (80, "1@5:backward")]
)
def test_a_task_that_is_met_first_after_a_loss_is_asked_then(
    run: Launch, reference: Launch, block: int, kill: str
) -> None:
    """The tasks are by turns those of a micro-batch, of a step, and of the first five steps."""
    assert apart(run, reference, kill, f"--block={block}") <= FP32_BOUND


@proves(Kind.KILL, Promise.NAMED)
def test_a_batch_of_two_tasks_is_told(run: Launch) -> None:
    """Each worker has another task; the collator drops what its samples have not in common."""
    killed = run(spec_of("1@2:backward", options=("--block=2", "--drops")))
    assert killed.returncode == 0, killed.output[-4000:]
    assert len(killed.events("fault_fired")) == 1
    # Of three workers, in the order of samples: 0 to 3, 3 to 6, 6 to 8.
    assert 1 <= killed.output.count("samples of one batch of worker") <= 2
    assert "(input_ids, labels | input_ids, labels, kind, weight)" in killed.output


@pytest.mark.slow
@proves(Kind.WRONG_INPUT, Promise.REFUSED)
@pytest.mark.parametrize("model", ["mixtral", "qwen"])
def test_the_loss_of_a_router_is_refused_in_the_first_step(run: Launch, model: str) -> None:
    refused = run(spec_of(options=(f"--model={model}",)))
    assert refused.returncode == 2 and not refused.files.steps
    assert "with twice the items of a step the loss is" in refused.output
    assert 'have the key "loss" of the section "elaswave" say' in refused.output


@pytest.mark.slow
@proves(Kind.KILL, Promise.CLOSE)
def test_the_loss_of_a_router_is_nearest_as_a_term(run: Launch, reference: Launch) -> None:
    """It compares the samples of a batch, so that no weight is quite right."""
    kill, model = "1@2:backward", "--model=mixtral"
    by_terms = apart(run, reference, kill, model, "--terms")
    by_tokens = apart(run, reference, kill, model, "--says=tokens")
    assert FP32_BOUND < by_terms < 1e-4 < by_tokens < 2e-2
