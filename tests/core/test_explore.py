"""The explorer reaches all states of a small job, and sees each rule that is taken away."""

import random

import pytest

from tests.core.test_agreement_cuts import check, come_to_rest, sealed_job
from tests.explore.sabotages import SABOTAGES
from tests.explore.search import KINDS, Broken, explore, make

LIVES = "votes of the last life"


def test_two_nodes_and_two_faults_in_any_order() -> None:
    found = explore((0, 1), faults=2, most_states=5000)
    assert found.is_complete
    assert found.states > 400
    assert found.faults.keys() == {*KINDS}


def test_states_are_told_apart_by_what_may_happen_only() -> None:
    """Twice the same, however they are counted."""
    first, second = (explore((0, 1, 2), faults=1, most_states=5000) for _ in range(2))
    assert first == second
    assert first.is_complete


def test_a_welcome_that_comes_late_does_not_undo_a_loss() -> None:
    """Found by the explorer: the one that was left waited for a node that was dead."""
    cluster = sealed_job((0, 1, 2))
    before = ("relink 0 2", "deliver 2 0", "kill 1", "quiesce 0", "deliver 0 2", "deliver 2 0")
    for move in (*before, "deliver 0 2", "sunder 0 2", "deliver 0 2"):
        make(cluster, move)
    come_to_rest(cluster, random.Random(0))
    check(cluster)
    assert cluster.ends.keys() == {0, 2}


@pytest.mark.parametrize("rule", SABOTAGES)
def test_a_rule_that_is_taken_away_is_seen(rule: str) -> None:
    """The search is deepest first: fewer kinds of faults lead it there sooner."""
    kinds = {*KINDS} - ({"relink"} if rule == LIVES else {"restart", "relink"})
    with SABOTAGES[rule](), pytest.raises(Broken, match="after: "):
        explore((0, 1, 2), faults=2, most_states=15_000, kinds=kinds)
