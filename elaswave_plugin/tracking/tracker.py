"""Tracker: the owner of rank 0 sends steps and recoveries to the sinks, off the main thread."""

import contextlib
import json
import logging
import math
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elaswave_plugin.config import ElasticConfig
from elaswave_plugin.ipc.console import say
from elaswave_plugin.tracking.events import STEPS_FILE, read_lines
from elaswave_plugin.tracking.sinks import OpenSink, Sink, sinks_of, whereabouts

log = logging.getLogger(__name__)

STATE_FILE = "tracker.json"
QUEUE_ROWS = 10_000
CLOSE_TIMEOUT_S = 15.0
POLL_S = 0.05

Row = tuple[int, dict[str, float], bool]  # step, metrics, whether the row completes the step


@dataclass(slots=True)
class _Place:
    """A sink, and the last step that it was given, by whichever owner."""

    sink: Sink
    last: int


class Tracker:
    """Sends metrics to the configured sinks while this worker is the owner; never raises or waits.

    Every worker makes one and calls `step` and `event`; only the owner's calls go anywhere. The
    next owner opens the same run id, asks each sink which steps it has, adds from the run
    directory's steps file what is missing, and goes on: a step is logged once, and it counts as
    logged when the sink has it.
    """

    def __init__(
        self,
        config: ElasticConfig,
        run_id: str,
        is_owner: bool,
        *,
        directory: Path | None = None,
        openers: tuple[OpenSink, ...] | None = None,
        before_row: Callable[[], None] = lambda: None,
    ) -> None:
        """``before_row()``, in the tracker's thread, waits for as long as nothing may be logged."""
        self.dropped_rows = 0
        self.problem: str | None = None
        self._directory = directory or config.dir
        self._wandb_run = run_id if config.wandb != "off" else None
        self._openers = openers
        self._before_row = before_row
        if openers is None:
            self._openers = sinks_of(config, run_id, self._directory)
        self._last_step = -1
        self._is_heir = False
        self._rows: queue.Queue[Row | None] | None = None
        self._thread: threading.Thread | None = None
        # Of the times when this worker was the owner: each closes its sinks, which takes a while.
        self._closing: list[threading.Thread] = []
        if is_owner:
            self.own()

    def give_up(self) -> None:
        """Be the owner no more; what is written still goes out, in the tracker's thread."""
        if self._rows is not None:
            # Where the queue is full the sinks hang, and what is in it is lost with them.
            with contextlib.suppress(queue.Full):
                self._rows.put_nowait(None)
            assert self._thread is not None
            self._closing.append(self._thread)
            self._rows = self._thread = None

    def own(self, *, logged: int = -1, is_heir: bool = False) -> None:
        """Become the owner; opening the sinks happens in the tracker's thread.

        ``logged``: a step which an earlier owner has had, if there was one. ``is_heir``: that one
        is lost, and with it what had waited for its sinks; its note says what it has logged.
        """
        if self._rows is not None or not self._openers:
            return
        self._last_step = max(self._last_step, logged)
        self._is_heir = is_heir
        self._rows = queue.Queue(QUEUE_ROWS)
        self._thread = threading.Thread(
            target=self._drain, args=(self._rows,), name="elaswave-tracker", daemon=True
        )
        self._thread.start()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand over the metrics of a completed step."""
        if self._rows is None:
            # A worker that completes a step knows that the owner had it: without a run directory
            # the next owner has only this to go by.
            self._last_step = max(self._last_step, step)
        else:
            self._put((step, {name: float(value) for name, value in metrics.items()}, True))

    def event(self, kind: str, step: int, fields: Mapping[str, Any]) -> None:
        """Hand over an event; its numbers join the row of the next step as kind/name."""
        if self._rows is not None:
            self._put((step, numbers_of(kind, fields), False))

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> bool:
        """Flush and close the sinks; False if they took longer than the limit and were left."""
        rows, thread = self._rows, self._thread
        self._rows = self._thread = None
        deadline_s = time.monotonic() + timeout_s
        if rows is not None and thread is not None:
            try:
                rows.put(None, timeout=timeout_s)
            except queue.Full:
                return False
            self._closing.append(thread)
        for one in self._closing:
            one.join(max(0.0, deadline_s - time.monotonic()))
        if rows is not None and self._wandb_run is not None:
            for text in whereabouts(self._directory or Path(), self._wandb_run):
                say(text)
        return not any(one.is_alive() for one in self._closing)

    def _put(self, row: Row) -> None:
        try:
            if self._rows is not None:
                self._rows.put_nowait(row)
        except queue.Full:
            self.dropped_rows += 1

    def _drain(self, rows: "queue.Queue[Row | None]") -> None:
        """The tracker's thread: open, write row after row, close."""
        last, note = self._last_step, self._note()
        follows = max(last, -1 if note is None else note[0]) >= 0 or bool(note and note[1])
        if follows and not self._is_heir:
            self._await_handover()
        # Before the sinks open, which takes seconds: the next owner is to wait for this one.
        self._guarded(self._write_note, -1 if note is None else note[0], is_open=True)
        sinks = [sink for opener in self._openers or () if (sink := self._opened(opener))]
        if note is not None:
            last = note[0] if self._is_heir else max(last, note[0])
        places = [_Place(sink, self._had(sink, last) if follows else last) for sink in sinks]
        pending: dict[str, float] = {}
        last = min([place.last for place in places], default=last)
        while (row := rows.get()) is not None:
            step, metrics, completes = row
            pending.update(metrics)
            if not completes or step <= last:
                continue
            if follows:
                for missed, values in self._missed_steps(last, step):
                    last = self._write(places, values, missed)
                follows = False
            last = self._write(places, pending, step)
            pending = {}
        if pending:
            last = self._write(places, pending, last + 1)
        for place in places:
            self._close_sink(place)
        self._guarded(self._write_note, last, is_open=False)

    def _write(self, places: "list[_Place]", metrics: Mapping[str, float], step: int) -> int:
        self._before_row()
        # The note goes first, for sinks that cannot tell: a kill between the two loses a point,
        # which is better than a step that appears twice.
        self._guarded(self._write_note, step, is_open=True)
        for place in places:
            if step > place.last:
                self._guarded(place.sink.log, metrics, step)
                place.last = step
        return step

    def _had(self, sink: Sink, noted: int) -> int:
        """The last step that a sink has of earlier owners; what was noted where it cannot tell."""
        had = self._guarded(sink.last_step)
        return noted if had is None else int(had)

    def _close_sink(self, place: "_Place") -> None:
        """Close a sink; what went wrong meanwhile is said where rows are missing, and only then."""
        problem: Exception | None = None
        try:
            place.sink.close()
        except Exception as error:
            problem = error
        had = self._guarded(place.sink.last_step)
        if had is not None and had < place.last:
            self._say(f"{place.sink.name} has no rows of steps {had + 1} to {place.last}")
        elif had is None and problem is not None:
            self._say(f"{type(problem).__name__}: {problem}")

    def _opened(self, opener: OpenSink) -> Sink | None:
        sink: Sink | None = self._guarded(opener)
        return sink

    def _guarded(self, call: Any, *arguments: Any, **more: Any) -> Any:
        """Run a call of a sink; training goes on without the tracker, so the error is only said."""
        try:
            return call(*arguments, **more)
        except Exception as error:
            self._say(f"{type(error).__name__}: {error}")
            return None

    def _say(self, text: str) -> None:
        if text != self.problem:
            log.warning("tracking: %s; training goes on without it", text)
        self.problem = text

    def _await_handover(self) -> None:
        """Wait until the owner before this one, which lives, has closed its sinks."""
        deadline_s = time.monotonic() + CLOSE_TIMEOUT_S
        while (note := self._note()) is not None and time.monotonic() < deadline_s:
            if not note[1] or _is_gone(note[1]):
                return
            time.sleep(POLL_S)  # another process: its note is all that tells

    def _note(self) -> tuple[int, str] | None:
        """The last step handed to the sinks, and the owner that has them open, "" for none.

        -1 where no step is logged yet, None where it is not known.
        """
        if self._directory is None:
            return None
        try:
            note = json.loads((self._directory / STATE_FILE).read_text())
            return int(note["last_step"]), str(note.get("open", ""))
        except FileNotFoundError:
            return -1, ""
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _write_note(self, step: int, *, is_open: bool) -> None:
        if self._directory is None:
            return
        self._directory.mkdir(parents=True, exist_ok=True)
        fresh = self._directory / f".{STATE_FILE}.{os.getpid()}"
        owner = f"{socket.gethostname()}:{os.getpid()}" if is_open else ""
        fresh.write_text(json.dumps({"last_step": step, "open": owner}))
        fresh.replace(self._directory / STATE_FILE)

    def _missed_steps(self, last: int, before: int) -> list[tuple[int, dict[str, float]]]:
        """The steps after `last` and before `before`, from the workers' own file."""
        if self._directory is None or before <= last + 1:
            return []
        newest: dict[int, dict[str, Any]] = {}
        for record in self._guarded(read_lines, self._directory / STEPS_FILE) or ():
            step = record.get("step", -1)
            if last < step < before:
                known = newest.get(step)
                if known is None or record.get("epoch", 0) > known.get("epoch", 0):
                    newest[step] = record
        return [(step, step_metrics(newest[step])) for step in sorted(newest)]


