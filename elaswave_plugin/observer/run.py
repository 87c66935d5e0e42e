"""A run as its files tell it: its lines, the attempts that count, the first steps of views."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.tracking.events import EVENTS_FILE, LEDGER_FILE, STEPS_FILE, read_lines

Record = dict[str, Any]
COMMITTED = "view_committed"
# The files of a run, in the order of RunFiles, and what each of their records has.
_FILES = (
    (EVENTS_FILE, ("kind", "time_s")),
    (STEPS_FILE, ("step", "epoch", "slot")),
    (LEDGER_FILE, ("step", "epoch", "samples")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """The files of a run directory, line by line."""

    directory: Path
    events: tuple[Record, ...]
    steps: tuple[Record, ...]
    ledger: tuple[Record, ...]

    def __str__(self) -> str:
        return f"{self.directory}: {len(self.events)} events, {len(self.steps)} step lines"

    def of_kind(self, kind: str) -> tuple[Record, ...]:
        """The events of one kind in the order of the file."""
        return tuple(event for event in self.events if event.get("kind") == kind)


def read_run(directory: Path) -> RunFiles:
    """Read a run directory; raises ConfigurationError if it is none, or not a whole one."""
    for name, _ in _FILES:
        if not (directory / name).is_file():
            raise ConfigurationError(
                f"{str(directory)!r} holds no {name}, wanted the directory of a run"
                " (--elaswave-dir, or OUT/run of the demo)"
            )
    events, steps, ledger = (_records(directory / name, fields) for name, fields in _FILES)
    return RunFiles(
        directory=directory, events=tuple(_told_once(events)), steps=steps, ledger=ledger
    )


def _told_once(events: Sequence[Record]) -> Iterator[Record]:
    """Leave out commits that an agent's next life tells again, where they were told before."""
    told: set[int] = set()
    for event in events:
        if event["kind"] == COMMITTED:
            if event.get("again") and event["epoch"] in told:
                continue
            told.add(event["epoch"])
        yield event


def _records(path: Path, fields: Sequence[str]) -> tuple[Record, ...]:
    try:
        records = tuple(read_lines(path))
    except OSError as error:
        raise ConfigurationError(f"{str(path)!r} cannot be read: {error.strerror}") from None
    for field in fields:
        if any(field not in record for record in records):
            raise ConfigurationError(
                f"{str(path)!r} has records without {field!r}, wanted the file of that name in the"
                " directory of a run (--elaswave-dir)"
            )
    return records


def check_one_job(run: RunFiles) -> None:
    """Raise ConfigurationError where more than one job has written the files.

    Their steps and views have the same numbers, so that no line tells whose it is.
    """
    firsts = [event for event in run.of_kind("worker_started") if not event.get("incarnation")]
    jobs = max(Counter(event["slot"] for event in firsts).values(), default=1)
    if jobs > 1:
        raise ConfigurationError(
            f"{str(run.directory)!r} holds the files of {jobs} jobs, wanted those of one; give each"
            " start of a job a run directory of its own (--elaswave-dir)"
        )


def counted_steps(run: RunFiles) -> dict[int, tuple[Record, ...]]:
    """Return, for each step in order, the lines of the attempt that counts: the last epoch's."""
    lines: dict[int, list[Record]] = {}
    for record in run.steps:
        lines.setdefault(record["step"], []).append(record)
    counted = {}
    for step in sorted(lines):
        epoch = max(record["epoch"] for record in lines[step])
        counted[step] = tuple(record for record in lines[step] if record["epoch"] == epoch)
    return counted


def first_steps(run: RunFiles) -> dict[int, int]:
    """Return the first step that each view completed."""
    firsts: dict[int, int] = {}
    for record in run.steps:
        view, step = record["epoch"], record["step"]
        firsts[view] = min(step, firsts.get(view, step))
    return firsts


def first_step_done_s(run: RunFiles, epoch: int) -> float | None:
    """Return when the last worker had completed the first step of a view; None without one."""
    first = first_steps(run).get(epoch)
    times = [r["time_s"] for r in run.steps if r["epoch"] == epoch and r["step"] == first]
    return max(times, default=None)
