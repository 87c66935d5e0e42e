"""The table of docs/operations.md: what becomes of a job that is told to end, by the cases."""

import re
from collections.abc import Collection, Mapping

from tests.faults.told import (
    BEFORE,
    BETWEEN,
    CASES,
    COMPILING,
    EVALUATION,
    FIRST,
    SAVE,
    SLURM_CASES,
    TRAINER,
    Becomes,
    Case,
)

# Whatever runs there.
ALIKE = (Becomes.UNHEARD, Becomes.KILLED)
PHASES = (BEFORE, FIRST, COMPILING, BETWEEN, EVALUATION, SAVE)


def told_table() -> str:
    """Return a row for each outcome: launchers and loops, with the signals and phases of cases."""
    head = "launcher: script: told by (while worker 0 is in; any: once steps begin)"
    lines = [f"| becomes | {head} |", "|---|---|"]
    for becomes in Becomes:
        jobs: dict[str, dict[str, dict[str, dict[str, None]]]] = {}
        for case in CASES + SLURM_CASES:
            if case.becomes is becomes:
                told = jobs.setdefault(case.launcher, {}).setdefault(_script(case), {})
                told.setdefault(_bare(case.told), {})[_bare(case.phase)] = None
        texts = (f"`{launcher}`: {_scripts(loops)}" for launcher, loops in jobs.items())
        lines.append(f"| {becomes} | {'<br>'.join(texts)} |")
    return "\n".join(lines)


def _bare(words: str) -> str:
    """Leave a name's article out."""
    return re.sub("^(the|an?) ", "", words)


def _scripts(loops: Mapping[str, Mapping[str, Collection[str]]]) -> str:
    """Say how each script was told, once for those that were told alike."""
    by_ways: dict[str, list[str]] = {}
    for script, told in loops.items():
        by_ways.setdefault(_ways(told) if script else ", ".join(told), []).append(script)
    return "; ".join(": ".join(filter(None, (", ".join(s), ways))) for ways, s in by_ways.items())


def _ways(told: Mapping[str, Collection[str]]) -> str:
    """Say the phases of each way to tell it, once for those that have the same."""
    by_phases: dict[str, list[str]] = {}
    for way, phases in told.items():
        by_phases.setdefault(_phases(phases), []).append(way)
    return ", ".join(f"{', '.join(ways)} ({one})" for one, ways in by_phases.items())


def _phases(phases: Collection[str]) -> str:
    names = [one for one in map(_bare, PHASES) if one in phases]
    is_any = {*map(_bare, PHASES)} - {*names} <= {BEFORE}
    return "any" if is_any else ", ".join(names)


def _script(case: Case) -> str:
    if case.becomes in ALIKE:
        return ""
    return case.loop + ("" if case.saves or case.loop == TRAINER else " without --save")
