"""The story of a rehearsal: the undisturbed run, the disturbed ones, what differs, what changed."""

import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.rehearsal.files import OFF, take_away
from elaswave_plugin.rehearsal.judge import Judged, Undisturbed, judge, twin_changes
from elaswave_plugin.rehearsal.launch import Command, Ended, run_command, warmed
from elaswave_plugin.rehearsal.order import RunOrder
from elaswave_plugin.rehearsal.schedule import (
    LEAST_STEPS,
    DisturbedRun,
    Facts,
    check_names,
    disturbed_runs,
)
from elaswave_plugin.tracking.events import STEPS_FILE

# Of a list of names.
MOST_NAMES = 10


class RehearsalScreen:
    """The progress of the runs on a terminal; a line for each that is done elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console, transient=True)

    def __enter__(self) -> "RehearsalScreen":
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    @contextmanager
    def running(self, title: str, run_dir: Path, steps: int) -> Iterator[Callable[[], None]]:
        """A run goes on; yields what looks how far it is."""
        task = self._progress.add_task(title, total=steps)
        path = run_dir / STEPS_FILE

        def look() -> None:
            if path.exists():
                lines = path.read_text(errors="replace").splitlines()
                done = {line.partition('"step":')[2].partition(",")[0] for line in lines}
                self._progress.update(task, completed=len(done - {""}))

        try:
            yield look if self._console.is_terminal else lambda: None
        finally:
            self._progress.remove_task(task)

    def judged(self, run: Mapping[str, Any]) -> None:
        """A run is done."""
        self._console.print(
            f"{run['title']}: {_said(run)}, {run['seconds']:.1f} s", highlight=False
        )


def show(console: Console, verdict: Mapping[str, Any]) -> None:
    """The table, the first difference of each run, and what changed in the working directory."""
    table = Table(title=f"{verdict['steps']} steps, {verdict['workers']} workers")
    for column in ("run", "what was done", "compared with", "result", "s"):
        table.add_column(column, overflow="fold")
    for run in verdict["runs"]:
        done = " ".join(_kill_said(one) for one in run["kills"]) or "each micro-batch by another"
        style = "green" if run["equal"] else "bold red"
        table.add_row(
            run["title"],
            done,
            run["compared_with"],
            f"[{style}]{_said(run)}[/]",
            f"{run['seconds']:.1f}",
        )
    console.print(table)
    for run in verdict["runs"]:
        _show_difference(console, run)
        _show_numbers(console, run)
    if not verdict["runs"]:
        console.print("one replica only: no other can take over its work, and nothing was compared")
    if verdict["not_compared"]:
        said = "not compared, as each worker has its own"
        names = _named(verdict["not_compared"])
        console.print(f"{said}: {names}", markup=False, highlight=False)
    if verdict["changed_files"]:
        names = _named(verdict["changed_files"])
        said = "new or changed in the working directory, by the script or by another program"
        console.print(f"{said}: {names}", markup=False, highlight=False)
    numbers = ("numbers_of_newcomers", "numbers_of_survivors")
    if any(run[kind] for run in verdict["runs"] for kind in numbers):
        console.print(
            "    such a number is no difference: give its object to elaswave_plugin.keep if the"
            " script decides or computes by it"
        )
    result = "equal" if verdict["equal"] else "differs"
    console.print(f"[bold]{result}[/] in {verdict['seconds']:.0f} s")


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more (--json)" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


def _show_difference(console: Console, run: Mapping[str, Any]) -> None:
    first = run["first_difference"]
    if first is None:
        return
    text = f"{run['title']}: first different is {run['first_difference_said']}"
    console.print(text, markup=False, highlight=False)
    for line in first["where"]:
        console.print(f"    {line}", markup=False, highlight=False)
    for one in first["also_differ"]:
        console.print(f"    also: {one}", markup=False, highlight=False)


def _show_numbers(console: Console, run: Mapping[str, Any]) -> None:
    """The numbers that a worker has otherwise after a loss, one a line; equal or not."""
    newcomers = [(one, "came back") for one in run["numbers_of_newcomers"]]
    for one, what in [*newcomers, *((one, "stayed") for one in run["numbers_of_survivors"])]:
        here, there = one["numbers"]
        who = ", ".join(map(str, one["workers"]))
        line = f" ({one['where'][0]})" if one["where"] else ""
        console.print(
            f"{run['title']}: {one['name']} is {here} before step {one['step']} on worker {who}, "
            f"which {what}, and {there} without a loss{line}",
            markup=False,
            highlight=False,
        )


def _said(run: Mapping[str, Any]) -> str:
    return "equal" if run["equal"] else f"differs ({run['differences']} times)"


def _kill_said(one: Mapping[str, Any]) -> str:
    return one["kill"] if one["fired"] else f"({one['kill']}: never reached)"


_SKIPPED = ("__pycache__", ".git")
Look = Mapping[str, tuple[int, int, int]]


def look_at(folder: Path) -> Look:
    """Inode, size and time of change of each file, by its path from the folder."""
    look: dict[str, tuple[int, int, int]] = {}
    for where, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in _SKIPPED]
        for path in (os.path.join(where, name) for name in files):
            with suppress(OSError):
                found = os.lstat(path)
                look[os.path.relpath(path, folder)] = found.st_ino, found.st_size, found.st_mtime_ns
    return look


def changed(before: Look, after: Look) -> list[str]:
    """Files that are new, gone or other than they were, in order."""
    return sorted(name for name in {*before, *after} if before.get(name) != after.get(name))


EQUAL, DIFFERS = 0, 1
_ALWAYS = (
    *OFF,
    ("dump_state", "last"),
    # Other work on the machine makes workers slow, which must not deal anything again.
    ("slow_workers", "name"),
    # A difference is to be found and named by the comparison of runs, which do not count passes.
    ("rehearse_first_step", "off"),
    ("kill", ()),
    ("change", ()),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearsalOptions:
    """The command to rehearse, and how; every value is in range."""

    command: Command
    steps: int
    json_file: Path | None = None
    overwrites: bool = False
    only: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True)
class Verdict:
    """The findings of a rehearsal."""

    options: RehearsalOptions
    facts: Facts
    runs: list[Judged] = field(default_factory=list)
    not_compared: tuple[str, ...] = ()
    changed_files: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def exit_code(self) -> int:
        """0 equal, 1 differs; changed files are no verdict, as others may have changed them."""
        return DIFFERS if any(run.first is not None for run in self.runs) else EQUAL

    def to_json(self) -> dict[str, Any]:
        """One document."""
        return {
            "command": list(self.options.command.words),
            "steps": self.options.steps,
            "equal": not any(run.first is not None for run in self.runs),
            "exit_code": self.exit_code,
            "seconds": self.seconds,
            "replicas": self.facts.width,
            "workers": self.facts.workers,
            "promised": "bits" if self.facts.exact else "the planned change",
            "runs": [run.to_json() for run in self.runs],
            "not_compared": list(self.not_compared),
            "changed_files": self.changed_files,
        }


def rehearse(options: RehearsalOptions, console: Console) -> int:
    """Rehearse a command; 0 equal, 1 differs, 2 refused.

    Raises ConfigurationError for a command that does not get so far, and where another rehearsal
    runs in this working directory.
    """
    began_s = time.monotonic()
    here = Path.cwd()
    with _sole_use(here), tempfile.TemporaryDirectory(prefix="elaswave-rehearsal-") as name:
        folder = Path(name)
        before = look_at(here)
        verdict = _rehearsed(options, folder, console)
        verdict.changed_files = changed(before, look_at(here))
    verdict.seconds = time.monotonic() - began_s
    if options.json_file is not None:
        options.json_file.write_text(json.dumps(verdict.to_json(), indent=2) + "\n")
    show(console, verdict.to_json())
    return verdict.exit_code


def _rehearsed(options: RehearsalOptions, folder: Path, console: Console) -> Verdict:
    with RehearsalScreen(console) as screen:

        def run(
            name: str, title: str, settings: dict[str, Any], socket: Path | None, **more: bool
        ) -> tuple[RunOrder, Ended]:
            order = RunOrder(
                folder=folder,
                name=name,
                settings={**dict(_ALWAYS), "stop_after": options.steps, **settings},
                overwrites=options.overwrites,
                **more,
            )
            with screen.running(title, order.run_dir, options.steps) as look:
                ended = run_command(options.command, order, socket, look)
            take_away(order)
            return order, ended

        with warmed(options.command, folder) as socket:
            order, ended = run("undisturbed", "undisturbed", {}, socket)
        _check_refused(order)
        undisturbed = Undisturbed.read(order, ended, steps=options.steps)
        own = undisturbed.reference.own
        verdict = Verdict(options=options, facts=undisturbed.facts, not_compared=own)
        # Another interpreter, as of a worker that comes back on another node: it hashes otherwise.
        with warmed(options.command, folder) as socket:
            for one in _chosen(options, undisturbed.facts):
                order, ended = run(one.name, one.title, _settings(one), socket, rotates=one.rotates)
                _check_refused(order)
                twin = None
                if one.kills and not undisturbed.facts.exact and not ended.exit_code:
                    title = f"{one.title}, as planned"
                    settings = {**_settings(one), "kill": [], "change": twin_changes(order)}
                    twin = run(f"{one.name}-planned", title, settings, socket)
                judged = judge(one, order, ended, undisturbed, twin=twin)
                verdict.runs.append(judged)
                screen.judged(judged.to_json())
                shutil.rmtree(order.run_dir)
        return verdict


def _chosen(options: RehearsalOptions, facts: Facts) -> list[DisturbedRun]:
    """The runs that the user wants; raises ConfigurationError for a name that none has."""
    runs = {run.name: run for run in disturbed_runs(facts, steps=options.steps)}
    for name in options.only:
        if name not in runs:
            raise ConfigurationError(f"--run is {name!r}, wanted one of {', '.join(runs)}")
    return [runs[name] for name in options.only or runs]


def _settings(run: DisturbedRun) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "kill": [str(one) for one in run.kills],
        "change": [str(one) for one in run.changes],
    }
    if run.kills and not run.changes:
        settings["respawn"] = 0
    return settings


def _check_refused(order: RunOrder) -> None:
    if order.refused.exists():
        raise ConfigurationError(order.refused.read_text())


@contextmanager
def _sole_use(here: Path) -> Iterator[None]:
    """Keeps other rehearsals out of a working directory, to tell its changes apart."""
    folder = os.open(here, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise ConfigurationError(
            f"another rehearsal is running in {str(here)!r}: wait for its end, or begin in another"
            " working directory"
        ) from None
    finally:
        os.close(folder)


def check_options(
    *,
    command: list[str],
    steps: int,
    json_file: Path | None,
    overwrites: bool,
    only: list[str],
) -> RehearsalOptions:
    """Check every option; raises ConfigurationError with one sentence at the first wrong one."""
    from elaswave_plugin.observer.output_file import check_output

    if steps < LEAST_STEPS:
        raise ConfigurationError(
            f"--steps is {steps}, wanted at least {LEAST_STEPS}: workers are killed in some and"
            " come back in later ones"
        )
    check_output("--json", json_file)
    check_names(only)
    return RehearsalOptions(
        command=Command.checked(command),
        steps=steps,
        json_file=json_file,
        overwrites=overwrites,
        only=tuple(only),
    )
