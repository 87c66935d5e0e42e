"""Throughput after losses as lines on the screen and as a picture."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

Row = dict[str, Any]
RULES = (("ours", "#1f5fa8"), ("rerouted", "#f2a33a"), ("dropped", "#9aa5b1"))
INK = "#333333"


def show_row(row: Row, echo: Callable[[str], None]) -> None:
    """Print one row: ratios beside their ceilings; of a measured one its predictions as well."""
    kind = "simulated" if row["simulated"] else "measured"
    where = "" if row["stage"] is None else f" of stage {row['stage']}"
    same = row.get("over_rerouting_in_our_orders")
    beside = "" if same is None else f"{_times(same)} in our orders, "
    echo(
        f"{kind:9} {row['scenario']}{where}: rerouting {_times(row['over_rerouting'])}"
        f" ({beside}Gmax {_number(row['gmax'])}, rho {_number(row['rho'])}), dropping"
        f" {_times(row['over_dropping'])}, {row['of_live_share']:.3f} of the live share"
    )
    if row["simulated"]:
        return
    for name, measured_s in row["step_s"].items():
        predicted_s, error = row["predicted_s"][name], row["prediction_error"][name]
        off = "nothing predicted" if error is None else f"{predicted_s:.3f} s, {error:+.1%}"
        echo(f"{'':9}   {name}: step {measured_s:.3f} s, predicted {off}")
    split = row["over_rerouting_both_split"], "measured"
    if split[0] is None:
        split = row["simulated_over_rerouting_both_split"], "simulated with these costs"
    echo(f"{'':9}   split backward on both sides, {split[1]}: rerouting {_times(split[0])}")


def show_bars(result: Row, echo: Callable[[str], None]) -> None:
    """Print what was wanted, and what the rows reach."""
    for kind in ("measured", "simulated"):
        for bar in result[kind]["bars"]:
            echo(
                f"{'holds' if bar['holds'] else 'MISSED':6} {kind:9} {bar['scenario']:20}"
                f" {bar['ratio']:24} wanted {bar['wanted']:.2f}  worst {bar['worst']:.3f} median"
                f" {bar['median']:.3f} best {bar['best']:.3f}"
            )


def draw(result: Row, picture: Path) -> None:
    """Draw each scenario's throughput by rule; simulated ones by the stage that is worst for us."""
    kinds = [kind for kind in ("measured", "simulated") if result[kind]["rows"]]
    figure = Figure(figsize=(10, 3.6 * len(kinds)), dpi=80, layout="constrained")
    every = figure.subplots(len(kinds), 1, squeeze=False)[:, 0]
    for axes, kind in zip(every, kinds, strict=True):
        _draw_rows(axes, _worst(result[kind]["rows"]), hatch="//" if kind == "simulated" else "")
        how = f"layers of {result['layer_ms']:g} ms asleep" if kind == "measured" else "no job ran"
        axes.set_title(f"{kind} ({how}), coupled backward", fontsize=9, loc="left", color=INK)
    every[0].legend(frameon=False, fontsize=8, ncols=5, loc="lower left", bbox_to_anchor=(0, 1.1))
    figure.suptitle(f"{result['hardware']}, {result['date']}", fontsize=9, color=INK)
    figure.savefig(picture)


def _worst(rows: list[Row]) -> list[Row]:
    """Return each scenario's stage where rerouting is closest, or the share is smallest."""
    found: dict[str, Row] = {}
    for row in rows:
        seen = found.get(row["scenario"])
        if seen is None or _rating(row) < _rating(seen):
            found[row["scenario"]] = row
    return list(found.values())


def _rating(row: Row) -> float:
    return float(row["over_rerouting"] or row["of_live_share"])


def _draw_rows(axes: Axes, rows: list[Row], *, hatch: str) -> None:
    width = 0.8 / len(RULES)
    for number, (rule, colour) in enumerate(RULES):
        at = [place + (number - 1) * width for place in range(len(rows))]
        shares = [_share(row, rule) for row in rows]
        axes.bar(at, shares, width, color=colour, hatch=hatch, edgecolor="white", label=rule)
    for place, row in enumerate(rows):
        first, rerouted = place == 0, _share(row, "rerouted")
        axes.hlines(
            row["live_share"],
            place - 0.45,
            place + 0.45,
            color=INK,
            linestyle="dotted",
            label="live share" if first else "",
        )
        if row["gmax"] is not None:
            most = rerouted * row["gmax"]
            label = "rerouted x Gmax" if first else ""
            axes.hlines(most, place - 0.45, place - 0.1, color="#c0392b", label=label)
    axes.set_xticks(range(len(rows)), [row["scenario"] for row in rows], fontsize=7, rotation=30)
    axes.set_ylabel("of the healthy throughput", fontsize=8, color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)


def _share(row: Row, rule: str) -> float:
    """Return the share of the healthy throughput; 0 where the rule cannot go on."""
    seconds = row["step_s"].get(rule)
    return 0.0 if seconds is None else row["step_s"]["healthy"] / seconds


def _times(value: float | None) -> str:
    return "cannot go on" if value is None else f"{value:.3f}x"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
