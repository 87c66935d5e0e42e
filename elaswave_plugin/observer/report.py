"""Draws report.png: losses of two runs over each other, tokens/s, the phases of each recovery."""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from elaswave_plugin.config import RECOVERY_PHASES
from elaswave_plugin.core.layout.layout import ParallelLayout
from elaswave_plugin.observer.layout_change import layout_lines
from elaswave_plugin.observer.observer import (
    CAME,
    LEFT,
    LOST,
    changes_of,
    kills_of,
    layout_change_of,
    losses_of,
    median_step_s,
    recoveries_of,
    tokens_per_s,
)
from elaswave_plugin.observer.run import Record, RunFiles

RUN, REFERENCE, INK = "#1f5fa8", "#f2a33a", "#333333"
COLOURS = ((LOST, "#c0392b"), (LEFT, "#8e6c1f"), (CAME, "#1e8449"))
TEXT_ROWS = 6
PHASE_COLOURS = ("#8c2d04", "#d94801", "#f5a623", "#2b7a78", "#5ab4ac", "#7b6fb0", "#1f5fa8")
SMALL_MS = 1.0


def draw_report(run: RunFiles, reference: RunFiles | None, path: Path) -> Path:
    """Write the picture of a run and, if there is one, its reference; returns the path."""
    recoveries = recoveries_of(run)
    bars = max(1, len(recoveries))
    figure = Figure(figsize=(10, 7.2 + 0.9 * bars), dpi=110, layout="constrained")
    heights = (3.2, 2.2, 1.0 + 0.9 * bars)
    losses, rates, phases = figure.subplots(3, 1, height_ratios=heights)
    rates.sharex(losses)
    _draw_losses(losses, run, reference)
    _draw_rates(rates, run, reference)
    _draw_phases(phases, recoveries)
    for axes in (losses, rates):
        _mark_changes(axes, run, with_text=axes is losses)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("step")
    title = "\n".join([_title(recoveries), *layout_text(run)])
    figure.suptitle(title, fontsize=12, color=INK)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def _title(recoveries: list[Record]) -> str:
    if not recoveries:
        return "no worker lost"
    worst_ms = max(recovery["mttr_s"] for recovery in recoveries) * 1e3
    count = "one recovery" if len(recoveries) == 1 else f"{len(recoveries)} recoveries"
    return f"{count}, longest fault to next completed step {worst_ms:.0f} ms"


def layout_text(run: RunFiles) -> list[str]:
    """The change of layout of a hybrid run and its step time in two lines; none without one."""
    change = layout_change_of(run)
    if not change:
        return []
    layouts = [ParallelLayout.from_json(change[name]) for name in ("layout_before", "layout_after")]
    before, after = (" ".join(map(str, layout.widths)) for layout in layouts)
    free = len(layouts[1].free)
    title = layout_lines(layouts[0])[0]
    seconds = {
        "before": median_step_s(run)["before"],
        "after": change["measured_step_s"],
        "simulated after": change["plan"]["predicted_step_s"],
    }
    steps = ", ".join(f"{s * 1e3:.0f} {name}" for name, s in seconds.items() if s is not None)
    return [
        f"{title}: stage widths {before} -> {after}, {free} free",
        f"step, ms: {steps}",
    ]


def _plain(axes: Axes, label: str) -> None:
    axes.set_ylabel(label, color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)


def _draw_losses(axes: Axes, run: RunFiles, reference: RunFiles | None) -> None:
    mine = losses_of(run)
    if reference is not None:
        others = losses_of(reference)
        axes.plot(
            list(others),
            list(others.values()),
            color=REFERENCE,
            linewidth=6,
            alpha=0.75,
            solid_capstyle="round",
            label="no worker lost",
        )
        common = [abs(mine[step] - others[step]) for step in mine if step in others]
        if common:
            text = f"largest difference: {max(common):.3g}"
            axes.text(0.02, 0.06, text, transform=axes.transAxes, color=INK, fontsize=9)
    axes.plot(
        list(mine), list(mine.values()), color=RUN, linewidth=1.6, marker="o", ms=3, label="run"
    )
    _plain(axes, "loss")
    axes.legend(frameon=False, loc="upper right")


