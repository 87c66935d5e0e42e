"""Runs the command of a benchmark that has to refuse its options."""

import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
# The arguments after `python -m benchmarks.`; returns what was written to stderr.
Refused = Callable[..., str]


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Run a command in this process, which has imported what it needs; it has to end with 2."""

    def run(name: str, *options: str) -> str:
        monkeypatch.setattr(sys, "argv", [f"python -m benchmarks.{name}", *options])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(BENCHMARKS / f"{name}.py"), run_name="__main__")
        assert ended.value.code == 2
        return capsys.readouterr().err

    return run