def _is_gone(owner: str) -> bool:
    """Return whether an owner on this host has ended; one elsewhere may live."""
    host, _, pid = owner.rpartition(":")
    return host == socket.gethostname() and not Path("/proc", pid).exists()


def step_metrics(record: Mapping[str, Any], live_workers: int | None = None) -> dict[str, float]:
    """Turn a record of steps.jsonl into the metrics of a step: names are the same everywhere.

    A number that is not known, as the norm that ZeRO 0 does not compute, is left out.
    """
    metrics = {
        f"train/{name}": float(record[name])
        for name in ("loss", "grad_norm", "lr", "step_s")
        if isinstance(record.get(name), int | float) and not math.isnan(record[name])
    }
    if record.get("tokens") and record.get("step_s"):
        metrics["train/tokens_per_s"] = record["tokens"] / record["step_s"]
    workers = live_workers if live_workers is not None else record.get("live_workers")
    if workers is not None:
        metrics["train/live_workers"] = float(workers)
    return metrics


def numbers_of(kind: str, fields: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of an event, nested ones too: recovered/mttr_s, recovered/phases_s/move.

    Moments (names in _at_s) are no metrics: a date on an axis says nothing.
    """
    found: dict[str, float] = {}
    for name, value in fields.items():
        if isinstance(value, Mapping):
            found.update(numbers_of(f"{kind}/{name}", value))
        elif isinstance(value, int | float) and not name.endswith("_at_s"):
            found[f"{kind}/{name}"] = float(value)
    return found
