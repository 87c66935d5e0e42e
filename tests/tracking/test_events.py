"""EventLog: whole lines from many processes, no path drops, never raises into training."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.tracking.events import EventLog, Tail, read_lines

WRITER = """
import sys
from elaswave_plugin.tracking.events import EventLog
with EventLog(sys.argv[1]) as log:
    for number in range(300):
        log.emit("tick", writer=int(sys.argv[2]), number=number, text="x" * 400)
"""


def test_event_log_lines_of_many_processes_stay_whole(tmp_path: Path) -> None:
    path = tmp_path / "run" / "events.jsonl"
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(path), str(index)])
        for index in range(3)
    ]
    assert [writer.wait(timeout=60) for writer in writers] == [0, 0, 0]
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(records) == 900
    for index in range(3):
        numbers = [record["number"] for record in records if record["writer"] == index]
        assert numbers == list(range(300))


def test_event_log_without_path_drops_and_after_close_too(tmp_path: Path) -> None:
    EventLog(None).emit("anything", value=1)
    log = EventLog(tmp_path / "events.jsonl")
    log.emit("kept")
    log.close()
    log.emit("dropped")
    assert [record["kind"] for record in read_lines(tmp_path / "events.jsonl")] == ["kept"]


def test_event_log_keeps_floats_exactly_and_writes_unknown_values_as_text(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    path = tmp_path / "steps.jsonl"
    with EventLog(path) as log:
        log.write({"loss": 0.1 + 0.2, "where": Path("a/b"), "slots": {3, 1}})
        log.emit("scalar", norm=numpy.float32(0.1), ids=numpy.arange(3))
    first, second = read_lines(path)
    assert first == {"loss": 0.1 + 0.2, "where": "a/b", "slots": [1, 3]}
    assert second["norm"] == float(numpy.float32(0.1)) and second["ids"] == [0, 1, 2]
    assert second["time_s"] > 1e9


def test_what_json_has_no_number_for_is_null(tmp_path: Path) -> None:
    """Python reads NaN and Infinity all the same; jq, pandas and other languages do not."""
    path = tmp_path / "steps.jsonl"
    with EventLog(path) as log:
        log.write({"grad_norm": math.nan, "loss": 0.1 + 0.2, "of": {"stage": [1.5, -math.inf]}})
        log.write({"grad_norm": 2.5, "where": Path("a/b")})

    def no_json(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    first, second = (
        json.loads(line, parse_constant=no_json) for line in path.read_text().splitlines()
    )
    assert first == {"grad_norm": None, "loss": 0.1 + 0.2, "of": {"stage": [1.5, None]}}
    assert second == {"grad_norm": 2.5, "where": "a/b"}


def test_a_line_that_a_full_disk_cut_short_spoils_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    write, path = os.write, tmp_path / "events.jsonl"
    with EventLog(path) as log:
        log.emit("first")
        with monkeypatch.context() as full:
            full.setattr(os, "write", lambda fd, data: write(fd, data[: len(data) // 2]))
            log.emit("torn")
        log.emit("second")
        log.emit("third")
    assert [line["kind"] for line in read_lines(path)] == ["first", "second", "third"]
    assert log.lost_lines == 1
    assert f"lines of {path} are lost (the disk is full)" in capfd.readouterr().err


def test_event_log_on_a_full_disk_counts_the_lost_line_and_goes_on() -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    log = EventLog("/dev/full")
    log.emit("lost")
    assert log.lost_lines == 1
    log.close()


def test_event_log_in_a_place_that_cannot_be_written_raises_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="cannot be written"):
        EventLog(tmp_path / "file" / "events.jsonl")


def test_tail_returns_only_new_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    tail = Tail(path)
    assert tail.new() == []
    path.write_bytes(b'{"a":1}\n{"b":')
    assert tail.new() == [{"a": 1}]
    assert tail.new() == []
    with path.open("ab") as file:
        file.write(b'2}\nno json\n{"c":3}\n')
    assert tail.new() == [{"b": 2}, {"c": 3}]
