"""The table of docs/operations.md: what becomes of a job that is told to end, by the cases."""

from collections.abc import Collection, Mapping

from tests.faults.told import CASES, SLURM_CASES, TRAINER, Becomes, Case

# Whatever runs there.
ALIKE = (Becomes.UNHEARD, Becomes.KILLED)


def told_table() -> str:
    """Return a row for each outcome: launchers and loops, with the signals and phases of cases."""
    lines = ["| becomes | launcher, script: told by (while worker 0 is in) |", "|---|---|"]
    for becomes in Becomes:
        jobs: dict[str, dict[str, dict[str, None]]] = {}
        for case in CASES + SLURM_CASES:
            if case.becomes is becomes:
                told = jobs.setdefault(_job(case), {})
                told.setdefault(case.told, {})[case.phase] = None
        ways = _names if becomes in ALIKE else _ways
        texts = [f"{job}: {ways(told)}" for job, told in jobs.items()]
        lines.append(f"| {becomes} | {'<br>'.join(texts)} |")
    return "\n".join(lines)


def _names(told: Mapping[str, Collection[str]]) -> str:
    return ", ".join(told)


def _ways(told: Mapping[str, Collection[str]]) -> str:
    """Say the phases of each way to tell it, once for those that have the same."""
    by_phases: dict[tuple[str, ...], list[str]] = {}
    for way, phases in told.items():
        by_phases.setdefault(tuple(phases), []).append(way)
    return ", ".join(f"{', '.join(ways)} ({', '.join(one)})" for one, ways in by_phases.items())


def _job(case: Case) -> str:
    if case.becomes in ALIKE:
        return f"`{case.launcher}`"
    without = "" if case.saves or case.loop == TRAINER else " without --save"
    return f"`{case.launcher}`, {case.loop}{without}"
