"""The communicator's figures as tables on the screen and as a picture."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table


def show(result: dict[str, Any], console: Console) -> None:
    """Print every figure."""
    table = Table(title="loss of one worker, ms, slowest survivor, median (with verification)")
    names = ("workers", "full rebuild", "partial", "edit", "its processor time", "bare messages")
    for name in (*names, "full/edit", "partial/edit"):
        table.add_column(name, justify="right")
    for row in result["rows"]:
        verified = row["verified_ms"]
        table.add_row(
            f"{row['world']} ({row['layout']})",
            *(
                f"{row[f'{way}_ms']:.1f} ({verified[way]:.1f})"
                for way in ("full", "partial", "edit")
            ),
            f"{row['busy_ms']:.1f}",
            f"{row['floor_ms']:.1f}",
            f"{row['ratio_full']:.1f} ({verified['full'] / verified['edit']:.1f})",
            f"{row['ratio_partial']:.1f} ({verified['partial'] / verified['edit']:.1f})",
        )
    console.print(table)
    table = Table(title="what all groups of a worker hold (most of any worker)")
    for name in ("workers", "engine", "descriptors", "threads", "private MiB"):
        table.add_column(name, justify="right")
    for row in result["rows"]:
        for engine, held in row["resources"].items():
            mib = held["private_bytes"] / 2**20
            figures = (str(held["descriptors"]), str(held["threads"]), f"{mib:.1f}")
            table.add_row(str(row["world"]), engine, *figures)
    console.print(table)
    table = Table(title="collectives, ms, slowest worker, median")
    for name in ("workers", "operation", "bytes", "ours", "gloo", "gloo/ours"):
        table.add_column(name, justify="right")
    for row in result["collectives"]:
        ours, gloo = row["ours_ms"], row["gloo_ms"]
        figures = (f"{ours:.2f}", f"{gloo:.2f}", f"{gloo / ours:.2f}")
        table.add_row(str(row["world"]), row["op"], f"{row['bytes']:,}", *figures)
    console.print(table)
    kills = result["kill_to_verified_ms"]
    if kills:
        console.print(
            f"SIGKILL in an all-reduce to every group verified, {len(kills)} runs of 8 workers: "
            f"median {median(kills):.1f} ms, max {max(kills):.1f} ms"
        )


def draw(result: dict[str, Any], picture: Path) -> None:
    """Draw the three ways over the number of workers."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    worlds = [row["world"] for row in result["rows"]]
    for way, label in (
        ("full", "full rebuild (gloo)"),
        ("partial", "partial rebuild (gloo)"),
        ("edit", "edit, agreement included (ours)"),
    ):
        axes.plot(worlds, [row[f"{way}_ms"] for row in result["rows"]], "o-", label=label)
    axes.set(xscale="log", yscale="log", xlabel="workers", ylabel="ms, slowest survivor")
    axes.set_xticks(worlds, [str(world) for world in worlds])
    axes.set_title(f"loss of one worker; {result['hardware']}, {result['date']}", fontsize=9)
    axes.grid(which="both", alpha=0.3)
    axes.legend()
    figure.savefig(picture, dpi=120, bbox_inches="tight")
    pyplot.close(figure)
