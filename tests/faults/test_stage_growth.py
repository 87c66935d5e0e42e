"""A TP x PP x DP job grows beyond its launch by whole TP groups, bit for bit as one that did not.

The reference is launched without a reserve.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.faults.conftest import Grown, Launch, Reference
from tests.faults.growth import grow, widths, without_reserve
from tests.faults.harness import (
    JobSpec,
    Outcome,
    Zygote,
    check_equal,
    check_survived,
    max_relative_difference,
)
from tests.faults.hybrid_matrix import PP2_DP2, PP2_VPP2_DP2, TP2_PP2_DP2, resized
from tests.faults.test_bad_input import check_refused, check_silent_otherwise
from tests.faults.test_join import LATER, entered, last_ranks
from tests.faults.test_outside_a_step import saved_tensors
from tests.faults.test_stage_moves import stages_after
from tests.proofs import Kind, Promise, proves

TP_GROUP = replace(
    TP2_PP2_DP2, steps=10, dump="last", launcher=("--reserve=2",), awaits=((3, 1), (5, 2))
)
# TP2 x PP1 x DP2, TP1 x PP2 x DP2, and interleaved.
PIPELINES = (
    JobSpec(options=("--tensor-model-parallel-size=2", "--sequence-parallel")),
    replace(PP2_DP2, options=(*PP2_DP2.options, "--bf16", "--calculate-per-token-loss")),
    PP2_VPP2_DP2,
)


def shape(run: Outcome) -> list[int]:
    """Replicas of each stage at the end."""
    return list(map(len, stages_after(run)))


def at_first_stage(run: Outcome, step: int) -> set[int]:
    """The slots that had samples of a step enter the pipeline."""
    return {line["slot"] for line in run.files.ledger if line["step"] == step}


@proves(Kind.JOIN, Promise.EQUAL, victim="8.1", moment="7:backward")
def test_a_tp_group_beyond_the_launch_widens_a_stage(grown: Grown) -> None:
    """8 -> 9, with one of the group free -> 10; one of it is lost and comes back: 9 -> 10."""
    spec = replace(
        TP_GROUP,
        steps=12,
        respawn=1,
        kills=("8.1@7:backward",),
        awaits=((3, 1), (5, 2), (9, 3)),
        sabotage=LATER.format(slot=9),
    )
    run = grown(spec, joiners=2)
    assert entered(run) == [(8, 1), (9, 1), (8, 2)]
    assert widths(run) == [8, 9, 10, 9, 10]
    assert stages_after(run) == [[[0, 1], [2, 3], [8, 9]], [[4, 5], [6, 7]]]
    # Who came has a part of the work, once its group is whole.
    parts = [at_first_stage(run, step) for step in (2, 6, 8, 11)]
    assert parts == [{0, 2}, {0, 2, 8}, {0, 2}, {0, 2, 8}]


@proves(Kind.JOIN, Promise.EQUAL)
@pytest.mark.slow
@pytest.mark.parametrize("dataflow", ["auto", "redeal"])
def test_a_pipeline_beyond_the_launch_widens_every_stage(grown: Grown, dataflow: str) -> None:
    """TP2 x PP2 x DP2 -> DP3, one worker after the other."""
    spec = replace(
        TP_GROUP,
        steps=14,
        launcher=("--reserve=4",),
        options=(*TP_GROUP.options, f"--elaswave-dataflow={dataflow}"),
        awaits=((3, 1), (5, 2), (7, 3), (9, 4)),
    )
    run = grown(spec, joiners=4, like=replace(spec, options=TP_GROUP.options))
    assert widths(run)[0] == 8 and widths(run)[-1] == 12
    assert shape(run) == [3, 3]
    # Who of the four comes first is free until there is another one, and is in a group with that.
    first_of = [group[0] for group in stages_after(run)[0]]
    assert {0, 2} < set(first_of) and at_first_stage(run, 13) == set(first_of)


@proves(Kind.JOIN, Promise.EQUAL)
@pytest.mark.slow
@pytest.mark.parametrize("spec", PIPELINES, ids=["tensor parallel", "bf16", "interleaved"])
def test_other_layouts_grow(grown: Grown, spec: JobSpec) -> None:
    spec = replace(spec, steps=10, dump="last", launcher=("--reserve=2",), awaits=((3, 1), (5, 2)))
    run = grown(spec, joiners=2)
    assert sorted(entered(run)) == [(4, 1), (5, 1)]
    assert set(shape(run)) == {3}


@proves(Kind.JOIN_LOSS, Promise.EQUAL)
@pytest.mark.slow
@pytest.mark.parametrize("slot", [1, 6])
def test_a_worker_of_the_launch_is_lost_from_a_grown_job(grown: Grown, slot: int) -> None:
    """Nobody comes back; where stage 1 lost a group, stage 0 has one to give."""
    spec = replace(TP_GROUP, kills=(f"{slot}@7:backward",))
    run = grown(spec, joiners=2)
    assert widths(run)[-2:] == [10, 9]
    assert sum(shape(run)) == 4 and slot not in last_ranks(run)


@proves(Kind.JOIN_LOSS, Promise.EQUAL, victim="0", moment="2:backward")
@pytest.mark.slow
@pytest.mark.parametrize("moves", ["auto", "never"])
def test_a_tp_group_beyond_the_launch_takes_over_from_a_lost_one(grown: Grown, moves: str) -> None:
    """As many groups as at the launch, and others."""
    spec = replace(
        TP_GROUP,
        kills=("0@2:backward",),
        options=(*TP_GROUP.options, f"--elaswave-move-layers={moves}"),
    )
    run = grown(spec, joiners=2, like=replace(spec, options=TP_GROUP.options))
    assert widths(run)[:2] == [8, 7] and widths(run)[-1] == 9
    assert shape(run) == [2, 2]
    assert len(run.events("recovered")[-1]["layout_after"]["free"]) == 1


@proves(Kind.NEWCOMER, Promise.EQUAL)
@pytest.mark.slow
@pytest.mark.parametrize("phase", ["agree", "edit", "move", "rebind", "verify"])
def test_a_newcomer_of_a_tp_group_dies_on_its_way_in(grown: Grown, phase: str) -> None:
    spec = replace(
        TP_GROUP,
        steps=12,
        respawn=10,
        kills=(f"9.1@0:{phase}",),
        awaits=((3, 1), (5, 2), (8, 3)),
    )
    run = grown(spec, joiners=2)
    assert sorted(entered(run)) == [(8, 1), (9, 2)]
    assert shape(run) == [3, 2]


@proves(Kind.JOIN_LOSS, Promise.EQUAL, victim="0 2 3", moment="7:backward 8:forward 9:optimizer")
@pytest.mark.slow
def test_a_grown_job_loses_every_stage_of_the_launch_but_one_group(grown: Grown) -> None:
    """TP1 x PP2 x DP2: the two that came are half of what is left."""
    spec = replace(
        PP2_DP2,
        steps=14,
        dump="last",
        launcher=("--reserve=2",),
        awaits=((3, 1), (5, 2)),
        kills=("0@7:backward", "2@8:forward", "3@9:optimizer"),
    )
    run = grown(spec, joiners=2)
    assert last_ranks(run) and set(last_ranks(run)) == {1, 4, 5}


@proves(Kind.JOIN_LOSS, Promise.CLOSE)
@pytest.mark.slow
def test_fast_mode_cuts_micro_batches_of_a_grown_job(
    zygote: Zygote, data: Path, tmp_path: Path, reference: Reference
) -> None:
    spec = resized(replace(TP_GROUP, steps=8))
    run = grow(spec, joiners=2, zygote=zygote, data=data, directory=tmp_path)
    check_survived(run)
    assert run.events("recovered")[-1]["dataflow"] == "resize"
    undisturbed = reference(without_reserve(spec))
    assert max_relative_difference(run, undisturbed) <= 1e-6
    # Negative control: the sums are really made in another order.
    assert run.trace() != undisturbed.trace()
    assert shape(run) == [3, 2]


@proves(Kind.JOIN, Promise.WHOLE)
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_evaluations_and_checkpoints_of_a_growing_job(
    run: Launch, zygote: Zygote, data: Path, tmp_path: Path
) -> None:
    """Every step is followed by a checkpoint: also those with one worker of the group yet."""
    tp2_dp2 = replace(
        PIPELINES[0],
        steps=8,
        options=(*PIPELINES[0].options, "--save-interval=1", "--eval-interval=1"),
    )

    grows = replace(
        tp2_dp2,
        launcher=("--reserve=2",),
        awaits=((2, 1), (4, 2)),
        sabotage=LATER.format(slot=5),
    )

    def saving(name: str, spec: JobSpec) -> JobSpec:
        return replace(spec, options=(*spec.options, f"--save={tmp_path / name}"))

    grown = grow(
        saving("grown", grows), joiners=2, zygote=zygote, data=data, directory=tmp_path / "run"
    )
    undisturbed = run(saving("undisturbed", tp2_dp2))
    check_equal(grown, undisturbed)
    assert widths(grown) == [4, 5, 6]
    for step in range(1, 9):
        left, right = (
            saved_tensors(tmp_path / name / f"iter_{step:07d}") for name in ("grown", "undisturbed")
        )
        assert len(left) > 20 and left.keys() == right.keys()
        assert all(torch.equal(left[name], right[name]) for name in left)


@proves(Kind.WRONG_INPUT, Promise.REFUSED)
def test_a_reserve_that_makes_no_tp_group_is_refused(run: Launch) -> None:
    refused = run(replace(TP2_PP2_DP2, launcher=("--reserve=3",), dump="never"))
    check_refused(refused, "--reserve is 3", "whole tensor parallel group of 2", "multiple of 2")
    check_silent_otherwise(refused)
