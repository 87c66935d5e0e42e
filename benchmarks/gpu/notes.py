"""The findings of an item's program, in a file by line, so that a late end loses none."""

import json
import os
from pathlib import Path
from typing import Any


class NotRun(Exception):
    """Raised by an item's program that cannot run here; the message says why."""


class Notes:
    """The findings of a program: lines of the page, figures of the JSON, checks of the verdict."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: list[str] = []
        self._figures: dict[str, Any] = {}
        self._failed: list[str] = []
        self._checks = 0
        self.write()

    def say(self, line: str) -> None:
        """Add a line to the page."""
        self._lines.append(line)
        print(line, flush=True)
        self.write()

    def figure(self, name: str, value: Any) -> None:
        """Add a figure to the JSON; `value` is anything that JSON holds."""
        self._figures[name] = value
        self.write()

    def check(self, what: str, good: bool) -> bool:
        """Add a line and its verdict, of which one bad one fails the item; returns `good`."""
        self._checks += 1
        if not good:
            self._failed.append(what)
        self.say(f"{what}: {'ok' if good else 'FAILED'}")
        return good

    def conclude(self, *, not_run: str = "") -> None:
        """Write that the program has come to its end; `not_run` says why it did nothing."""
        self.write(concluded=True, not_run=not_run)

    def write(self, *, concluded: bool = False, not_run: str = "") -> None:
        """Replace the file by what is known now."""
        found = {
            "concluded": concluded,
            "not_run": not_run,
            "checks": self._checks,
            "failed": self._failed,
            "lines": self._lines,
            "figures": self._figures,
        }
        draft = self._path.with_suffix(".draft")
        draft.write_text(json.dumps(found))
        os.replace(draft, self._path)
