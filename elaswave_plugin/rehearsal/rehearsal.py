"""The story of a rehearsal: the undisturbed run, the disturbed ones, what differs, what changed."""

import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

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
from elaswave_plugin.rehearsal.screen import RehearsalScreen, show
from elaswave_plugin.rehearsal.tree import changed, look_at

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
