"""The output of the demo: lines of a run as its files grow, and the comparison at the end."""

import math
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from elaswave_plugin.config import RECOVERY_PHASES
from elaswave_plugin.core.layout.layout import ParallelLayout
from elaswave_plugin.observer.layout_change import layout_lines
from elaswave_plugin.recovery.record import recovered_text
from elaswave_plugin.tracking.events import EVENTS_FILE, STEPS_FILE, Tail

STEP_LINES = 10


class RunScreen:
    """Follows the files of one run; `look` prints what is new and moves the bar."""

    def __init__(
        self,
        console: Console,
        progress: Progress,
        *,
        name: str,
        directory: Path,
        steps: int,
        step_lines: int = STEP_LINES,
    ) -> None:
        """`step_lines`: how many of the steps get a line of their own, about."""
        self._console = console
        self._progress = progress
        self._task = progress.add_task(name, total=steps, detail="starting")
        self._events = Tail(directory / EVENTS_FILE)
        self._steps = Tail(directory / STEPS_FILE)
        self._every = max(1, steps // step_lines) if step_lines else 0
        self._shown = -1
        self._killed: set[int] = set()
        self._workers = 0
        self._epoch = 0
        self._reports: dict[int, list[dict[str, Any]]] = {}
        self._fault_s: float | None = None
        self._detect_s = 0.0

    def look(self) -> None:
        """Print what happened since the last look."""
        for event in self._events.new():
            self._event(event)
        for record in self._steps.new():
            self._step(record)
        self._progress.refresh()

    def _event(self, event: dict[str, Any]) -> None:
        kind = event["kind"]
        if kind == "fault_fired":
            self._killed.add(event["slot"])
            self._fault_s = self._fault_s or event["at_s"]
            text = f"worker {event['slot']} killed in step {event['step']}, {event['phase']}"
            self._say(f"[bold red]{text}[/] (pid {event['pid']}, SIGKILL)")
        elif kind == "worker_exited" and event["slot"] not in self._killed and _failed(event):
            self._say(f"[bold red]worker {event['slot']} exited[/]: {escape(event['evidence'])}")
        elif kind == "view_proposed" and self._fault_s is not None:
            # No worker can time this phase: it lies between the victim and the survivors.
            self._detect_s, self._fault_s = event["time_s"] - self._fault_s, None
        elif kind == "view_committed" and not event.get("again"):
            self._view(event)
        elif kind == "entered":
            built = f"built in {event['beside_s']:.1f} s beside the training"
            moved = f"{event['fetched_bytes'] / 2**10:.0f} KiB fetched"
            self._say(f"[bold green]worker {event['slot']} is back[/]: {built}, {moved}")
        elif kind == "recovered":
            reports = self._reports.setdefault(event["epoch"], [])
            reports.append(event)
            if len(reports) == self._workers:
                self._recovered(reports)

    def _view(self, event: dict[str, Any]) -> None:
        self._workers = len(event["ranks"])
        workers = " ".join(map(str, event["ranks"]))
        if event["epoch"] > 1:
            reason = escape(event["reason"])
            change = f"view {self._epoch} -> {event['epoch']}"
            self._say(f"[bold yellow]{change}[/]: workers {workers}; {reason}")
        self._epoch = event["epoch"]

    def _recovered(self, reports: list[dict[str, Any]]) -> None:
        times_s = {
            name: max(float(report["phases_s"].get(name, 0.0)) for report in reports)
            for name in RECOVERY_PHASES
        }
        times_s["detect"] = times_s["detect"] or self._detect_s
        if reports[0]["newcomers"]:
            new = {name.partition(".")[0] for name in reports[0]["newcomers"]}
            pauses_s = [float(r["pause_s"]) for r in reports if str(r["slot"]) not in new]
            pause_ms = 1e3 * max(pauses_s)
            self._say(f"[bold green]joined[/]: the others stood still for {pause_ms:.1f} ms")
            return
        moved, restored = int(reports[0]["bytes_moved"]), reports[0]["restored_step"]
        self._say(f"[bold green]recovered[/]: {recovered_text(restored, moved, times_s)}")
        if "layout_after" in reports[0]:
            layout = ParallelLayout.from_json(reports[0]["layout_after"])
            title, places = map(escape, layout_lines(layout))
            self._say(f"[bold green]layout[/]: {title}\n  {places}")

    def _step(self, record: dict[str, Any]) -> None:
        step = record["step"]
        if step <= self._shown:
            return
        self._shown = step
        loss = math.nan if record["loss"] is None else record["loss"]
        detail = f"loss {loss:.4f}, {self._workers} workers"
        self._progress.update(self._task, completed=step + 1, detail=detail)
        if self._every and step % self._every == 0:
            self._say(f"step {step:>4}  {detail}, {float(record['step_s']) * 1e3:.0f} ms")

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)


