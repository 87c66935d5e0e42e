"""Prints the page of mutants: `python -m tests.faults.mutants_page > PAGE`."""

from itertools import groupby
from pathlib import Path

from tests.faults.harness import ROOT, SCRIPT
from tests.faults.mutants import Mutant, mutants
from tests.faults.replacements import TRAINS

PAGE = ROOT / "elaswave_plugin" / "docs" / "wrong_lines.md"
HEAD = """\
# What a wrong line does

Each of the ten lines that `examples/train_gpt.py` marks, left out, moved or written otherwise, one
at a time. Two workers train, one is killed in step 3. "Trains right": the ledger is exact, the loss
is survived, and losses, norms, weights and optimizer state have the bits of the script as it is.
"Refused": one sentence in the first step at the latest (or when the line is first reached), exit
code 2. "Its own error": the traceback of Python or a framework once, exit code 1. Nobody is started
again in either.

This page is printed by `python -m tests.faults.mutants_page`, and every row is run by
`tests/faults/test_mutants.py`.
"""


def page() -> str:
    """All mutants, a table for each marked line."""
    marked = {
        int(line.rpartition(" ")[2]): line.split("  # [elastic]")[0].strip()
        for line in Path(SCRIPT).read_text().splitlines()
        if "# [elastic]" in line
    }
    ordered = sorted(mutants(), key=lambda one: one.line)
    parts = [HEAD]
    for line, ones in groupby(ordered, key=lambda one: one.line):
        rows = "\n".join(map(_row, ones))
        parts.append(
            f"## {line}. `{marked[line]}`\n\n| line | end | says |\n|---|---|---|\n{rows}\n"
        )
    return "\n".join(parts)


def _row(one: Mutant) -> str:
    says = "" if one.end == TRAINS else f"`{one.words.rstrip(': (')}`"
    return f"| {one.change} | {one.end} | {says} |"


if __name__ == "__main__":
    print(page(), end="")
