"""The table of docs/operations.md: what becomes of a job that is told to end, by the cases."""

from tests.faults.told import CASES, Case


def told_table() -> str:
    """Return a row for each launcher, loop and outcome, with the signals and phases of cases."""
    lines = ["| launcher, script | told by | while worker 0 is | becomes |", "|---|---|---|---|"]
    rows: dict[tuple[str, str], dict[str, list[str]]] = {}
    for case in CASES:
        phases = rows.setdefault((_job(case), case.becomes), {}).setdefault(case.told, [])
        if case.phase not in phases:
            phases.append(case.phase)
    for (job, becomes), told in rows.items():
        by_phases: dict[tuple[str, ...], list[str]] = {}
        for way, phases in told.items():
            by_phases.setdefault(tuple(phases), []).append(way)
        for found, ways in by_phases.items():
            lines.append(f"| {job} | {', '.join(ways)} | {', '.join(found)} | {becomes} |")
    return "\n".join(lines)


def _job(case: Case) -> str:
    return f"`{case.launcher}`, {case.loop}" + ("" if case.saves else " without a last checkpoint")