def progress_on(console: Console) -> Progress:
    """Make the bars that the runs share; no thread of their own, since we fork beside them."""
    return Progress(
        TextColumn("{task.description:>12}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TextColumn("{task.fields[detail]}"),
        TimeElapsedColumn(),
        console=console,
        auto_refresh=False,
    )


def show_comparison(console: Console, summary: dict[str, Any]) -> None:
    """Print the two runs side by side and the verdict."""
    table = Table("", "with the kill", "undisturbed", title="comparison", title_justify="left")
    mine, others = summary["losses"], summary["reference_losses"]
    hashes, times = summary["state_sha256"], summary["median_step_s"]
    table.add_row("steps", str(len(mine)), str(len(others)))
    table.add_row("last loss", _exact(mine), _exact(others))
    table.add_row("largest loss difference", _number(summary["max_abs_loss_diff"]), "")
    table.add_row("state, sha256", _short(hashes.get("run")), _short(hashes.get("reference")))
    lost = f"{summary['samples_lost']} lost, {summary['samples_repeated']} repeated"
    table.add_row("samples", lost, "")
    same = "unchanged" if summary["survivor_pids_unchanged"] else "CHANGED"
    table.add_row("survivors' process ids", same, "")
    before_ms, after_ms = _ms(times["before"]), _ms(times["after"])
    table.add_row("median step, ms", f"{before_ms} before, {after_ms} after", "")
    rates = [span["tokens_per_s"] for span in summary["throughput"]]
    spans = " -> ".join("-" if rate is None else f"{rate:.0f}" for rate in rates)
    table.add_row("tokens/s, view by view", spans, "")
    if "plan" in summary:
        plan = summary["plan"]
        name = f"simulated step after, ms ({plan['processors']} processors)"
        error = plan["prediction_error"]
        off = "" if error is None else f", {error:+.0%} of the measured one"
        table.add_row(name, f"{_ms(plan['predicted_step_s'])}{off}", "")
    for recovery in summary["recoveries"]:
        name = f"fault to next completed step, ms (view {recovery['epoch']})"
        table.add_row(name, _ms(recovery["mttr_s"]), "")
    for join in summary["joins"]:
        name = f"worker {join['slot']} lost to a step of all again, ms"
        stall = f"{_ms(join['time_to_full_s'])}; the others stood still for {_ms(join['stall_s'])}"
        table.add_row(name, stall, "")
    for sentence in summary["differing_reports"]:
        table.add_row(sentence, "", "")
    console.print(table)
    ratio = summary["snapshot_overhead_ratio"]
    cost = summary["snapshot_overhead_reason"] if ratio is None else f"{ratio:.3f}"
    console.print(f"step time with snapshots / without, in turn: {cost}", highlight=False)
    twin = summary.get("twin")
    equal = summary["parameters_equal"] if twin is None else twin["parameters_equal"]
    verdict = "[bold green]yes[/]" if equal else "[bold red]no[/]"
    other = "the run without failure" if twin is None else "the planned departure"
    console.print(f"parameters equal to {other}: {verdict}")


def _failed(event: dict[str, Any]) -> bool:
    return str(event.get("status")) not in ("0", "exit code 0")


def _exact(losses: list[float]) -> str:
    return repr(losses[-1]) if losses else "-"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _ms(value_s: float | None) -> str:
    return "-" if value_s is None else f"{value_s * 1e3:.0f}"


def _short(text: str | None) -> str:
    return "-" if text is None else text[:16]
