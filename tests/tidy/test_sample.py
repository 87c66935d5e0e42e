"""The twelve parts of the tests: each is small, together they have all, a number says which."""

import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from tests.faults.matrix import PAIRS
from tests.proofs import Kind, Promise, proves
from tests.sample import DURATIONS, PARTS, SAMPLE, SMALL_FILE, chosen_part, draw, parts_of, sampled
from tests.tidy.collected import declared

ALL = set(range(PARTS))


class Case:
    """A collected test, as far as a draw looks at it."""

    def __init__(
        self, nodeid: str, params: Mapping[str, Any], marks: Sequence[pytest.Mark]
    ) -> None:
        self.nodeid = nodeid
        self.callspec = self
        self.params = params
        self.marks = [*marks]

    def iter_markers(self, name: str | None = None) -> Iterator[pytest.Mark]:
        yield from (mark for mark in self.marks if name in (None, mark.name))

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return next(self.iter_markers(name), None)

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks.append(mark.mark)


def family(most: int | None = None) -> list[Case]:
    found = []
    for case in sampled(PAIRS, most=most):
        slot, phase = case.values
        marks = [mark.mark for mark in case.marks]
        found.append(Case(f"a.py::test_a[{slot}-{phase}]", {"slot": slot, "phase": phase}, marks))
    return found


def file_of(kinds: Sequence[Kind], *, name: str = "b") -> list[Case]:
    found = []
    for number, kind in enumerate(kinds):
        declared = proves(kind, Promise.EQUAL)
        mine = [mark.mark for mark in (pytest.mark.fault, declared)]
        found += [Case(f"{name}.py::test_{number}[{one}]", {"case": one}, mine) for one in "xy"]
    return found


def parts(cases: Sequence[Case], always: Sequence[str] = ()) -> list[set[str]]:
    """Return what each part has of what is dealt out."""
    found = parts_of(cases, always)  # type: ignore[arg-type]
    return [{nodeid for nodeid, mine in found.items() if part in mine} for part in range(PARTS)]


def test_the_parts_of_a_family_have_each_case_and_no_more_than_a_twelfth() -> None:
    found = parts(family())
    assert set.union(*found) == {case.nodeid for case in family()}
    assert [len(part) for part in found] == [3] * PARTS  # 28 / 12, rounded up
    for part in found[:]:
        assert len({case.partition("-")[2] for case in part}) >= 2, "moments differ within a part"
    assert parts(family()) == found
    assert len({frozenset(part) for part in found}) == PARTS


def test_a_dear_family_has_a_limit_and_the_rest_is_for_the_matrix() -> None:
    cases = family(most=2)
    quick = [case for case in cases if case.get_closest_marker("slow") is None]
    assert len(quick) == 2 * PARTS
    assert [len(part) for part in parts(quick)] == [2] * PARTS
    assert [case.get_closest_marker("slow") for case in family(most=4)] == [None] * len(PAIRS)


def test_the_product_of_two_families_is_dealt_out_whole() -> None:
    cases = [
        Case(f"a.py::test_a[{one.values[0]}-{two.values[0]}]", {}, [*marks])
        for one, two in itertools.product(sampled(range(5)), sampled(range(3)))
        if (marks := [mark.mark for mark in (*one.marks, *two.marks)])
    ]
    assert set.union(*parts(cases)) == {case.nodeid for case in cases}
    assert all(len(part) == 2 for part in parts(cases))


def test_a_large_file_is_dealt_out_and_a_small_one_is_not() -> None:
    cases = file_of([Kind.KILL] * 20)
    found = parts(cases)
    assert set.union(*found) == {case.nodeid for case in cases}
    for part in found:
        tests = Counter(nodeid.partition("[")[0] for nodeid in part)
        assert [*tests.values()] == [1] * 4, "no test twice while another one has no case yet"
    assert parts(file_of([Kind.KILL] * (SMALL_FILE // 2))) == [set()] * PARTS


def test_what_one_test_alone_promises_is_in_each_part() -> None:
    """Also where the only other one is in a file that is dealt out as well."""
    rare = [Kind.HANG, *[Kind.KILL] * 19]
    for part in parts([*file_of(rare), *file_of(rare, name="c")]):
        assert {"b.py::test_0", "c.py::test_0"} & {one.partition("[")[0] for one in part}


def test_representatives_and_units_are_not_dealt_out() -> None:
    many = file_of([Kind.KILL] * 20)
    assert all("b.py::test_7[y]" not in part for part in parts(many, ["b.py::test_7[y]"]))
    for case in many:
        case.marks = [mark for mark in case.marks if mark.name != "fault"]
    assert parts(many) == [set()] * PARTS


def test_what_is_not_in_a_part_is_slow() -> None:
    for part, mine in enumerate(parts(family())):
        cases = family()
        said = draw(cases, part, [])  # type: ignore[arg-type]
        assert said == f"part {part} of the tests: 3 of 28 sampled, again by {SAMPLE}={part}"
        quick = {case.nodeid for case in cases if case.get_closest_marker("slow") is None}
        assert quick == mine


def test_the_parts_have_each_fault_test_of_the_house_and_each_promise() -> None:
    """`tests/faults/test_proofs.py` names the promises that no part has."""
    dealt = [case for case in declared() if case.parts and {*case.parts} != ALL]
    assert len(dealt) > 1000
    by_part = Counter(part for case in dealt for part in case.parts)
    assert max(by_part.values()) < len(dealt) / 4, by_part
    told = [
        {
            (case.proof.kind, case.proof.promise)
            for case in declared()
            if part in case.parts and case.proof
        }
        for part in range(PARTS)
    ]
    assert all(one == told[0] for one in told) and len(told[0]) > 100


def test_the_part_is_the_committed_one_unless_another_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(SAMPLE, raising=False)
    assert chosen_part() == json.loads(DURATIONS.read_text())["part"]
    assert chosen_part() in ALL
    monkeypatch.setenv(SAMPLE, "7")
    assert chosen_part() == 7
    for wrong in ("12", "-1", "", "d253c5556a2b", "07"):
        monkeypatch.setenv(SAMPLE, wrong)
        with pytest.raises(pytest.UsageError, match=f"is '{wrong}'.* 0 to 11"):
            chosen_part()
