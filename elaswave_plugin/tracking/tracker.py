"""Tracker: the owner of rank 0 sends steps and recoveries to the sinks, off the main thread."""

import contextlib
import json
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from elaswave_plugin.config import ElasticConfig
from elaswave_plugin.tracking.events import STEPS_FILE, read_lines
from elaswave_plugin.tracking.sinks import OpenSink, Sink, sinks_of

log = logging.getLogger(__name__)

STATE_FILE = "tracker.json"
QUEUE_ROWS = 10_000
CLOSE_TIMEOUT_S = 15.0

Row = tuple[int, dict[str, float], bool]  # step, metrics, whether the row completes the step


class Tracker:
    """Sends metrics to the configured sinks while this worker is the owner; never raises or waits.

    Every worker makes one and calls `step` and `event`; only the owner's calls go anywhere. When
    the owner is lost, `own` on the next one opens the same run id, adds from the run directory's
    steps file the steps that the lost owner had not logged, and goes on; a step is logged once.
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
        self._openers = openers
        self._before_row = before_row
        if openers is None:
            self._openers = sinks_of(config, run_id, self._directory)
        self._last_step = -1
        self._is_heir = False
        self._rows: queue.Queue[Row | None] | None = None
        self._thread: threading.Thread | None = None
        if is_owner:
            self.own()

    def give_up(self) -> None:
        """Be the owner no more; what is written still goes out, in the tracker's thread."""
        if self._rows is not None:
            # Where the queue is full the sinks hang, and what is in it is lost with them.
            with contextlib.suppress(queue.Full):
                self._rows.put_nowait(None)
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
            # Whoever completes a step knows that the owner had it: without a run directory this
            # is all that the next owner has to go by.
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
        if rows is None or thread is None:
            return True
        deadline_s = time.monotonic() + timeout_s
        try:
            rows.put(None, timeout=timeout_s)
        except queue.Full:
            return False
        thread.join(max(0.0, deadline_s - time.monotonic()))
        return not thread.is_alive()

    def _put(self, row: Row) -> None:
        try:
            if self._rows is not None:
                self._rows.put_nowait(row)
        except queue.Full:
            self.dropped_rows += 1

    def _drain(self, rows: "queue.Queue[Row | None]") -> None:
        """The tracker's thread: open, write row after row, close."""
        sinks = [sink for opener in self._openers or () if (sink := self._opened(opener))]
        pending: dict[str, float] = {}
        last, stored = self._last_step, self._stored_last_step()
        taking_over = max(last, -1 if stored is None else stored) >= 0
        if stored is not None:
            last = stored if self._is_heir else max(last, stored)
        while (row := rows.get()) is not None:
            step, metrics, completes = row
            pending.update(metrics)
            if not completes or step <= last:
                continue
            if taking_over:
                for missed, values in self._missed_steps(last, step):
                    last = self._write(sinks, values, missed)
                taking_over = False
            last = self._write(sinks, pending, step)
            pending = {}
        if pending:
            self._write(sinks, pending, last + 1)
        for sink in sinks:
            self._guarded(sink.close)

    def _write(self, sinks: list[Sink], metrics: Mapping[str, float], step: int) -> int:
        self._before_row()
        # The note goes first: a kill between the two loses a point, which is better than a step
        # that appears twice.
        self._guarded(self._store_last_step, step)
        for sink in sinks:
            self._guarded(sink.log, metrics, step)
        return step

    def _opened(self, opener: OpenSink) -> Sink | None:
        sink: Sink | None = self._guarded(opener)
        return sink

    def _guarded(self, call: Any, *arguments: Any) -> Any:
        """Run a call of a sink; training goes on without the tracker, so the error is only said."""
        try:
            return call(*arguments)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            if text != self.problem:
                log.warning("tracking: %s; training goes on without it", text)
            self.problem = text
            return None

    def _stored_last_step(self) -> int | None:
        """-1 where nobody has logged a step yet, None where it is not known."""
        if self._directory is None:
            return None
        try:
            return int(json.loads((self._directory / STATE_FILE).read_text())["last_step"])
        except FileNotFoundError:
            return -1
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _store_last_step(self, step: int) -> None:
        if self._directory is None:
            return
        self._directory.mkdir(parents=True, exist_ok=True)
        fresh = self._directory / f".{STATE_FILE}.{os.getpid()}"
        fresh.write_text(json.dumps({"last_step": step}))
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
