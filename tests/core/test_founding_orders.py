"""Nodes that see one folder, in all orders: two lives never train at once, and all come to one."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from elaswave_plugin.core.agreement import founding
from elaswave_plugin.core.agreement.founding import GONE_S, JobRecord
from tests.explore import folder
from tests.explore.folder import explore_folder
from tests.explore.search import Broken

renewed = founding.renewed


@pytest.mark.parametrize(("names", "least", "states"), [("ab", 1, 10_000), ("abc", 2, 50_000)])
def test_all_orders_without_a_fault(names: str, least: int, states: int) -> None:
    found = explore_folder(names, least, faults=0)
    assert found.is_complete
    assert found.states > states


def test_orders_with_a_fault() -> None:
    """All of them take `python -m tests.explore` a minute."""
    found = explore_folder("ab", 1, faults=1, most_states=30_000)
    assert found.states == 30_000
    assert found.faults.keys() >= {"kill", "end"}


def _a_lease_is_not_waited_for() -> Any:
    return mock.patch.object(founding, "OVER_S", GONE_S)


def _the_dead_are_waited_with() -> Any:
    return mock.patch.object(founding, "GONE_S", float("inf"))


def _any_life_renews() -> Any:
    """An agent of the last life takes the record for its own."""

    def blind(record: JobRecord, life: int, contacts: tuple[str, ...]) -> JobRecord | None:
        return renewed(replace(record, life=life), life, contacts)

    return mock.patch.object(folder, "renewed", blind)


@pytest.mark.parametrize(
    ("sabotage", "words"),
    [
        (_a_lease_is_not_waited_for, "train"),
        (_any_life_renews, "train"),
        (_the_dead_are_waited_with, "waits"),
    ],
    ids=["a lease", "the life", "the dead"],
)
def test_a_rule_that_is_taken_away_is_missed(sabotage: Callable[[], Any], words: str) -> None:
    with sabotage(), pytest.raises(Broken, match=words):
        explore_folder("ab", 1, faults=1)
