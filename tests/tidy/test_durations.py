"""The time of the fault tests: each room keeps its budget, and the budgets are half an hour."""

import json

from tests.durations import HALF_AN_HOUR_S, outgrown, recorded
from tests.sample import DURATIONS, PARTS
from tests.tidy.documents import ROOT

RUN = {"tests/a/test_1.py": 60.0, "tests/a/test_2.py": 30.0, "tests/b/test_3.py": 10.0}


def test_no_room_has_outgrown_its_budget() -> None:
    found = json.loads(DURATIONS.read_text())
    assert outgrown(found) == []
    assert sum(found.get("budgets_s", {}).values()) <= HALF_AN_HOUR_S
    assert all((ROOT / room).is_dir() for room in found.get("budgets_s", {}))


def test_a_run_writes_its_part_and_sets_the_first_budgets_only() -> None:
    first = recorded({"part": 0}, RUN, 0)
    assert first["part"] == 0
    assert first["budgets_s"] == {"tests/a": 1620, "tests/b": 180}
    last = recorded(first, {"tests/a/test_1.py": 5.04}, PARTS - 1)
    assert last["part"] == PARTS - 1 and last["budgets_s"] == first["budgets_s"]
    assert last["seconds"] == {"tests/a/test_1.py": 5.0}


def test_a_room_that_has_outgrown_its_budget_is_named() -> None:
    first = recorded({}, RUN, 0)
    assert outgrown(first) == []
    later = {file: seconds * 30 for file, seconds in RUN.items()} | {"tests/c/test_4.py": 7.0}
    assert outgrown(recorded(first, later, 1)) == [
        "tests/a took 2700 s, and its budget is 1620 s: "
        "tests/a/test_1.py 1800 s, tests/a/test_2.py 900 s",
        "tests/b took 300 s, and its budget is 180 s: tests/b/test_3.py 300 s",
        "tests/c has no budget: give it one of 7 s, and others less",
    ]
