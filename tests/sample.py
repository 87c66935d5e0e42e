"""The sample of families of tests, and of tests of large files, drawn by the hash of the commit."""

import math
import os
import random
import subprocess
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.proofs import proof_of, struck

SAMPLE = "ELASWAVE_SAMPLE"
# Of a file with more fault tests than the least, this share of them is drawn.
SHARE_OF_A_FILE, LEAST_OF_A_FILE = 0.25, 3
ROOT = Path(__file__).resolve().parents[1]
# The cases of one parameter, by their numbers; each case has a test for every other parameter.
Cases = dict[int, list[pytest.Item]]


def sampled(cases: Iterable[Any], *, share: int) -> list[Any]:
    """The cases of a parameter, of which ``share`` are drawn; the others wait for `make matrix`."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=pytest.mark.sampled(number, share),
        )
        for number, case in enumerate(cases)
    ]


def seed() -> str:
    """The text that decides what is drawn: ELASWAVE_SAMPLE, else the commit's hash."""
    if given := os.environ.get(SAMPLE):
        return given
    command = ["git", "rev-parse", "--short=12", "HEAD"]
    try:
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20)
    except FileNotFoundError:
        return "no git"
    return found.stdout.strip() or "no commit"


def draw(items: Sequence[pytest.Item], seed: str, always: Collection[str]) -> str:
    """Mark as slow what is not drawn, and say how much is; cases in ``always`` are drawn.

    Of each family at least one case is drawn, and tests of large files are left out only where
    others have their kind of fault with their promise: each kind is drawn with each promise.
    """
    families: dict[tuple[str, int], tuple[int, Cases]] = {}
    for item in items:
        test = item.nodeid.partition("[")[0]
        for place, mark in enumerate(item.iter_markers("sampled")):
            number, share = mark.args
            _, cases = families.setdefault((test, place), (share, {}))
            cases.setdefault(number, []).append(item)
    members: set[str] = set()
    left: dict[str, pytest.Item] = {}
    for (test, place), (share, cases) in families.items():
        kept = choose(cases, share, random.Random(f"{seed} {test} {place}"), always)
        members |= {item.nodeid for case in cases.values() for item in case}
        left |= {one.nodeid: one for n, case in cases.items() if n not in kept for one in case}
    rest = [item for item in items if item.nodeid not in left and _is_of_faults(item)]
    for names, dropped in _large_files(rest, seed, always):
        members |= names
        left |= dropped
    for item in left.values():
        item.add_marker(pytest.mark.slow)
    drawn = len(members) - len(left)
    return f"{drawn} of {len(members)} sampled tests drawn, again by {SAMPLE}={seed}"


def _is_of_faults(item: pytest.Item) -> bool:
    marks = {mark.name for mark in item.iter_markers()}
    return "fault" in marks and "slow" not in marks


def _large_files(
    items: Sequence[pytest.Item], seed: str, always: Collection[str]
) -> Iterator[tuple[set[str], dict[str, pytest.Item]]]:
    """Yield the cases of each file with many tests, and of these the ones that are left out."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    pairs = {name: {_pair(item) for item in cases} - {None} for name, cases in tests.items()}
    told = Counter(pair for some in pairs.values() for pair in some)
    files: dict[str, list[str]] = {}
    for name in tests:
        files.setdefault(name.partition("::")[0], []).append(name)
    for file, names in sorted(files.items()):
        spare = len(names) - max(LEAST_OF_A_FILE, math.ceil(SHARE_OF_A_FILE * len(names)))
        dropped: dict[str, pytest.Item] = {}
        for name in random.Random(f"{seed} {file}").sample(sorted(names), len(names)):
            is_wanted = any(item.nodeid in always for item in tests[name])
            if spare > 0 and not is_wanted and all(told[pair] > 1 for pair in pairs[name]):
                spare -= 1
                told -= Counter(pairs[name])
                dropped |= {item.nodeid: item for item in tests[name]}
        yield {item.nodeid for name in names for item in tests[name]}, dropped


def _pair(item: pytest.Item) -> tuple[str, str] | None:
    proof = proof_of(item)
    return proof and (proof.kind, proof.promise)


def choose(cases: Cases, share: int, dice: random.Random, always: Collection[str] = ()) -> set[int]:
    """Draw cases; next comes one that has most values that no drawn one has, and chance decides."""
    kept = {number for number, case in cases.items() if any(one.nodeid in always for one in case)}
    order = dice.sample(sorted(cases), len(cases))
    values = {number: values_of(case[0]) for number, case in cases.items()}
    told = set().union(*(values[number] for number in kept))
    while len(kept) < min(max(share, 1), len(cases)):
        rest = [number for number in order if number not in kept]
        chosen = max(rest, key=lambda number: len(values[number] - told))
        kept.add(chosen)
        told |= values[chosen]
    return kept


def values_of(item: pytest.Item) -> set[tuple[str, str]]:
    """Return what tells a case from others: parameters, their fields, victim and moment."""
    params: Mapping[str, Any] = item.callspec.params  # type: ignore[attr-defined]
    found = {("victim or moment", one) for said in struck(params) for one in said.split()}
    for name, value in params.items():
        if is_dataclass(value):
            found |= {(one.name, repr(getattr(value, one.name))[:200]) for one in fields(value)}
        else:
            found.add((name, repr(value)[:200]))
    return found
