"""Agents are never held up by the lines that they write."""

import subprocess
import sys

import pytest

from elaswave_plugin.ipc.console import say

LIMIT_S = 60.0
# It says more than a pipe holds, and then that it has.
SAYS = """
from elaswave_plugin.ipc.console import say
for _ in range(3000):
    say(100 * "x")
print("all said", flush=True)
"""


def test_nobody_waits_for_a_pipe_that_is_not_read() -> None:
    speaker = subprocess.Popen(
        [sys.executable, "-c", SAYS], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        assert speaker.wait(LIMIT_S) == 0
        told, said = speaker.communicate(timeout=LIMIT_S)
    finally:
        speaker.kill()
        speaker.wait(LIMIT_S)
    assert told == b"all said\n"
    # What was said in time is whole lines.
    line = b"elaswave: " + 100 * b"x"
    assert len(said) > 10 * len(line) and set(said.splitlines()) == {line}


def test_where_no_file_is_behind_it_it_is_said_too(capsys: pytest.CaptureFixture[str]) -> None:
    say("here")
    assert capsys.readouterr().err == "elaswave: here\n"
