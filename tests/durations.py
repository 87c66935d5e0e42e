"""Counts the seconds of each file of tests, prints them, and writes them for `make durations`.

`tests/durations.json`: the part of the tests that runs, the seconds that each file took in it, and
the budget of each room. Budgets are set by hand, but for the first ones.
"""

import json
from collections import defaultdict
from pathlib import PurePath
from typing import Any

import pytest

from benchmarks.circumstances import circumstances
from tests.sample import DURATIONS, chosen_part

# What `make faults` may take on two idle cores.
HALF_AN_HOUR_S = 1800
RECORD = "--record-durations"


class Durations:
    """A plugin of pytest: time by file, where `--durations` asks for the slowest cases."""

    def __init__(self, config: pytest.Config) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._is_asked = config.option.durations is not None
        self._is_recorded = config.getoption("record_durations")
        # The load is that before the tests.
        self._measured = circumstances("pytest") if self._is_recorded else {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count what a case and its fixtures take: a shared one counts where it is first used."""
        self._seconds[report.nodeid.partition("::")[0]] += report.duration

    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter, exitstatus: int
    ) -> None:
        """Print the time of each file, and write it down if all has passed."""
        if self._is_asked or self._is_recorded:
            terminalreporter.section("time by file")
            for file, seconds in dearest(self._seconds):
                if seconds >= 0.5:
                    terminalreporter.write_line(f"{seconds:8.1f} s  {file}")
            terminalreporter.write_line(f"{sum(self._seconds.values()):8.1f} s  together")
        if self._is_recorded and exitstatus != pytest.ExitCode.OK:
            terminalreporter.write_line(f"{DURATIONS} stays as it is: not all has passed")
        elif self._is_recorded:
            before = json.loads(DURATIONS.read_text())
            now = recorded(before, self._seconds, chosen_part())
            DURATIONS.write_text(json.dumps(self._measured | now, indent=1) + "\n")
            terminalreporter.write_line(f"{DURATIONS} is written: commit it")


def recorded(before: dict[str, Any], seconds: dict[str, float], part: int) -> dict[str, Any]:
    """Return what is written after a run of a part, and where there are none yet, budgets."""
    rooms = by_room(seconds)
    share = HALF_AN_HOUR_S / max(sum(rooms.values()), 1e-9)
    return {
        "part": part,
        "seconds": {file: round(took, 1) for file, took in sorted(seconds.items())},
        "budgets_s": before.get("budgets_s")
        or {room: max(1, int(took * share)) for room, took in sorted(rooms.items())},
    }


def dearest(seconds: dict[str, float]) -> list[tuple[str, float]]:
    """Sort files by what they took, the longest first."""
    return sorted(seconds.items(), key=lambda one: -one[1])


def by_room(seconds: dict[str, float]) -> dict[str, float]:
    """Add up the files of each room: parts have other cases of a file, and like ones of a room."""
    rooms: dict[str, float] = defaultdict(float)
    for file, took in seconds.items():
        rooms[PurePath(file).parent.as_posix()] += took
    return dict(rooms)


def outgrown(found: dict[str, Any]) -> list[str]:
    """Name the rooms that took longer than their budgets, with the files that took most of it."""
    said = []
    for room, took in by_room(found.get("seconds", {})).items():
        budget = found["budgets_s"].get(room)
        files = {f: s for f, s in found["seconds"].items() if by_room({f: s}) == {room: s}}
        most = ", ".join(f"{file} {s:g} s" for file, s in dearest(files)[:3])
        if budget is None:
            said.append(f"{room} has no budget: give it one of {took:.0f} s, and others less")
        elif took > budget:
            said.append(f"{room} took {took:.0f} s, and its budget is {budget} s: {most}")
    return said
