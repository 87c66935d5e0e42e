"""The verdict that all workers that run the same code have failed alike."""

from dataclasses import replace

import pytest

from elaswave_plugin.core.agreement.messages import Raised, Report
from elaswave_plugin.core.agreement.next_view import failed_alike
from elaswave_plugin.core.agreement.view import FailureEvent, first_view, next_view
from elaswave_plugin.core.layout.layout import ParallelLayout, TpGroup

RAISED = Raised(error="ValueError", message="no", where="train.py:7", when="in step 3")
SENTENCE = "failed alike in step 3: ValueError: no (train.py:7)"
# Two stages of two replicas: slots 0 and 1, 2 and 3.
LAYOUT = ParallelLayout(
    tp=1,
    dp=2,
    cuts=(0, 2, 4),
    stages=tuple(
        tuple(TpGroup(replica, (2 * stage + replica,)) for replica in range(2))
        for stage in range(2)
    ),
).to_json()
VIEW = first_view((0, 0, 0, 0))


def failure(slot: int, raised: Raised | None = RAISED) -> Report:
    event = FailureEvent(kind="exit", slot=slot, detected_at_s=0.0, evidence="exit code 1")
    return Report(failure=event, exit_code=1, raised=raised)


def test_all_workers_at_one_place_of_one_step() -> None:
    assert failed_alike(VIEW, map(failure, range(4)), (), None) == f"all workers {SENTENCE}"


@pytest.mark.parametrize(
    "other",
    [
        replace(RAISED, error="KeyError"),
        replace(RAISED, where="train.py:8"),
        replace(RAISED, when="in step 4"),
    ],
    ids=["another exception", "another line", "another step"],
)
def test_one_that_fails_otherwise_makes_all_of_them_losses(other: Raised) -> None:
    reports = [*map(failure, range(3)), failure(3, other)]
    assert failed_alike(VIEW, reports, (), None) is None


def test_a_message_may_name_the_rank() -> None:
    reports = [failure(slot, replace(RAISED, message=f"rank {slot}")) for slot in range(4)]
    found = failed_alike(VIEW, reports, (), None)
    assert found == "all workers failed alike in step 3: ValueError: rank 0 (train.py:7)"


def test_one_worker_alone_is_a_loss() -> None:
    assert failed_alike(first_view((0,)), [failure(0)], (), None) is None
    assert failed_alike(VIEW, [failure(1)], (), None) is None


def test_those_that_are_left_fail_as_the_first_one_did() -> None:
    (first,) = reports = [failure(3)]
    view = next_view(VIEW, [first.failure], 1.0)
    assert view is not None and failed_alike(view, [*reports, failure(0)], (), None) is None
    reports += map(failure, range(3))
    assert failed_alike(view, reports, (), None) == f"all workers {SENTENCE}"


def test_the_others_fail_alike_after_a_kill() -> None:
    said = "all workers that were left failed alike in step 3: ValueError: no (train.py:7)"
    reports = [failure(0, None), *map(failure, range(1, 4))]
    assert failed_alike(VIEW, reports, (), None) == said
    assert failed_alike(VIEW, reports[1:], (0,), None) == said
    assert failed_alike(VIEW, reports[:2], (2, 3), None) is None


def test_all_of_a_stage_are_enough() -> None:
    reports = [failure(2), failure(3)]
    assert failed_alike(VIEW, reports, (), LAYOUT) == f"all workers of stage 1 {SENTENCE}"
    assert failed_alike(VIEW, reports, (), None) is None
    assert failed_alike(VIEW, [failure(1), failure(3)], (), LAYOUT) is None
