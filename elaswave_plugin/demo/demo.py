"""The demo's story: write the text, run with the kills, run without, compare."""

import json
import math
import shutil
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from elaswave_plugin.config import RECOVERY_PHASES
from elaswave_plugin.core.layout.layout import ParallelLayout
from elaswave_plugin.demo import jobs
from elaswave_plugin.demo.options import GLOBAL_BATCH, DemoOptions, sole_use
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.observer.blocks import step_times_s
from elaswave_plugin.observer.layout_change import layout_lines
from elaswave_plugin.observer.observer import losses_of, summarize
from elaswave_plugin.observer.report import draw_report
from elaswave_plugin.observer.run import RunFiles, read_run
from elaswave_plugin.recovery.record import recovered_text
from elaswave_plugin.tracking.events import EVENTS_FILE, LEDGER_FILE, STEPS_FILE, Tail
from elaswave_plugin.tracking.state_dump import hash_state

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


SUMMARY_FILE, REPORT_FILE = "summary.json", "report.png"
# Largest relative difference of an fp32 loss whose terms were added in another order.
FAST_BOUND = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoRun:
    """One of the demo's runs; `steps` None: as many as the user wants."""

    name: str
    title: str
    steps: int | None = None
    kill: bool = False
    change: bool = False
    alternate: str = ""

    def __str__(self) -> str:
        return self.title


def demo_runs(framework: str) -> tuple[DemoRun, ...]:
    """The runs in order; the last one measures what snapshots cost.

    DeepSpeed's loop is in fast mode: bit equality is promised with the run in which the same
    workers leave as planned, and closeness with the undisturbed one.
    """
    twin = DemoRun(name="twin", title="planned departure", change=True)
    return (
        DemoRun(name="run", title="with kill", kill=True),
        DemoRun(name="reference", title="undisturbed"),
        *([twin] if framework == "deepspeed" else []),
        DemoRun(name="overhead", title="snapshots on, off", steps=60, alternate="snapshots"),
    )


def run_demo(options: DemoOptions, text: Path | None, console: Console) -> int:
    """Run the demo; 0 if nothing was lost and both runs are equal, else 1.

    Raises ConfigurationError if a framework is missing or another demo is running in the folder,
    and JobFailed if a run fails.
    """
    check_frameworks(options.framework)
    with sole_use(options.out):
        return _run_demo(options, text, console)


def _run_demo(options: DemoOptions, text: Path | None, console: Console) -> int:
    out = options.out.absolute()
    for name in (*(run.name for run in demo_runs("deepspeed")), "data", "wandb", "logs"):
        shutil.rmtree(out / name, ignore_errors=True)
    logs = out / "logs"
    logs.mkdir()
    _run_all(options, text, out, logs, console)
    summary = write_results(options, out)
    show_comparison(console, summary)
    console.print(f"written to {options.out}: {SUMMARY_FILE}, {REPORT_FILE}, {EVENTS_FILE}, ...")
    joins = len(options.kills) if options.respawn else 0
    return 0 if succeeded(summary, options.steps, joins=joins) else 1


def check_frameworks(framework: str = "megatron") -> None:
    """Refuse to start without what the training script needs; raises ConfigurationError."""
    for module, extra in (("torch", ""), (framework, f"[{framework}]")):
        if find_spec(module) is None:
            raise ConfigurationError(
                f"the demo trains with {module}, which is not installed; `pip install -e .{extra}`"
            )


def write_results(options: DemoOptions, out: Path) -> dict[str, Any]:
    """Judge the runs by their files; writes summary.json, report.png and the logs into OUT."""
    run, reference = read_run(out / "run"), read_run(out / "reference")
    for name in (EVENTS_FILE, LEDGER_FILE):
        shutil.copyfile(out / "run" / name, out / name)
    if (out / "run" / "wandb").is_dir():
        shutil.move(out / "run" / "wandb", out / "wandb")
    summary = summarize(
        run,
        reference,
        steps=options.steps,
        global_batch=GLOBAL_BATCH,
        kills=options.kills,
        snapshot_overhead_ratio=step_times_s(read_run(out / "overhead")).ratio_of_medians,
        snapshot_overhead_reason="the run that measures it has no steps with or without snapshots",
    )
    if options.framework == "deepspeed":
        summary["twin"] = _compared_with_twin(run, read_run(out / "twin"))
    text = json.dumps(summary, indent=2) + "\n"
    (out / SUMMARY_FILE).write_text(text)
    if options.json_file is not None:
        options.json_file.write_text(text)
    draw_report(run, reference, out / REPORT_FILE)
    return summary


def _compared_with_twin(run: RunFiles, twin: RunFiles) -> dict[str, Any]:
    """Losses and state against the run in which the same workers left as planned."""
    mine, others = losses_of(run), losses_of(twin)
    return {
        "losses_equal": mine == others,
        "parameters_equal": hash_state(run.directory).sha256 == hash_state(twin.directory).sha256,
    }


def _equal_enough(summary: dict[str, Any]) -> bool:
    """Bit for bit, with the undisturbed run or, in fast mode, with the twin and close to it."""
    twin = summary.get("twin")
    if twin is None:
        return summary["parameters_equal"] is True and summary["max_abs_loss_diff"] == 0
    pairs = zip(summary["losses"], summary["reference_losses"], strict=True)
    return (
        twin["losses_equal"]
        and twin["parameters_equal"]
        and all(abs(mine - other) <= FAST_BOUND * abs(other) for mine, other in pairs)
    )


def succeeded(summary: dict[str, Any], steps: int, *, joins: int = 0) -> bool:
    """Tell whether the kills fired, nothing was lost by them, and ``joins`` workers came back."""
    return (
        summary["steps"] == steps
        and all(kill["fired"] for kill in summary["kills"])
        and _equal_enough(summary)
        and summary["survivor_pids_unchanged"]
        and summary["samples_lost"] == summary["samples_repeated"] == 0
        and len(summary["joins"]) == joins
    )


def _run_all(
    options: DemoOptions, text: Path | None, out: Path, logs: Path, console: Console
) -> None:
    data = out / "data" / "text"
    kills = ", ".join(map(str, options.kills))
    console.print(f"text: {options.source}", highlight=False)
    workers = f"{options.nproc} workers"
    if options.is_hybrid:
        workers += f" ({str(options.layout).splitlines()[0]})"
    console.print(f"{workers}, {options.steps} steps, kill {kills}", highlight=False)
    with (
        jobs.prepared(options, text, data=data, logs=logs) as socket_path,
        progress_on(console) as progress,
    ):
        for run in demo_runs(options.framework):
            steps = run.steps or options.steps
            command = jobs.job_command(
                replace(options, steps=steps),
                socket_path=socket_path,
                data=data,
                directory=out / run.name,
                wandb="offline" if run.kill and find_spec("wandb") is not None else "off",
                kill=run.kill,
                change=run.change,
                alternate=run.alternate,
            )
            console.print(f"[bold]{run}[/]")
            screen = RunScreen(
                console,
                progress,
                name=run.title,
                directory=out / run.name,
                steps=steps,
                step_lines=0 if run.alternate else STEP_LINES,
            )
            log = logs / f"{run.name}.log"
            jobs.run_job(command, f"the run in {out / run.name}", log, look=screen.look)
