"""A stage without a replica goes on with workers of other stages, bit for bit."""

from dataclasses import replace

import pytest

from tests.faults.conftest import Launch, Reference
from tests.faults.harness import JobSpec, Outcome, check_equal
from tests.faults.hybrid_matrix import PP2_DP2, PP2_VPP2_DP2, PP4_DP2, TP2_PP2_DP2
from tests.proofs import Kind, Promise, proves


def stages_after(run: Outcome) -> list[list[list[int]]]:
    """The slots of each stage's groups at the end."""
    after = run.events("recovered")[-1]["layout_after"]["stages"]
    return [[slots for _, slots in groups] for groups in after]


@proves(Kind.KILLS, Promise.EQUAL)
@pytest.mark.parametrize(
    ("spec", "stages"),
    [
        (replace(PP2_DP2, kills=("0@2:backward", "1@3:forward")), [[[3]], [[2]]]),
        (replace(PP2_DP2, lost_trainers=(2, 3)), [[[0]], [[1]]]),
        (replace(TP2_PP2_DP2, lost_trainers=(0, 1, 2)), [[[6, 7]], [[4, 5]]]),
        (replace(PP4_DP2, lost_trainers=(2, 3)), [[[0]], [[1]], [[4], [5]], [[6], [7]]]),
    ],
    ids=["first stage", "last stage", "tensor parallel", "a stage in the middle, bf16"],
)
def test_an_empty_stage_takes_a_replica_of_another(
    run: Launch, reference: Reference, spec: JobSpec, stages: list[list[list[int]]]
) -> None:
    survived = run(spec)
    check_equal(survived, reference(spec))
    assert stages_after(survived) == stages


@proves(Kind.RETURN, Promise.EQUAL, victim="0 1", moment="2:backward 3:forward")
def test_who_comes_back_takes_the_place_that_is_free(run: Launch, reference: Reference) -> None:
    """Worker 3 has gone to stage 0: the second one of it to come back works for stage 1."""
    spec = replace(
        PP2_DP2,
        steps=12,
        respawn=2,
        kills=("0@2:backward", "1@3:forward"),
        awaits=((5, 1), (8, 2)),
    )
    survived = run(spec)
    check_equal(survived, reference(spec))
    first, second = stages_after(survived)
    assert sorted(slot for (slot,) in first + second) == [0, 1, 2, 3]
    assert [3] in first and len(first) == len(second) == 2


@proves(Kind.KILLS, Promise.STOPS, victim="0 1")
def test_interleaved_stages_end_the_job_with_the_reason(run: Launch) -> None:
    stopped = run(replace(PP2_VPP2_DP2, lost_trainers=(0, 1)))
    assert stopped.returncode not in (0, None)
    assert "stage 0 has no worker left" in stopped.output
    assert "the stages are interleaved" in stopped.output
