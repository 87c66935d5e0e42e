"""Tables of what the fault tests prove: the cases of the matrices, and the files of fault tests."""

import ast
import json
from pathlib import Path
from typing import Any

from elaswave_plugin.config import parse_kill

ROOT = Path(__file__).resolve().parents[2]
# Each with the folder of its tests.
FRAMEWORKS = (
    ("Megatron-Core", "tests/faults"),
    ("DeepSpeed", "tests/deepspeed"),
    ("Megatron-LM", "tests/adapters/megatron_lm"),
)


def matrix_table() -> str:
    """Cases of `make matrix`, by what is lost, when, and what is promised then."""
    from tests.matrix import MATRICES

    lines = [
        "| matrix | lost | slots | moment | promise | cases |",
        "|---|---|---|---|---|---|",
    ]
    for matrix in MATRICES:
        rows: dict[tuple[str, str], list[tuple[tuple[int, ...], tuple[str, ...]]]] = {}
        for spec in matrix.cases:
            lost, slots, moments = _lost(spec)
            rows.setdefault((lost, matrix.promise(spec)), []).append((slots, moments))
        for (lost, promise), cases in rows.items():
            slots = {slot for case, _ in cases for slot in case}
            moments = list(dict.fromkeys(moment for _, case in cases for moment in case))
            span = f"{min(slots)} to {max(slots)}"
            cells = (matrix.framework, lost, span, ", ".join(moments), promise, str(len(cases)))
            lines.append("| " + " | ".join(cells) + " |")
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


def files_table() -> str:
    """Files of fault tests, with their number of tests and their first line."""
    lines = ["| framework | file | tests | what they show |", "|---|---|---|---|"]
    for framework, folder in FRAMEWORKS:
        for path in sorted((ROOT / folder).glob("test_*.py")):
            tree = ast.parse(path.read_text("utf-8"))
            tests = sum(
                isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
                for node in tree.body
            )
            said = (ast.get_docstring(tree) or "").splitlines()[0].replace("|", "\\|")
            name = path.relative_to(ROOT / "tests")
            lines.append(f"| {framework} | `{name}` | {tests} | {said} |")
    return "\n".join(lines)


def _lost(spec: Any) -> tuple[str, tuple[int, ...], tuple[str, ...]]:
    """Return what is lost in a case, of which slots, and in which moments."""
    if spec.lost_supervisors:
        return "workers with supervisors and snapshots", spec.lost_supervisors, ("backward",)
    if spec.lost_trainers:
        return "both workers of a TP group", spec.lost_trainers, ("backward",)
    kills = [parse_kill(kill) for kill in spec.kills]
    lost = "one worker" if len(kills) == 1 else f"{len(kills)} workers"
    return lost, tuple(kill.slot for kill in kills), tuple(kill.phase for kill in kills)
