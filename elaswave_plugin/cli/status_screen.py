"""Draws the status of a job as tables for a terminal."""

import time
from dataclasses import replace
from datetime import datetime
from typing import Any

from rich import box
from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from elaswave_plugin.cli.status import Contacts, addresses_of, ask_job
from elaswave_plugin.core.layout.layout import ParallelLayout
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.observer.layout_change import layout_lines

Record = dict[str, Any]
REFRESH_S = 1.0
MOST_ADDRESSES = 3
COLUMNS: tuple[tuple[str, JustifyMethod], ...] = (
    ("slot", "right"),
    ("node", "right"),
    ("pid", "right"),
    ("phase", "left"),
    ("step", "right"),
    ("waits for", "left"),
    ("sealed step", "left"),
    ("held by", "left"),
    ("MiB", "right"),
)
_FOLDED = ("phase", "held by")
NODE_COLUMNS = ("node", "host", "agent", "lives", "slots", "")


def watch(contacts: Contacts, timeout_s: float, console: Console) -> None:
    """Draw the status every REFRESH_S, until no agent answers any more.

    Raises ConfigurationError where none does from the start.
    """
    status = ask_job(contacts, timeout_s)
    with Live(draw_status(status), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(REFRESH_S)
            try:
                status = ask_job(
                    replace(contacts, addresses=tuple(addresses_of(status))), timeout_s
                )
            except ConfigurationError as over:
                live.console.print(str(over), markup=False)
                return
            live.update(draw_status(status), refresh=True)


def draw_status(status: Record) -> RenderableType:
    """Draw everything that `elaswave_plugin.cli.status.merge` found, on one screen."""
    parts: list[RenderableType] = [_headline(status)]
    if status["layout"] is not None:
        layout = ParallelLayout.from_json(status["layout"])
        parts += [Text(f"layout: {line}") for line in layout_lines(layout)]
    workers, nodes = draw_workers(status["workers"]), draw_nodes(status["nodes"])
    return Group(*parts, workers, nodes, _views(status["views"]))


def _headline(status: Record) -> Text:
    view = status["view"]
    if view["epoch"]:
        text = Text(f"{_count(view['ranks'])} (view {view['epoch']})", style="bold")
        text.append(f": {view['reason']}", style="not bold")
    else:
        text = Text(f"starting, {_count(view['ranks'])}", style="bold")
    text.append(f"\nslots by rank: {' '.join(map(str, view['ranks']))}", style="not bold")
    text.append(f"\nat {_addresses(status['workers'])} (--connect, --join)", style="not bold")
    if status["standbys"]:
        where = ", ".join(f"{one['places']} of node {one['node']}" for one in status["standbys"])
        text.append(f"; standby: {where}", style="not bold")
    if status["vacant"]:
        text.append(f"; {len(status['vacant'])} more may join", style="not bold")
    for one in status["unheard"]:
        silent_s = status["asked_s"] - one["since_s"]
        pair = f"\nnode {one['node']} hears nothing of node {one['peer']}"
        text.append(f"{pair} for {silent_s:.0f} s", style="yellow")
    proposal = status["proposal"]
    if proposal is not None:
        change = f"\nview {proposal['epoch']} proposed {proposal['open_s']:.1f} s ago"
        text.append(f"{change}: {proposal['reason']}", style="yellow")
    return text


def _addresses(workers: list[Record]) -> str:
    """Say where the job answers: at the agent of each node that is not known to be gone."""
    of_nodes: dict[int, str] = {}
    for worker in workers:
        if worker["phase"] not in ("gone", "unknown"):
            of_nodes.setdefault(worker["node"], worker["address"])
    found = list(of_nodes.values()) or [worker["address"] for worker in workers[:1]]
    more = f" and {len(found) - MOST_ADDRESSES} more" if len(found) > MOST_ADDRESSES else ""
    return ", ".join(found[:MOST_ADDRESSES]) + more


def draw_workers(workers: list[Record]) -> Group:
    """A row each, and below the table what speaks against some of them."""
    table = _table("workers")
    for name, justify in COLUMNS:
        folds = name in _FOLDED
        table.add_column(
            name, justify=justify, no_wrap=not folds, overflow="fold", min_width=8 * folds
        )
    for worker in workers:
        snapshot = worker["snapshot"]
        table.add_row(
            _name(worker),
            str(worker["node"]),
            str(worker["trainer_pid"] or "-"),
            escape(worker["phase"]),
            "-" if worker["step"] is None else str(worker["step"]),
            _wait(worker),
            *(("-", "-", "-") if snapshot is None else _snapshot(snapshot)),
            style="dim" if worker["rank"] is None else "red" if worker["suspicion"] else None,
        )
    evidence = [
        Text(f"worker {_name(worker)}: {worker['suspicion']}")
        for worker in workers
        if worker["suspicion"]
    ]
    return Group(table, *evidence)


def _table(title: str) -> Table:
    """An empty one, narrow enough for 80 columns."""
    return Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )


