"""Writes what became of the tests, with the commit, the date and the host that they ran on."""

import json
import sys
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from benchmarks.circumstances import circumstances
from tests.sample import chosen_part

VERSIONS = ("torch", "megatron-core", "deepspeed")
# Other runs were interrupted, or ran nothing.
WHOLE = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)


class Results:
    """A plugin of pytest: a result file of a run, whose command is in it; failures by their names.

    The commit and the load are those before the tests.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._before = circumstances("pytest")
        self._began_s = time.monotonic()
        self._became: dict[str, str] = {}
        self._skips: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a case once, as failed where its beginning or its end has failed."""
        if not report.passed or report.nodeid not in self._became:
            self._became[report.nodeid] = report.outcome
        if report.skipped and isinstance(report.longrepr, tuple):
            self._skips[report.longrepr[2].removeprefix("Skipped: ")] += 1

    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter, exitstatus: int
    ) -> None:
        """Write the file where the run came to its end."""
        if exitstatus in WHOLE:
            self._file.write_text(json.dumps(self.found(), indent=1) + "\n")
            terminalreporter.write_line(f"{self._file} is written")
        else:
            terminalreporter.write_line(f"{self._file} stays as it is: this was no whole run")

    def found(self) -> dict[str, Any]:
        """Return what is written."""
        counts = Counter(self._became.values())
        return {
            **self._before,
            "versions": {"python": sys.version.split()[0]}
            | {name: version(name) for name in VERSIONS},
            "part": chosen_part(),
            "seconds": round(time.monotonic() - self._began_s),
            **{outcome: counts[outcome] for outcome in ("passed", "failed", "skipped")},
            "failures": sorted(case for case, end in self._became.items() if end == "failed"),
            "skips": dict(sorted(self._skips.items())),
        }
