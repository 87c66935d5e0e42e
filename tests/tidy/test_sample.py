"""The sample of a family: its size, what it covers, and that a seed draws it again."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.proofs import Kind, Promise, proves
from tests.sample import LEAST_OF_A_FILE, SAMPLE, SHARE_OF_A_FILE, draw, sampled, seed

PHASES = ("data", "forward", "backward", "reduce", "optimizer", "gather", "snapshot")
PAIRS = list(itertools.product(range(4), PHASES))
# What is drawn of a file with 20 tests.
OF_20 = int(20 * SHARE_OF_A_FILE)


class Case:
    """A collected test, as far as a draw looks at it."""

    def __init__(self, nodeid: str, params: dict[str, Any], marks: Sequence[pytest.Mark]) -> None:
        self.nodeid = nodeid
        self.callspec = self
        self.params = params
        self.marks = marks
        self.is_slow = False

    def iter_markers(self, name: str | None = None) -> Iterator[pytest.Mark]:
        yield from (mark for mark in self.marks if name in (None, mark.name))

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return next(self.iter_markers(name), None)

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.is_slow = mark.name == "slow"


def family(share: int) -> list[Case]:
    found = []
    for case in sampled(PAIRS, share=share):
        slot, phase = case.values
        marks = [mark.mark for mark in case.marks]
        found.append(Case(f"a.py::test_a[{slot}-{phase}]", {"slot": slot, "phase": phase}, marks))
    return found


def drawn(share: int, seed: str, always: Sequence[str] = ()) -> list[str]:
    cases = family(share)
    said = draw(cases, seed, always)  # type: ignore[arg-type]
    kept = [case.nodeid for case in cases if not case.is_slow]
    assert said == f"{len(kept)} of 28 sampled tests drawn, again by {SAMPLE}={seed}"
    return kept


def test_a_seed_draws_the_same_sample_and_others_draw_others() -> None:
    assert drawn(7, "1") == drawn(7, "1")
    assert len({tuple(drawn(7, str(number))) for number in range(20)}) > 15


@pytest.mark.parametrize("number", range(20))
def test_a_sample_has_every_value_that_its_share_allows(number: int) -> None:
    kept = drawn(7, str(number))
    assert len(kept) == 7
    assert all(sum(phase in case for case in kept) == 1 for phase in PHASES)
    assert all(sum(f"[{slot}-" in case for case in kept) for slot in range(4))


def test_a_family_is_never_left_out_nor_larger_than_it_is() -> None:
    assert len(drawn(0, "1")) == 1
    assert len(drawn(99, "1")) == 28


def test_representatives_are_always_drawn() -> None:
    wanted = ["a.py::test_a[0-data]", "a.py::test_a[3-gather]"]
    assert {*wanted} <= {*drawn(3, "1", wanted)}
    assert sorted(drawn(1, "1", wanted)) == wanted


def file_of(kinds: Sequence[Kind], *, name: str = "b") -> list[Case]:
    found = []
    for number, kind in enumerate(kinds):
        declared = proves(kind, Promise.EQUAL)
        mine = [mark.mark for mark in (pytest.mark.fault, declared)]
        found += [Case(f"{name}.py::test_{number}[{case}]", {"case": case}, mine) for case in "xy"]
    return found


def drawn_of(cases: Sequence[Case], seed: str, always: Sequence[str] = ()) -> set[str]:
    draw(cases, seed, always)  # type: ignore[arg-type]
    kept = [case.nodeid.partition("[")[0] for case in cases if not case.is_slow]
    assert all(kept.count(test) == 2 for test in kept), "all cases of a test or none"
    return set(kept)


@pytest.mark.parametrize("seed", ["1", "2", "3"])
def test_of_a_large_file_a_share_is_drawn(seed: str) -> None:
    assert len(drawn_of(file_of([Kind.KILL] * 20), seed)) == OF_20
    assert len(drawn_of(file_of([Kind.KILL] * 5), seed)) == LEAST_OF_A_FILE
    assert len(drawn_of(file_of([Kind.KILL] * 3), seed)) == 3 == LEAST_OF_A_FILE


def test_other_commits_draw_other_tests_of_a_file() -> None:
    drawn = [drawn_of(file_of([Kind.KILL] * 20), str(number)) for number in range(20)]
    assert set.union(*drawn) == {f"b.py::test_{number}" for number in range(20)}


@pytest.mark.parametrize("number", range(20))
def test_the_last_test_with_a_promise_is_always_drawn(number: int) -> None:
    """Also where the only other one is of a file from which it may be left out as well."""
    rare = [Kind.HANG, *[Kind.KILL] * 19]
    kept = drawn_of([*file_of(rare), *file_of(rare, name="c")], str(number))
    assert {"b.py::test_0", "c.py::test_0"} & kept
    assert len(kept) == 2 * OF_20


def test_representatives_and_tests_of_other_tiers_stay() -> None:
    many = [Kind.KILL] * 20
    assert "b.py::test_7" in set.intersection(
        *(drawn_of(file_of(many), str(one), ["b.py::test_7[y]"]) for one in range(9))
    )
    units = file_of(many)
    for case in units:
        case.marks = [mark for mark in case.marks if mark.name != "fault"]
    assert len(drawn_of(units, "1")) == 20


def test_the_seed_is_the_commits_hash_unless_one_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SAMPLE, raising=False)
    assert len(seed()) == 12 or seed() in ("no git", "no commit")
    monkeypatch.setenv(SAMPLE, "abc")
    assert seed() == "abc"
