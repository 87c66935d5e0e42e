"""Long lists and many alike objects come out of their short forms as they went in."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elaswave_plugin.core.codec import shortened
from elaswave_plugin.core.runs import MOST_NUMBERS, numbers_of, runs_text
from elaswave_plugin.core.table import objects_of, table_of

VALUES = st.none() | st.booleans() | st.integers(0, 2) | st.lists(st.integers(0, 1), max_size=2)
OBJECTS = st.lists(st.dictionaries(st.sampled_from("abc"), VALUES), max_size=6)


@given(numbers=st.lists(st.integers(-3, 3) | st.integers(), min_size=1, max_size=9))
def test_numbers_come_out_of_their_runs(numbers: list[int]) -> None:
    assert numbers_of(runs_text(numbers)) == tuple(numbers)


def test_ranks_of_ten_thousand_workers_without_one_are_two_runs() -> None:
    ranks = tuple(n for n in range(10_000) if n != 1234)
    assert shortened(ranks) == "0+1*1234 1235+1*8765"


def test_a_list_that_its_runs_do_not_shorten_stays() -> None:
    numbers = [7**n % 1000 for n in range(40)]
    assert shortened(numbers) is numbers
    assert shortened([True] * 40) == [True] * 40


@pytest.mark.parametrize("text", ["", "x", "1+1", "1+1*2 ", f"0+1*{MOST_NUMBERS + 1}"])
def test_what_is_no_run_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no run of numbers|are more than"):
        numbers_of(text)


@given(objects=OBJECTS)
def test_objects_come_out_of_their_table(objects: list[dict[str, Any]]) -> None:
    found = objects_of(table_of(objects))
    assert repr([sorted(one.items()) for one in found]) == repr(
        [sorted(one.items()) for one in objects]
    )


@pytest.mark.parametrize(
    "table",
    [
        {},
        {"count": 1, "columns": {"a": [[1], [2]]}},
        {"count": 2, "columns": {"a": [[1], [1]]}},
        {"count": 1, "columns": {"a": 3}},
    ],
)
def test_what_is_no_table_is_refused(table: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"no table of objects|is longer|is shorter"):
        objects_of(table)
