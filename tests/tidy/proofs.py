"""Tables of what the fault tests prove: cases of the matrices, and what each test declares."""

import json
from collections import Counter
from pathlib import Path, PurePath
from typing import Any

from elaswave_plugin.config import parse_kill
from tests.proofs import Kind, Promise
from tests.tidy.collected import Case, declared

ROOT = Path(__file__).resolve().parents[2]
# The folders of tests, and the framework of their jobs.
FRAMEWORKS = (
    ("faults/", "Megatron-Core"),
    ("demo/", "Megatron-Core"),
    ("schedulers/", "Megatron-Core"),
    ("deepspeed/", "DeepSpeed"),
    ("adapters/megatron_lm/", "Megatron-LM"),
    ("rehearsal/", "rehearsals"),
)
# Of more files than these a reader is told the number.
MAX_FILES = 9
# Of agents and launchers, whose trainers train nothing.
_TITLES = {"none": "without a framework"}


def matrix_list() -> str:
    """Cases of `make matrix`, by what is lost, when, and what is promised then."""
    from tests.matrix import MATRICES

    lines = []
    for matrix in MATRICES:
        rows: dict[tuple[str, str], list[tuple[tuple[int, ...], tuple[str, ...]]]] = {}
        for spec in matrix.cases:
            lost, slots, moments = _lost(spec)
            rows.setdefault((lost, matrix.promise(spec)), []).append((slots, moments))
        for (lost, promise), cases in rows.items():
            slots = {slot for case, _ in cases for slot in case}
            moments = list(dict.fromkeys(moment for _, case in cases for moment in case))
            span = f"{min(slots)} to {max(slots)}"
            kept = f"*{Promise(promise).name.lower()}*"
            struck = f"{lost}, slots {span}, in {', '.join(moments)}"
            lines.append(f"- {matrix.framework}: {struck}: {kept} {len(cases)}")
    return "\n".join(lines)


def results_line() -> str:
    """Write what the newest recorded run of each matrix gave."""
    found = []
    for path in sorted((ROOT / "benchmarks").glob("fault_matrix_*.json")):
        result = json.loads(path.read_text("utf-8"))
        name = path.stem.removeprefix("fault_matrix_")
        found.append(
            f"- {name}: {result['passed']} of {result['cases']} passed on {result['date']}, commit"
            f" {result['commit']}, {result['hardware']} (`benchmarks/{path.name}`)"
        )
    return "\n".join(found)


def declared_table() -> str:
    """Declarations of all fault tests: an item a fault, by framework, with promises and files."""
    found: dict[tuple[str, str], list[Case]] = {}
    for case in declared():
        if case.proof is not None:
            found.setdefault((case.proof.kind, framework_of(case.file)), []).append(case)
    lines = [f"- *{one.name.lower()}*: {one}" for one in Promise]
    lines += [""]
    for kind in Kind:
        parts = [
            f"{_TITLES.get(framework, framework)}: {_counts(found[kind, framework])}"
            for framework in sorted({framework for other, framework in found if other == kind})
        ]
        lines.append(f"- **{kind}.** {'. '.join(parts)}.")
    return "\n".join(lines)


def _counts(cases: list[Case]) -> str:
    """Say how many cases have each promise, and in which files they are."""
    kept = Counter(case.proof.promise for case in cases if case.proof is not None)
    counts = [f"*{one.name.lower()}* {kept[one]}" for one in Promise if kept[one]]
    files = {PurePath(case.file).stem.removeprefix("test_") for case in cases}
    named = ", ".join(f"`{one}`" for one in sorted(files))
    return f"{', '.join(counts)} ({named if len(files) <= MAX_FILES else f'{len(files)} files'})"


def framework_of(file: str) -> str:
    """Return the framework that the jobs of a file train with."""
    return next((name for folder, name in FRAMEWORKS if file.startswith(folder)), "none")


def _lost(spec: Any) -> tuple[str, tuple[int, ...], tuple[str, ...]]:
    """Return what is lost in a case, of which slots, and in which moments."""
    if spec.lost_nodes:
        return "nodes with their workers and snapshots", spec.lost_nodes, ("backward",)
    if spec.lost_trainers:
        return "both workers of a TP group", spec.lost_trainers, ("backward",)
    kills = [parse_kill(kill) for kill in spec.kills]
    lost = "one worker" if len(kills) == 1 else f"{len(kills)} workers"
    return lost, tuple(kill.slot for kill in kills), tuple(kill.phase for kill in kills)
