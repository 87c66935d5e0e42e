"""Shows a rehearsal: which run goes on, how far it is, and the table of what was found."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

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
