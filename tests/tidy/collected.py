"""Prints the declarations of all fault tests, as JSON: python -m tests.tidy.collected

One row a case: the file and name of the test, its declaration, whether it starts a job, and the
parts of the tests that have it, none if `make matrix` alone does. Nothing is run.
"""

import json
import sys
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.idle import completed
from tests.proofs import Proof, proof_of
from tests.sample import PARTS
from tests.tiers import FAULTS

ROOT = Path(__file__).resolve().parents[2]
# Losses that need no process.
FOLDERS = (*FAULTS, "tests/core/test_losses.py")
LIMIT_S = 110
# The fixture that all jobs with a framework start from.
ZYGOTES = "zygotes"


@dataclass(frozen=True, slots=True)
class Case:
    """One collected case."""

    file: str
    test: str
    proof: Proof | None
    has_job: bool
    parts: tuple[int, ...]


class Declarations:
    """A plugin of pytest that keeps what is collected."""

    def __init__(self) -> None:
        self.cases: list[Case] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Read the cases off, once everything is collected."""
        for item in session.items:
            self.cases.append(
                Case(
                    file=str(item.path.relative_to(ROOT / "tests")),
                    test=item.nodeid.partition("::")[2].partition("[")[0],
                    proof=proof_of(item),
                    has_job=ZYGOTES in getattr(item, "fixturenames", ()),
                    parts=parts_of(item),
                )
            )


def parts_of(item: pytest.Item) -> tuple[int, ...]:
    """Return the parts that have a case: all, where it is neither dealt out nor slow by itself."""
    if (dealt := item.get_closest_marker("dealt")) is not None:
        return dealt.args
    return () if item.get_closest_marker("slow") else tuple(range(PARTS))


@cache
def declared() -> tuple[Case, ...]:
    """Collect in a process of its own."""
    command = [sys.executable, "-m", "tests.tidy.collected"]
    done = completed(command, LIMIT_S, cwd=ROOT)
    done.check_returncode()
    return tuple(map(_case, json.loads(done.stdout.splitlines()[-1])))


def _case(row: dict[str, Any]) -> Case:
    proof = row.pop("proof")
    parts = tuple(row.pop("parts"))
    return Case(**row, proof=Proof(**proof) if proof else None, parts=parts)


def main() -> int:
    """Collect with the marks of all tiers, and print."""
    found = Declarations()
    options = ["--collect-only", "-qq", "-m", "", "-p", "no:cacheprovider"]
    code = pytest.main([*options, *(str(ROOT / one) for one in FOLDERS)], plugins=[found])
    print(json.dumps([asdict(case) for case in found.cases]))
    return int(code)


if __name__ == "__main__":
    raise SystemExit(main())