def draw_nodes(nodes: list[Record]) -> Table:
    """A row for each node's agent: its process, how many there have been, the slots it has."""
    table = _table("nodes (agent: its process; lives: the agents so far)")
    for name in NODE_COLUMNS:
        table.add_column(name, justify="left" if name in ("host", "slots", "") else "right")
    for node in nodes:
        is_heard = node["silent"] is None
        table.add_row(
            str(node["node"]),
            # Of one that is silent, where it was.
            escape(node["host"] or node["address"].rpartition(":")[0]),
            str(node["pid"] or "-"),
            str(node["life"] + 1) if is_heard else "-",
            numbers_in_short(node["slots"]),
            "leads" if node["leads"] and is_heard else escape(node["silent"] or ""),
            style=None if is_heard else "red",
        )
    return table


def numbers_in_short(numbers: list[int]) -> str:
    """Ranges, as "0-7, 9".

    >>> numbers_in_short([0, 1, 2, 9])
    '0-2, 9'
    """
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1] = [ranges[-1][0], number]
        else:
            ranges.append([number])
    return ", ".join("-".join(map(str, one)) for one in ranges)


def _count(ranks: list[int]) -> str:
    return f"{len(ranks)} worker{'' if len(ranks) == 1 else 's'}"


def _name(worker: Record) -> str:
    """The slot, with the incarnation where the first one was replaced."""
    incarnation = worker["incarnation"]
    return f"{worker['slot']}.{incarnation}" if incarnation else str(worker["slot"])


def _wait(worker: Record) -> str:
    """Say what a worker waits for, and for how long already; nothing where it does not wait."""
    if worker["waits_for"] is None:
        return ""
    since_s = worker["stalled_s"]
    return f"{worker['waits_for']}" + ("" if since_s is None else f", {since_s:.1f} s")


def _snapshot(snapshot: Record) -> tuple[str, str, str]:
    """Return the newest one, its holders (with the step of an older one), and its size."""
    newest = snapshot["epoch"], snapshot["step"]
    holders = [
        str(one["slot"]) + (f" ({one['step']})" if (one["epoch"], one["step"]) < newest else "")
        for one in snapshot["held_by"]
    ]
    place = f"{snapshot['step']} (view {snapshot['epoch']})"
    return place, ", ".join(holders) or "nobody", f"{snapshot['bytes'] / 2**20:.2f}"


def _views(views: list[Record]) -> Table:
    table = Table(title="views", title_justify="left")
    table.add_column("time")
    table.add_column("view", justify="right")
    table.add_column("workers", justify="right")
    table.add_column("reason", overflow="fold")
    for view in views:
        at = datetime.fromtimestamp(view["time_s"]).isoformat(sep=" ", timespec="milliseconds")
        table.add_row(at, str(view["epoch"]), str(view["workers"]), escape(view["reason"]))
    return table
