"""The result files of runs that CI cannot have, and what their targets refuse."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.results import Results
from tests.tidy.documents import ROOT

FILES = ("benchmarks/megatron_lm.json", "benchmarks/python312.json", "benchmarks/told.json")


def report(case: str, outcome: str, why: str = "") -> Any:
    """A report of pytest's on a part of a case."""
    said = {one: one == outcome for one in ("passed", "failed", "skipped")}
    reason = ("file", 1, f"Skipped: {why}") if why else None
    return SimpleNamespace(nodeid=case, outcome=outcome, longrepr=reason, **said)


def test_a_case_counts_once_and_as_what_went_worst(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.json")
    for case, *outcomes in (
        ("a", "passed", "passed", "passed"),
        ("b", "passed", "failed", "passed"),
        ("c", "passed", "passed", "failed"),
        ("d", "failed", "passed"),
    ):
        for outcome in outcomes:
            results.pytest_runtest_logreport(report(case, outcome))
    for case, before in (("e", []), ("f", ["passed"])):
        for outcome in before:
            results.pytest_runtest_logreport(report(case, outcome))
        results.pytest_runtest_logreport(report(case, "skipped", "no GPU"))
        results.pytest_runtest_logreport(report(case, "passed"))
    found = results.found()
    assert [found[one] for one in ("passed", "failed", "skipped")] == [1, 3, 2]
    assert found["failures"] == ["b", "c", "d"] and found["skips"] == {"no GPU": 2}


@pytest.mark.parametrize(("status", "is_written"), [(0, True), (1, True), (2, False), (5, False)])
def test_a_run_that_was_not_whole_writes_nothing(
    tmp_path: Path, status: int, is_written: bool
) -> None:
    file = tmp_path / "results.json"
    said: list[str] = []
    reporter: Any = SimpleNamespace(write_line=said.append)
    Results(file).pytest_terminal_summary(reporter, status)
    assert len(said) == 1 and file.exists() == is_written


def unfit(found: dict[str, Any]) -> bool:
    """Tell whether a result is of no commit, or of no run in which all has passed."""
    return found["commit"].endswith("-dirty") or not found["passed"] or bool(found["failed"])


def test_a_committed_result_is_of_a_commit_and_has_no_failure() -> None:
    fit = {"commit": "a1b2c3d", "passed": 1, "failed": 0}
    assert not unfit(fit)
    for wrong in ({"commit": "a1b2c3d-dirty"}, {"passed": 0}, {"failed": 1}):
        assert unfit(fit | wrong)
    makefile = (ROOT / "Makefile").read_text()
    for file in FILES:
        assert f"--record-results={file}" in makefile
        if (ROOT / file).exists():
            assert not unfit(json.loads((ROOT / file).read_text())), file


@pytest.mark.parametrize(
    ("target", "given", "seen"),
    [
        ("megatron-lm", {}, "''"),
        ("megatron-lm", {"MEGATRON_LM_PATH": "/"}, "'/'"),
        ("python312", {}, "''"),
        ("python312", {"PYTHON312": "/nowhere"}, "'/nowhere'"),
        ("python312", {"PYTHON312": sys.executable}, sys.executable),
    ],
)
def test_a_target_without_what_it_needs_says_so_in_one_sentence(
    target: str, given: dict[str, str], seen: str
) -> None:
    if given.get("PYTHON312") == sys.executable and sys.version_info[:2] == (3, 12):
        pytest.skip("this is Python 3.12, which is what it wants")
    names = ("MEGATRON_LM_PATH", "PYTHON312", "MAKEFLAGS", "MAKELEVEL")
    environ = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run(
        ["make", target],
        cwd=ROOT,
        env=environ | given,
        capture_output=True,
        text=True,
        timeout=60,
    )
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and done.stdout == ""
    assert seen in line and "wanted" in line and f"make {target}" in line
