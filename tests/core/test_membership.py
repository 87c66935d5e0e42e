"""Views and the pure step between them: every property for all small cases, texts exactly."""

from dataclasses import replace
from itertools import combinations, permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elaswave_plugin.core.agreement.view import (
    FailureEvent,
    MembershipView,
    WorkerId,
    first_view,
    next_view,
)
from tests.core.over_the_wire import again


def exited(slot: int, evidence: str = "killed by SIGKILL", at_s: float = 1.0) -> FailureEvent:
    return FailureEvent(kind="exit", slot=slot, detected_at_s=at_s, evidence=evidence)


def test_a_loss_leaves_the_others_in_order_and_says_why() -> None:
    view = next_view(first_view((0, 0, 1, 1)), [exited(1)], 2.0)
    assert view is not None
    assert str(view) == "view 1 [0.0@0,2.0@1,3.0@1]: worker 1 (node 0) exited: killed by SIGKILL"


def test_losing_the_last_rank_moves_nobody() -> None:
    view = next_view(first_view((0, 0, 0)), [exited(2)], 2.0)
    assert view is not None and view.ranks == (0, 1)


def test_two_losses_are_one_view_with_both_reasons_in_slot_order() -> None:
    lost = FailureEvent(kind="lost", slot=3, detected_at_s=0.0, evidence="silent for 3 s")
    view = next_view(first_view((0, 0, 1, 1)), [lost, exited(0, "exit code 1")], 2.0)
    assert view is not None
    assert view.ranks == (1, 2)
    assert view.reason == (
        "worker 0 (node 0) exited: exit code 1; worker 3 (node 1) was lost: silent for 3 s"
    )


def test_ranks_stay_in_slot_order() -> None:
    for size in range(1, 7):
        slots = tuple(range(size))
        for count in range(1, size):
            for gone in combinations(slots, count):
                view = next_view(first_view((0,) * size), [exited(slot) for slot in gone], 2.0)
                assert view is not None
                assert view.ranks == tuple(slot for slot in slots if slot not in gone)


def test_the_order_of_events_does_not_matter() -> None:
    events = [
        exited(1),
        FailureEvent(kind="lost", slot=1, detected_at_s=0.0, evidence="closed"),
        exited(1, "exit code 1", at_s=0.5),
        exited(4),
    ]
    views = {str(next_view(first_view((0,) * 5), order, 2.0)) for order in permutations(events)}
    assert views == {
        "view 1 [0.0@0,2.0@0,3.0@0]: worker 1 (node 0) exited: exit code 1; "
        "worker 4 (node 0) exited: killed by SIGKILL"
    }


def test_the_step_is_idempotent() -> None:
    view = next_view(first_view((0, 0, 0)), [exited(1)], 2.0)
    assert view is not None
    assert next_view(view, [exited(1)], 2.0) is None


def test_nothing_changes_without_an_event_that_counts() -> None:
    view = first_view((0, 0))
    assert next_view(view, [], 9.0) is None
    assert next_view(view, [exited(7)], 9.0) is None
    assert next_view(view, [exited(1, at_s=10.0)], 9.0) is None
    assert next_view(view, [exited(1, at_s=9.0)], 9.0) is not None


def test_an_event_about_an_earlier_incarnation_does_not_count() -> None:
    view = MembershipView(epoch=5, ranks=(0, 1), incarnations=(0, 1), nodes=(0, 0), reason="")
    assert next_view(view, [exited(1)], 9.0) is None


def test_a_view_contains_workers_and_not_their_other_incarnations() -> None:
    view = MembershipView(epoch=1, ranks=(4, 2), incarnations=(0, 3), nodes=(1, 0), reason="")
    everyone = {WorkerId(slot=slot, incarnation=n) for slot in range(6) for n in range(4)}
    assert {worker for worker in everyone if worker in view} == view.workers
    assert view.workers == {WorkerId(slot=4, incarnation=0), WorkerId(slot=2, incarnation=3)}


def test_all_may_go() -> None:
    view = next_view(first_view((0, 0)), [exited(0), exited(1)], 9.0)
    assert view is not None and view.ranks == ()


def test_nodes_and_incarnations_stay_with_their_slots() -> None:
    view = MembershipView(
        epoch=3, ranks=(2, 4, 9), incarnations=(0, 1, 2), nodes=(5, 7, 6), reason=""
    )
    after = next_view(view, [replace(exited(4), incarnation=1)], 9.0)
    assert after is not None
    assert (after.ranks, after.incarnations, after.nodes) == ((2, 9), (0, 2), (5, 6))


def test_views_and_events_refuse_nonsense() -> None:
    with pytest.raises(ValueError, match="names a slot twice"):
        MembershipView(epoch=1, ranks=(1, 1), incarnations=(0, 0), nodes=(0, 0), reason="")
    with pytest.raises(ValueError, match="2 ranks, 1 incarnations"):
        MembershipView(epoch=1, ranks=(0, 1), incarnations=(0,), nodes=(0, 0), reason="")
    with pytest.raises(ValueError, match="failure kind is 'died'"):
        FailureEvent(kind="died", slot=0, detected_at_s=0.0, evidence="")


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=9),
    st.sets(st.integers(0, 8)),
    st.sets(st.integers(0, 8)),
)
def test_all_at_once_or_one_after_the_other_leave_the_same_members(
    nodes: list[int], first: set[int], second: set[int]
) -> None:
    start = first_view(tuple(nodes))
    both = next_view(start, [exited(slot) for slot in sorted(first | second)], 9.0) or start
    step = next_view(start, [exited(slot) for slot in sorted(first)], 9.0) or start
    step = next_view(step, [exited(slot) for slot in sorted(second)], 9.0) or step
    assert sorted(both.ranks) == sorted(step.ranks)


def test_json_round_trips() -> None:
    view = MembershipView(epoch=3, ranks=(4, 2), incarnations=(1, 0), nodes=(7, 5), reason="why")
    assert again(view) == view
    event = FailureEvent(kind="leave", slot=1, detected_at_s=2.5, evidence="e", incarnation=3)
    assert again(event) == event
    worker = WorkerId(slot=3, incarnation=2)
    assert again(worker) == worker
    assert str(worker) == "3.2"
    assert str(event) == "leave of worker 1.3: e"
    assert str(view) == "view 3 [4.1@7,2.0@5]: why"
