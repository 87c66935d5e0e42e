"""Prints the page of mutants: `python -m tests.faults.mutants_page > PAGE`."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from tests.deepspeed.call_mutants import CALLS, call_mutants
from tests.faults.harness import ROOT, SCRIPT
from tests.faults.mutants import Mutant, mutants
from tests.faults.replacements import DETACHED, LESS, RAISES, REFUSED

PAGE = ROOT / "docs" / "wrong_lines.md"
# Of a line that is moved; the head of the page says it once.
STEP = " by one statement"
HEAD = """\
# What a wrong line does

Each of the ten lines that `examples/train_gpt.py` marks, and each call of
`elaswave_plugin.deepspeed`, left out, moved by one statement or written otherwise, one at a time,
while two workers train and one is killed in step 3. Changes that train right, with the bits of the
script as it is (DeepSpeed: of its run in which the same worker leaves as planned), are left out.
A sentence refuses the job in the first step at the latest (or when the line is first reached), exit
code 2. *An error of its own*: the traceback of Python or a framework once, exit code 1. No worker
is started again in either. *Nothing attached*: the script trains unprotected, and one line at its
first step says so.

This page is printed by `python -m tests.faults.mutants_page`, and every row is run by
`tests/faults/test_mutants.py` and `tests/deepspeed/test_call_mutants.py`.

"""
DEEPSPEED = """
# DeepSpeed

The calls of `tests/deepspeed/scripts/calls.py`; a script with the section needs none of them.

"""


def page() -> str:
    """All mutants that go wrong, a table for each marked line."""
    parts = [HEAD, *_tables(SCRIPT, mutants()), DEEPSPEED, *_tables(CALLS, call_mutants())]
    return "".join(parts).rstrip("\n") + "\n"


def _tables(script: Path, ones: Iterable[Mutant]) -> Iterator[str]:
    marked = {
        int(line.rpartition(" ")[2]): line.split("  # [elastic]")[0].strip()
        for line in script.read_text().splitlines()
        if "# [elastic]" in line
    }
    ordered = sorted(ones, key=lambda one: one.line)
    for line, of_line in groupby(ordered, key=lambda one: one.line):
        found = [replace(one, change=one.change.removesuffix(STEP)) for one in of_line]
        error = ", ".join(one.change for one in found if one.end == RAISES)
        told: dict[str, list[str]] = {}
        for one in found:
            if one.end in (REFUSED, DETACHED, LESS):
                told.setdefault(_end(one), []).append(one.change)
        items = [f"- {', '.join(changes)}: {end}" for end, changes in told.items()]
        items += [f"- An error of its own, once: {error}."] if error else []
        yield f"## {line}. `{marked[line]}`\n\n" + "\n".join(items) + "\n\n"


def _end(one: Mutant) -> str:
    """The words of a refusal; those of the line that says what is missing, behind the end."""
    words = f"`{one.words.rstrip(': (')}`"
    return words if one.end == REFUSED else f"{one.end}, {words}"


if __name__ == "__main__":
    print(page(), end="")
