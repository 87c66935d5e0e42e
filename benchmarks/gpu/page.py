"""The page of a run: Markdown that a person can paste into an issue."""

from collections.abc import Sequence
from typing import Any

from benchmarks.gpu.item import Outcome, Status

MAX_LINES = 40


def page(circumstances: dict[str, Any], outcomes: Sequence[Outcome]) -> str:
    """Return the whole page: a table of the items, then what each has found."""
    counts = {status: sum(one.status is status for one in outcomes) for status in Status}
    lines = [
        "# elaswave_plugin on this machine",
        "",
        f"`{circumstances['command']}`, {circumstances['date']}, commit"
        f" {circumstances['commit'] or 'unknown (no checkout of git)'}",
        "",
        ", ".join(f"{count} {status}" for status, count in counts.items() if count) or "no item",
        "",
    ]
    if any(one.device == "stand-in" for one in outcomes):
        lines += ["**The CPU has stood in for a GPU: nothing here is a result of a GPU.**", ""]
    lines += ["| item | result | s | of | on |", "|---|---|---|---|---|"]
    lines += [
        f"| {one.title} | {one.status} | {one.seconds:.1f} | {one.budget_s:g} | {one.device} |"
        for one in outcomes
    ]
    for one in outcomes:
        lines += ["", *_section(one)]
    return "\n".join(lines) + "\n"


def _section(one: Outcome) -> list[str]:
    title = f"## {one.title}: {one.status}"
    found = [f"- {line}" for line in one.lines[:MAX_LINES]]
    if len(one.lines) > MAX_LINES:
        found.append(f"- ({len(one.lines) - MAX_LINES} lines more in the JSON)")
    reason = [one.reason, ""] if one.reason else []
    tail = ["", "```", *one.log_tail, "```"] if one.log_tail else []
    return [title, "", *reason, *found, *tail]
