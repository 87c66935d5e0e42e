"""Starts mypy, which takes a minute of one core, beside the other tests that need no workers."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session", autouse=True)
def mypy(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str] | None]:
    """The running check, where a test asks for its result."""
    if not any("mypy_result" in item.name for item in request.session.items):
        yield None
        return
    command = [sys.executable, "-m", "mypy", "--no-error-summary"]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=ROOT, **output) as process:  # type: ignore[call-overload]
        yield process
        process.kill()
