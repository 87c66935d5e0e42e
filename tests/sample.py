"""The sample of tests: each family, and each file of many fault tests, is dealt out in parts."""

import itertools
import json
import math
import os
import random
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.proofs import proof_of, struck

SAMPLE = "ELASWAVE_SAMPLE"
PARTS = 12
# A file with more cases of fault tests than these is dealt out whole; of others, the families are.
SMALL_FILE = 3
# Its field `part` is the part that all runs draw.
DURATIONS = Path(__file__).with_name("durations.json")
# A test with the numbers of its sampled parameters, and an item for every other parameter; an item
# of a test that has none of these.
Case = tuple[str, tuple[int, ...]]
Cases = dict[Case, list[pytest.Item]]


def sampled(cases: Iterable[Any], *, most: int | None = None) -> list[Any]:
    """The cases of a parameter, a twelfth of which is in each part.

    ``most``: no more than these are, for what is dear; a fixed choice of the others is for
    `make matrix` alone.
    """
    cases = list(cases)
    dealt = range(len(cases))
    if most is not None and most * PARTS < len(cases):
        dealt = random.Random(most).sample(dealt, most * PARTS)
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=[pytest.mark.sampled(number), *([] if number in dealt else [pytest.mark.slow])],
        )
        for number, case in enumerate(cases)
    ]


def next_part() -> int:
    """Return the part behind the committed one, which `make durations` runs and writes down."""
    return (int(json.loads(DURATIONS.read_text())["part"]) + 1) % PARTS


def chosen_part() -> int:
    """Return the part that is drawn: ELASWAVE_SAMPLE, else the committed one.

    Raises UsageError for what is no part.
    """
    given = os.environ.get(SAMPLE)
    if given is None:
        return int(json.loads(DURATIONS.read_text())["part"])
    if given not in map(str, range(PARTS)):
        raise pytest.UsageError(
            f"{SAMPLE} is {given!r}, and the parts of the tests are 0 to {PARTS - 1}: give one of "
            f"these, or unset it for the part in tests/{DURATIONS.name}"
        )
    return int(given)


def draw(items: Sequence[pytest.Item], part: int, always: Collection[str]) -> str:
    """Mark what is dealt out with its parts, as slow what is not in this one; say how much is."""
    quick = [item for item in items if item.get_closest_marker("slow") is None]
    parts = parts_of(quick, always)
    dealt = [item for item in quick if item.nodeid in parts]
    for item in dealt:
        item.add_marker(pytest.mark.dealt(*sorted(parts[item.nodeid])))
        if part not in parts[item.nodeid]:
            item.add_marker(pytest.mark.slow)
    count = sum(part in parts[item.nodeid] for item in dealt)
    return f"part {part} of the tests: {count} of {len(dealt)} sampled, again by {SAMPLE}={part}"


def parts_of(items: Sequence[pytest.Item], always: Collection[str]) -> dict[str, set[int]]:
    """Deal out families and large files, but for cases in ``always``: the parts of each case.

    Every case has one, and each kind of fault is in each part with each promise.
    """
    found: dict[str, set[int]] = {}
    for name, cases in decks_of([one for one in items if one.nodeid not in always]).items():
        found |= {item.nodeid: set() for some in cases.values() for item in some}
        for part, mine in enumerate(deal(cases, random.Random(name))):
            for item in itertools.chain.from_iterable(cases[case] for case in mine):
                found[item.nodeid].add(part)
    pairs: dict[tuple[str, str], list[set[int]]] = {}
    for item in items:
        if (proof := proof_of(item)) is not None:
            own = found.get(item.nodeid, {*range(PARTS)})
            pairs.setdefault((proof.kind, proof.promise), []).append(own)
    for number, owned in enumerate(pairs.values()):
        for part in {*range(PARTS)} - set().union(*owned):
            owned[(number + part) % len(owned)].add(part)
    return found


def decks_of(items: Sequence[pytest.Item]) -> dict[str, Cases]:
    """Return what is dealt out: the cases of large files, and those of families in other files."""
    counts = Counter(
        item.nodeid.partition("::")[0]
        for item in items
        if item.get_closest_marker("fault") is not None
    )
    large = {file for file, count in counts.items() if count > SMALL_FILE}
    decks: dict[str, Cases] = {}
    for item in items:
        test = item.nodeid.partition("[")[0]
        file = test.partition("::")[0]
        numbers = tuple(mark.args[0] for mark in item.iter_markers("sampled"))
        if file in large or numbers:
            deck = decks.setdefault(file if file in large else test, {})
            deck.setdefault((test if numbers else item.nodeid, numbers), []).append(item)
    return decks


def deal(cases: Cases, dice: random.Random) -> list[list[Case]]:
    """Deal a twelfth of the cases to each part, rounded up: when all are dealt, once more.

    Next comes one that has most values that no other one of the part has, and chance decides.
    """
    values = {case: values_of(some[0]) for case, some in cases.items()}
    rest: list[Case] = []
    parts = []
    for _ in range(PARTS):
        mine: list[Case] = []
        told: set[tuple[str, str]] = set()
        while len(mine) < math.ceil(len(cases) / PARTS):
            if not rest:
                rest = [case for case in sorted(cases) if case not in mine]
                dice.shuffle(rest)
            chosen = max(rest, key=lambda case: len(values[case] - told))
            rest.remove(chosen)
            mine.append(chosen)
            told |= values[chosen]
        parts.append(mine)
    dice.shuffle(parts)  # the first have more values, and so do not all come in the same part
    return parts


def values_of(item: pytest.Item) -> set[tuple[str, str]]:
    """Return what tells a case from others: test, parameters, their fields, victim and moment."""
    params: Mapping[str, Any] = item.callspec.params if hasattr(item, "callspec") else {}
    found = {("victim or moment", one) for said in struck(params) for one in said.split()}
    found.add(("test", item.nodeid.partition("[")[0]))
    for name, value in params.items():
        if is_dataclass(value):
            found |= {(one.name, repr(getattr(value, one.name))[:200]) for one in fields(value)}
        else:
            found.add((name, repr(value)[:200]))
    return found


if __name__ == "__main__":
    print(next_part())
