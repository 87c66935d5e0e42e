"""Draws the summary of a run as tables for a terminal, what is wrong with it first."""

from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

Record = dict[str, Any]
_WRONG = "bold red"


def draw_summary(summary: Record) -> RenderableType:
    """Draw what `elaswave_plugin.observer.observer.summarize` found."""
    return Group(*_verdicts(summary), _steps(summary), *_changes(summary), *_recoveries(summary))


def _verdicts(summary: Record) -> list[Text]:
    """Say what has to be right: samples first, what workers tell differently, how it ended."""
    lost, repeated = summary["samples_lost"], summary["samples_repeated"]
    wrong = _WRONG if lost or repeated else "bold green"
    found = [Text(f"samples: {lost} lost, {repeated} repeated", style=wrong)]
    found += [Text(sentence, style=_WRONG) for sentence in summary["differing_reports"]]
    if summary["disagreeing_steps"]:
        steps = ", ".join(map(str, summary["disagreeing_steps"]))
        text = f"workers report different losses or gradient norms of step {steps}"
        found.append(Text(text, style=_WRONG))
    if not summary["survivor_pids_unchanged"]:
        found.append(Text("no worker ran from start to end in one process", style="yellow"))
    ended = summary["ended"]
    if ended is None:
        found.append(Text("the job has not ended, or no agent saw its end", style="yellow"))
    elif ended["exit_code"]:
        text = f"the job ended with exit code {ended['exit_code']}: {ended['reason']}"
        found.append(Text(text, style=_WRONG))
    return found


def _steps(summary: Record) -> Table:
    table = Table("", "run", "reference", title="steps", title_justify="left")
    mine, others = summary["losses"], summary["reference_losses"]
    times, hashes = summary["median_step_s"], summary["state_sha256"]
    table.add_row("steps", str(len(mine)), str(len(others)) if others else "-")
    table.add_row("last loss", *(repr(one[-1]) if one else "-" for one in (mine, others)))
    difference = summary["max_abs_loss_diff"]
    if difference is not None:
        table.add_row("largest loss difference", f"{difference:.3g}", "")
    if hashes:
        run, reference = (str(hashes[name] or "-")[:16] for name in ("run", "reference"))
        table.add_row(f"state after step {hashes['step']}, sha256", run, reference)
    if summary["parameters_equal"] is not None:
        table.add_row("parameters equal", "yes" if summary["parameters_equal"] else "no", "")
    for name in ("before", "after"):
        if times[name] is not None:
            change = "first" if name == "before" else "last"
            table.add_row(f"median step {name} the {change} change, ms", _ms(times[name]), "")
    for name, what in (("first_step_rehearsal", "first step"), ("layer_repetition", "one layer")):
        rehearsal = summary[name]
        if rehearsal is not None:
            found = "equal" if rehearsal["equal"] else "differs"
            table.add_row(f"{what} run once more ({found}), ms", _ms(rehearsal["seconds"]), "")
    return table


def _changes(summary: Record) -> list[RenderableType]:
    if not summary["changes"]:
        return [Text("no worker was lost, left or came")]
    table = Table("step", "worker", "", "then", title="losses, departures, arrivals")
    table.title_justify = "left"
    table.add_column("reason", overflow="fold")
    for one in summary["changes"]:
        step = "-" if one["step"] is None else str(one["step"])
        then = f"{one['workers']} worker{'' if one['workers'] == 1 else 's'} (view {one['view']})"
        table.add_row(step, str(one["slot"]), one["what"], then, escape(one["reason"]))
    return [table]


def _recoveries(summary: Record) -> list[RenderableType]:
    if not summary["recoveries"] and not summary["joins"]:
        return []
    table = Table("view", "", "ms", "phases, ms", title="what they took", title_justify="left")
    for one in summary["recoveries"]:
        times = (f"{name} {_ms(seconds)}" for name, seconds in one["phases_s"].items())
        took = "fault to the next completed step"
        table.add_row(str(one["epoch"]), took, _ms(one["mttr_s"]), "  ".join(times))
        if one["cost_s"] is not None:
            cost, whole = (one[name] / one["step_before_s"] for name in ("cost_s", "whole_cost_s"))
            steps = f"{cost:.2f} of a step; with all of that step again about {whole:.2f}"
            table.add_row("", "beyond a step as before", _ms(one["cost_s"]), steps)
    for one in summary["joins"]:
        took = f"worker {one['slot']} came: the others stood still"
        table.add_row(str(one["epoch"]), took, _ms(one["stall_s"]), "")
    return [table]


def _ms(value_s: float | None) -> str:
    return "-" if value_s is None else f"{value_s * 1e3:.0f}"
