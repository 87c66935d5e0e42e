"""Append-only JSON lines shared by many processes: the memory of a run (standard library only)."""

import json
import os
import sys
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

from elaswave_plugin.errors import ConfigurationError

EVENTS_FILE = "events.jsonl"
STEPS_FILE = "steps.jsonl"
LEDGER_FILE = "ledger.jsonl"


class EventLog(AbstractContextManager["EventLog"]):
    """Appends one JSON object a line to a file that many processes may share; no path drops all.

    Each line goes out in a single write on an O_APPEND descriptor, so lines of different processes
    never mix and a SIGKILL leaves whole lines only (of one machine: NFS does not append so).
    Writing never raises into training: a line that the disk refuses is counted in `lost_lines`,
    and the first one said on stderr. Opening does raise (ConfigurationError), since a wrong
    directory is a mistake to report at the start; in a job that runs, `late`, it is said as well
    and costs the lines.
    """

    def __init__(self, path: str | os.PathLike[str] | None, *, late: bool = False) -> None:
        self.path = None if path is None else Path(path)
        self.lost_lines = 0
        self._is_torn = self._is_unopened = False
        self._fd = -1
        if self.path is not None:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            except OSError as error:
                if late:
                    self._is_unopened = True
                    self._say_lost(str(error.strerror))
                    return
                raise ConfigurationError(
                    f"{str(self.path)!r} cannot be written ({error.strerror}); name a folder of"
                    " yours (--elaswave-dir, key 'dir')"
                ) from None

    def emit(self, kind: str, **fields: Any) -> None:
        """Append {"time_s": now, "kind": kind, **fields}."""
        self.write({"time_s": time.time(), "kind": kind, **fields})

    def write(self, record: Mapping[str, Any]) -> None:
        """Append the record; of what JSON does not know, NaN and infinity are null, others text."""
        fd = self._fd
        if fd < 0:
            self.lost_lines += self._is_unopened
            return
        line = _encode(dict(record)).encode() + b"\n"
        # What a full disk took of a line must not spoil the next one.
        line = b"\n" + line if self._is_torn else line
        written, why = 0, "the disk is full"
        try:
            written = os.write(fd, line)
        except OSError as error:
            why = str(error)
        if written:
            self._is_torn = written != len(line)
        if written != len(line):
            self.lost_lines += 1
            if self.lost_lines == 1:
                self._say_lost(why)

    def _say_lost(self, why: str) -> None:
        print(f"elaswave: lines of {self.path} are lost ({why})", file=sys.stderr)

    @property
    def what_is_missing(self) -> str | None:
        """The lines that should be there and cannot be read, in words; None where all are there."""
        if self.is_deleted:
            return f"all of {self.path}, which was deleted"
        return f"{self.lost_lines} lines of {self.path}" if self.lost_lines else None

    @property
    def is_deleted(self) -> bool:
        """True if the file was deleted, so that what goes there cannot be read."""
        return self._fd >= 0 and os.fstat(self._fd).st_nlink == 0

    def close(self) -> None:
        """Close the file; later lines are dropped."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __exit__(self, *error: object) -> None:
        self.close()


class Tail:
    """Reads the lines that were appended to a file since the last look; the file may not exist."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._offset_bytes = 0

    def new(self) -> list[dict[str, Any]]:
        """Return the complete lines appended since the last call, in file order."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset_bytes)
                data = file.read()
        except FileNotFoundError:
            return []
        end = data.rfind(b"\n") + 1
        self._offset_bytes += end
        return [record for line in data[:end].splitlines() if (record := _record(line))]


def read_lines(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return all complete records of a JSON-lines file; an absent file has none."""
    return Tail(path).new()


def _record(line: bytes) -> dict[str, Any] | None:
    """Parse a line; a line cut short by a full disk is not a record."""
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _encode(record: dict[str, Any]) -> str:
    """JSON as other languages read it: json.dumps writes NaN and Infinity as if they were JSON."""
    try:
        return json.dumps(record, separators=(",", ":"), default=_plain, allow_nan=False)
    except ValueError:
        text = json.dumps(record, default=_plain)
        finite = json.loads(text, parse_constant=lambda name: None)
        return json.dumps(finite, separators=(",", ":"))


def _plain(value: Any) -> Any:
    """Give JSON a number, list or text for what it does not know (arrays, paths, sets)."""
    if isinstance(value, set | frozenset):
        return sorted(value)
    tolist = getattr(value, "tolist", None)  # numpy and torch, without importing either
    return tolist() if callable(tolist) else str(value)


_MOST_LINES = 10_000
_FLUSH_S = 5.0


class AsyncLog(EventLog):
    """The same, in the same order, written by a thread of its own that starts with the first line.

    An agent that stood still with a file server would be taken for lost. Lines beyond a bound
    are dropped, and those that are not out within some seconds of `close`.
    """

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        super().__init__(path)
        # One without a lock of Python's: the agent would wait until a thread that has it is run
        # again, on a busy machine for long.
        self._lines: SimpleQueue[Mapping[str, Any] | None] = SimpleQueue()
        self._thread: Thread | None = None

    def write(self, record: Mapping[str, Any]) -> None:
        """Append the record in the end; must not be changed any more."""
        if self.path is None:
            return
        if self._thread is None:
            self._thread = Thread(target=self._write_all, name="event-log", daemon=True)
            self._thread.start()
        if self._lines.qsize() < _MOST_LINES:
            self._lines.put(record)
        else:
            self.lost_lines += 1

    def close(self) -> None:
        """Wait for what is queued, but no longer than some seconds."""
        if self._thread is not None:
            if self._lines.qsize() >= _MOST_LINES:
                return
            self._lines.put(None)
            self._thread.join(_FLUSH_S)
            if self._thread.is_alive():
                return  # it still has the file; the process ends soon
        super().close()

    def _write_all(self) -> None:
        while (record := self._lines.get()) is not None:
            super().write(record)
