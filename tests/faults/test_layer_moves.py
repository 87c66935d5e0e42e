"""After a loss layers change pipeline stage in the running processes, bit for bit."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.faults.conftest import Launch, Reference
from tests.faults.harness import JobSpec, Outcome, check_equal
from tests.faults.hybrid_matrix import PP2_DP2, PP4_DP2, TP2_PP2_DP2
from tests.faults.test_outside_a_step import saved_tensors
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled

PP2 = replace(PP2_DP2, options=(*PP2_DP2.options, "--num-layers=4"))


def cuts_after(run: Outcome) -> list[list[int]]:
    """The layout's cuts after each view change, which all workers tell alike."""
    by_epoch: dict[int, list[list[int]]] = {}
    for event in run.events("recovered"):
        by_epoch.setdefault(event["epoch"], []).append(event["layout_after"]["cuts"])
    assert all(one == cuts[0] for cuts in by_epoch.values() for one in cuts)
    return [by_epoch[epoch][0] for epoch in sorted(by_epoch)]


@proves(Kind.KILL, Promise.EQUAL)
@pytest.mark.parametrize(
    ("kills", "cuts"),
    [
        (("0@3:backward",), [[0, 1, 4]]),
        (("3@2:forward",), [[0, 3, 4]]),
        # Level again when the other stage is as narrow.
        (("1@1:backward", "2@3:reduce"), [[0, 1, 4], [0, 2, 4]]),
    ],
    ids=["first stage", "last stage", "both"],
)
def test_the_narrow_stage_has_fewer_layers(
    run: Launch, reference: Reference, kills: tuple[str, ...], cuts: list[list[int]]
) -> None:
    survived = run(replace(PP2, kills=kills))
    check_equal(survived, reference(PP2))
    assert cuts_after(survived) == cuts


@proves(Kind.KILL, Promise.EQUAL, victim="4", moment="2:optimizer")
@pytest.mark.slow
def test_layers_with_tensor_parallel_parts(run: Launch, reference: Reference) -> None:
    spec = replace(TP2_PP2_DP2, options=(*TP2_PP2_DP2.options, "--num-layers=4"))
    survived = run(replace(spec, kills=("4@2:optimizer",)))
    check_equal(survived, reference(spec))
    assert cuts_after(survived) == [[0, 3, 4]]


@proves(Kind.KILL, Promise.EQUAL, victim="5", moment="3:backward")
@pytest.mark.slow
def test_layers_of_a_deep_pipeline_in_bf16(run: Launch, reference: Reference) -> None:
    spec = replace(PP4_DP2, options=(*PP4_DP2.options, "--num-layers=12"))
    survived = run(replace(spec, kills=("5@3:backward",)))
    check_equal(survived, reference(spec))
    assert cuts_after(survived) == [[0, 4, 8, 9, 12]]


@proves(Kind.KILL, Promise.EQUAL, victim="5", moment="3:backward")
@pytest.mark.slow
def test_layers_of_a_deep_pipeline_with_no_more_room_than_at_launch(
    run: Launch, reference: Reference
) -> None:
    spec = replace(PP4_DP2, options=(*PP4_DP2.options, "--num-layers=12"))
    option = "--elaswave-activation-room=1"
    survived = run(replace(spec, options=(*spec.options, option), kills=("5@3:backward",)))
    check_equal(survived, reference(spec))
    # With more room the first stage takes four layers, in four micro-batches and more at once.
    assert cuts_after(survived) == [[0, 3, 7, 9, 12]]


@proves(Kind.RETURN, Promise.EQUAL, victim="1", moment="2:backward")
def test_layers_go_back_when_the_worker_comes_back(run: Launch, reference: Reference) -> None:
    spec = replace(
        PP2,
        steps=10,
        respawn=1,
        kills=("1@2:backward",),
        awaits=((5, 1),),
        options=(*PP2.options, "--elaswave-move-layers=always"),
    )
    survived = run(spec)
    check_equal(survived, reference(spec))
    assert cuts_after(survived) == [[0, 1, 4], [0, 2, 4]]


@proves(Kind.KILL, Promise.EQUAL, victim="1", moment="2:backward")
@pytest.mark.slow
def test_layers_stay_for_a_worker_that_will_come_back(run: Launch, reference: Reference) -> None:
    spec = replace(PP2, steps=10, respawn=1, kills=("1@2:backward",), awaits=((5, 1),))
    survived = run(spec)
    check_equal(survived, reference(spec))
    assert cuts_after(survived) == [[0, 2, 4], [0, 2, 4]]


@proves(Kind.IN_RECOVERY, Promise.EQUAL, victim="0")
@pytest.mark.parametrize("phase", sampled(["move", "rebind", "verify", "replay"]))
def test_a_death_while_layers_move(run: Launch, reference: Reference, phase: str) -> None:
    survived = run(replace(PP2, kills=("0@3:backward", f"2@3:{phase}")))
    check_equal(survived, reference(PP2))
    assert cuts_after(survived)[-1] == [0, 2, 4]


@proves(Kind.KILL, Promise.WHOLE, victim="0", moment="3:backward")
@pytest.mark.slow
def test_a_checkpoint_after_a_move_is_that_of_a_job_that_never_moved(
    run: Launch, tmp_path: Path
) -> None:
    def saved(name: str, *kills: str) -> dict[str, torch.Tensor]:
        save = ("--save-interval=5", f"--save={tmp_path / name}")
        made = run(replace(PP2, kills=kills, options=(*PP2.options, *save)))
        assert made.returncode == 0, made.output[-4000:]
        return saved_tensors(tmp_path / name / "iter_0000005")

    moved, undisturbed = saved("moved", "0@3:backward"), saved("undisturbed")
    assert len(moved) > 20 and moved.keys() == undisturbed.keys()
    assert all(torch.equal(moved[name], undisturbed[name]) for name in moved)


@proves(Kind.WRONG_INPUT, Promise.REFUSED)
def test_layers_of_interleaved_stages_are_refused_by_name(run: Launch) -> None:
    options = (*PP2.options, "--num-virtual-stages-per-pipeline-rank=2")
    refused = run(JobSpec(options=(*options, "--elaswave-move-layers=always")))
    assert refused.returncode == 2
    assert "move_layers is always" in refused.output and "interleaved" in refused.output


@proves(Kind.RETURN, Promise.EQUAL, victim="3 1 3.1", moment="6:forward 7:backward 0:startup")
def test_a_newcomer_agrees_to_layers_that_were_moved_by_measured_times(
    run: Launch, reference: Reference
) -> None:
    spec = replace(
        PP2,
        steps=13,
        respawn=1,
        # Of the two lost workers only one comes back: to stages of different widths.
        kills=("3@6:forward", "1@7:backward", "3.1@0:startup"),
        awaits=((9, 1),),
        options=(*PP2.options, "--elaswave-move-layers=always"),
    )
    survived = run(spec)
    check_equal(survived, reference(spec))
    assert [event["slot"] for event in survived.events("entered")] == [1]
    recovered = survived.events("recovered")
    assert all(event["layer_times_s"]["layer"][0] > 0 for event in recovered)
    assert all(event["predicted_compute_s"] > 0 and event["plan_reasons"] for event in recovered)
    cuts_after(survived)
