"""Files of a room import each other in no circle, and names stay in their rooms."""

import pytest

from tests.tidy.function_index import PAGE
from tests.tidy.structure import (
    MOST_FILES,
    circle,
    journey_findings,
    journeys,
    who_imports,
)
from tests.tidy.test_tidy import modules

AT = "elaswave_plugin.snapshot."


def test_no_files_import_each_other_in_a_circle() -> None:
    assert circle(modules()) == []


@pytest.mark.parametrize("where", ["def f()", "if TYPE_CHECKING"])
def test_a_circle_is_found_also_where_a_function_or_a_type_checker_imports(where: str) -> None:
    here = (f"from {AT}b import x", f"{AT}a", False)
    there = (f"{where}:\n    from {AT}a import y", f"{AT}b", False)
    assert set(circle([here, there])) == {f"{AT}a", f"{AT}b"}
    assert circle([here]) == []


def test_ballots_stay_with_the_agreement() -> None:
    names = {one.rpartition(".")[0] for one in who_imports("Ballot", modules())}
    assert names == {"core.agreement", "testing"}


def test_nobody_above_the_loops_names_epoch_changed() -> None:
    above = ("adapters", "rehearsal", "demo", "cli", "deepspeed", "megatron_")
    assert not [one for one in who_imports("EpochChanged", modules()) if one.startswith(above)]


def test_the_journeys_of_the_page_are_those_of_the_code() -> None:
    page = PAGE.read_text("utf-8")
    assert journeys(page).keys() == MOST_FILES.keys()
    assert journey_findings(page) == []


def test_a_journey_by_a_function_that_is_none_is_found() -> None:
    page = "- **death**, by `agent/seat.py:Seat.on_end`, `agent/seat.py:Seat.fly`\n"
    assert journey_findings(page) == ["death: agent/seat.py has no Seat.fly"]
    assert journey_findings(page.replace(", `agent/seat.py:Seat.fly`", "")) == []
    many = ", ".join(f"`{path}`" for path in ("agent/seat.py:Seat.on_end",))
    assert journeys(f"- **bytes** {many}\n") == {"bytes": [("agent/seat.py", "Seat.on_end")]}
