"""The event log of agents: a file system that stands still holds nobody up."""

import json
import os
import time
from pathlib import Path

from elaswave_plugin.tracking.events import AsyncLog, read_lines
from tests.idle import Deadline, within

LINES = 3000
PIPE_BYTES = 1 << 16


def test_lines_of_a_file_that_takes_none_come_later_and_in_order(tmp_path: Path) -> None:
    """A pipe that nobody empties is what a file server that does not answer is."""
    path = tmp_path / "events.jsonl"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    log = AsyncLog(path)
    with within(2.0):
        for number in range(LINES):
            log.emit("worker_ready", slot=number, incarnation=0)
    data = b""
    deadline = Deadline(20)
    while data.count(b"\n") < LINES:
        assert deadline.left_s()
        try:
            data += os.read(reader, PIPE_BYTES)
        except BlockingIOError:
            time.sleep(0.001)  # the writer has not come to it
    log.close()
    os.close(reader)
    assert len(data) > 2 * PIPE_BYTES, "the pipe took all of it: nothing was shown"
    assert [json.loads(line)["slot"] for line in data.splitlines()] == list(range(LINES))
    assert log.lost_lines == 0


def test_closing_waits_for_what_is_queued(tmp_path: Path) -> None:
    log = AsyncLog(tmp_path / "events.jsonl")
    for number in range(100):
        log.emit("worker_ready", slot=number)
    log.close()
    assert [line["slot"] for line in read_lines(tmp_path / "events.jsonl")] == list(range(100))


def test_without_a_path_there_is_no_thread() -> None:
    log = AsyncLog(None)
    log.emit("worker_ready", slot=0)
    log.close()
    assert log.lost_lines == 0
