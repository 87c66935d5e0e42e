"""The demo's story: write the text, run with the kills, run without, compare."""

import json
import shutil
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console

from elaswave_plugin.demo import jobs
from elaswave_plugin.demo.options import GLOBAL_BATCH, DemoOptions, sole_use
from elaswave_plugin.demo.screen import STEP_LINES, RunScreen, progress_on, show_comparison
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.observer.blocks import step_times_s
from elaswave_plugin.observer.observer import losses_of, summarize
from elaswave_plugin.observer.report import draw_report
from elaswave_plugin.observer.run import RunFiles, read_run
from elaswave_plugin.tracking.events import EVENTS_FILE, LEDGER_FILE
from elaswave_plugin.tracking.state_dump import hash_state

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