def _draw_rates(axes: Axes, run: RunFiles, reference: RunFiles | None) -> None:
    shown: tuple[tuple[RunFiles | None, str, dict[str, Any]], ...] = (
        (reference, REFERENCE, {"linewidth": 3, "alpha": 0.75}),
        (run, RUN, {"linewidth": 1.6, "marker": "o", "ms": 3}),
    )
    for files, colour, style in shown:
        rates = tokens_per_s(files) if files is not None else {}
        # The first step of a job pays for its set-up and would flatten the rest.
        steps = [step for step in rates if step > min(rates)]
        axes.step(steps, [rates[step] for step in steps], where="mid", color=colour, **style)
    axes.set_ylim(0, axes.get_ylim()[1] * 1.15)
    _plain(axes, "tokens/s")


def _marks(run: RunFiles) -> list[tuple[int, str, str]]:
    """Return (step, text, colour) of every loss, departure and arrival, for any cause."""
    kills = {(kill["slot"], kill["step"]): kill["phase"] for kill in kills_of(run)}
    last = max((record["step"] for record in run.steps), default=0)
    colours = dict(COLOURS)
    marks = []
    for one in changes_of(run):
        what, slot, step = one["what"], one["slot"], last if one["step"] is None else one["step"]
        phase = None
        if what == LOST:
            # What struck behind the update of a step is met in the next one.
            phase = kills.pop((slot, step), None) or kills.pop((slot, step - 1), None)
        marks.append(
            (step, f"worker {slot} {what}" + (f", {phase}" if phase else ""), colours[what])
        )
    for (slot, step), phase in kills.items():  # that no view followed
        marks.append((step, f"worker {slot} {LOST}, {phase}", colours[LOST]))
    return sorted(marks)


def _mark_changes(axes: Axes, run: RunFiles, with_text: bool) -> None:
    lines: set[int] = set()
    for row, (step, text, colour) in enumerate(_marks(run)):
        if step not in lines:
            axes.axvline(step, color=colour, linewidth=1.2, linestyle=(0, (4, 3)))
        lines.add(step)
        if with_text:
            axes.annotate(
                text,
                (step, 1.0),
                xycoords=("data", "axes fraction"),
                # A row each, for some time: steps may lie close together.
                xytext=(4, -2 - 11 * (row % TEXT_ROWS)),
                textcoords="offset points",
                va="top",
                color=colour,
                fontsize=9,
            )


def _draw_phases(axes: Axes, recoveries: list[Record]) -> None:
    axes.set_title("phases of each recovery, ms (slowest survivor)", fontsize=10, loc="left")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    if not recoveries:
        axes.set_xticks([])
        axes.set_yticks([])
        axes.text(0.5, 0.5, "none", transform=axes.transAxes, ha="center", color=INK)
        return
    longest_ms = max(sum(r["phases_s"].values()) for r in recoveries) * 1e3
    for row, recovery in enumerate(recoveries):
        left_ms = 0.0
        for name, colour in zip(RECOVERY_PHASES, PHASE_COLOURS, strict=True):
            width_ms = recovery["phases_s"][name] * 1e3
            label = name if row == 0 else None
            axes.barh(row, width_ms, 0.55, left_ms, color=colour, label=label)
            if width_ms > 0.04 * longest_ms and width_ms >= SMALL_MS:
                middle_ms = left_ms + width_ms / 2
                text = f"{width_ms:.0f}"
                axes.text(middle_ms, row, text, ha="center", va="center", color="w", fontsize=9)
            left_ms += width_ms
    axes.set_yticks(
        range(len(recoveries)),
        [f"view {r['epoch']}\n{r['mttr_s'] * 1e3:.0f} ms to step" for r in recoveries],
    )
    axes.set_ylim(len(recoveries) - 0.5, -0.5)
    for row, recovery in enumerate(recoveries):
        axes.text(0, row + 0.42, recovery["reason"], fontsize=8, color=INK, va="center")
    axes.set_xlabel("ms")
    axes.legend(
        frameon=False,
        ncols=len(RECOVERY_PHASES),
        loc="upper left",
        fontsize=8,
        bbox_to_anchor=(0, -0.32),
    )
