"""The sample of a family: its size, what it covers, and that a seed draws it again."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.sample import SAMPLE, draw, sampled, seed

PHASES = ("data", "forward", "backward", "reduce", "optimizer", "gather", "snapshot")
PAIRS = list(itertools.product(range(4), PHASES))


class Case:
    """A collected test, as far as a draw looks at it."""

    def __init__(self, nodeid: str, params: dict[str, Any], marks: Sequence[pytest.Mark]) -> None:
        self.nodeid = nodeid
        self.callspec = self
        self.params = params
        self.marks = marks
        self.is_slow = False

    def iter_markers(self, name: str) -> Iterator[pytest.Mark]:
        yield from (mark for mark in self.marks if mark.name == name)

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


def test_the_seed_is_the_commits_hash_unless_one_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SAMPLE, raising=False)
    assert len(seed()) == 12 or seed() in ("no git", "no commit")
    monkeypatch.setenv(SAMPLE, "abc")
    assert seed() == "abc"
