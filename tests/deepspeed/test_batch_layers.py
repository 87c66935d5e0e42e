"""Layers whose output for a sample depends on the others of its batch, after a loss of workers."""

import json

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from tests.deepspeed.conftest import Launch
from tests.deepspeed.harness import FP32_BOUND, SCRIPTS, EngineSpec
from tests.deepspeed.hf_runs import AUTO
from tests.faults.harness import Outcome, max_relative_difference
from tests.proofs import Kind, Promise, proves

TOLD = "model.norm.1 (BatchNorm1d) normalises a sample by the others of its micro-batch"

APART = "of itself apart from the sum of those of its parts"


def spec_of(*kills: str, layer: str, by: str) -> EngineSpec:
    """Two samples are in a micro-batch of the launch."""
    return EngineSpec(
        script=str(SCRIPTS / "batch_layers.py"),
        kills=kills,
        options=(f"--layer={layer}", f"--by={by}"),
        stage=2,
        global_batch=16,
        settings=json.dumps(AUTO if by == "trainer" else {}),
    )


def killed_run(run: Launch, *kills: str, layer: str, by: str) -> Outcome:
    """Every kill of it has fired."""
    killed = run(spec_of(*kills, layer=layer, by=by))
    assert killed.returncode == 0, killed.output[-4000:]
    assert len(killed.events("fault_fired")) == len(kills)
    return killed


@proves(Kind.KILL, Promise.NAMED)
@pytest.mark.parametrize(
    ("layer", "by"),
    [
        ("batch", "hand"),
        pytest.param("batch", "trainer", marks=pytest.mark.slow),
        pytest.param("without statistics", "trainer", marks=pytest.mark.slow),
    ],
)
def test_batch_norm_is_told_at_the_first_loss(run: Launch, layer: str, by: str) -> None:
    """A second loss says nothing more."""
    kills = ("1@2:backward", "2@4:backward")
    killed = killed_run(run, *kills, layer=layer, by=by)
    assert killed.output.count(TOLD) == 1


@pytest.mark.slow
@proves(Kind.KILL, Promise.CLOSE)
@pytest.mark.parametrize("by", ["hand", "trainer"])
def test_batch_norm_that_is_kept_in_evaluation_mode_says_nothing(
    run: Launch, reference: Launch, by: str
) -> None:
    killed = killed_run(run, "1@2:backward", layer="frozen", by=by)
    assert "normalises a sample" not in killed.output and APART not in killed.output
    assert max_relative_difference(killed, reference(killed.spec)) <= FP32_BOUND


@pytest.mark.slow
@proves(Kind.KILL, Promise.NAMED)
def test_a_capacity_of_experts_is_told_where_the_loss_is_divided_by_items(run: Launch) -> None:
    killed = killed_run(run, "1@2:backward", layer="capacity", by="trainer")
    assert killed.output.count(APART) == 1


@pytest.mark.slow
@proves(Kind.WRONG_INPUT, Promise.REFUSED)
def test_a_capacity_of_experts_is_refused_where_the_loss_is_a_mean(run: Launch) -> None:
    refused = run(spec_of(layer="capacity", by="hand"))
    assert refused.returncode == 2 and not refused.files.steps
    assert "is not made up of those of its parts" in refused.output
