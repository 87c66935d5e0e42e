"""Mutants of `examples/train_gpt.py`: one of its ten marked lines is wrong; how each one ends."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from tests.faults.harness import SCRIPT
from tests.faults.replacements import RAISES, REFUSED, REPLACED, TRAINS

EVALUATES = ("--eval-interval=1", "--eval-iters=1")
SAVES = ("--save=SAVED", "--save-interval=1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """`change` made of the marked line `line`; `words`: what the user has to read at its `end`.

    ``options``: of the script, without which the line would not be reached.
    """

    line: int
    change: str
    script: str
    end: str
    words: str = ""
    options: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.line} {self.change}"


def mutants() -> Iterator[Mutant]:
    """All of them, by line."""
    text = SCRIPT.read_text()
    yield from _left_out(text)
    yield from _moved(text)
    yield from _replaced(text)


# what: (how it ends, the words)
_LEFT_OUT = {
    1: (RAISES, "NameError: name 'elaswave' is not defined"),
    2: (REFUSED, "write elaswave.add_arguments(parser)"),
    # On the CPU, where the records that attach applies stand in for torch.cuda.
    3: (RAISES, "Error: "),
    4: (RAISES, "AssertionError"),
    5: (REFUSED, "job.train is called before job.bind: write job.bind("),
    6: (RAISES, "name 'train_batches' is not defined"),
    7: (RAISES, "name 'forward_backward' is not defined"),
    8: (RAISES, "IndentationError"),
    9: (RAISES, "NameError: name 'loss' is not defined"),
    10: (RAISES, "IndentationError"),
}


def _left_out(text: str) -> Iterator[Mutant]:
    for line, (end, words) in _LEFT_OUT.items():
        kept = [one for one in text.splitlines() if not one.endswith(f"# [elastic] {line}")]
        yield Mutant(
            line=line,
            change="left out",
            script="\n".join(kept),
            end=end,
            words=words,
            options=EVALUATES if line == 9 else (),
        )


_UP = {
    1: (TRAINS, ""),
    2: (TRAINS, ""),
    3: (RAISES, "cannot access local variable 'args'"),
    4: (TRAINS, ""),
    5: (TRAINS, ""),
    6: (TRAINS, ""),
    7: (TRAINS, ""),
    8: (RAISES, "cannot access local variable 'last'"),
}
_DOWN = {
    1: (TRAINS, ""),
    2: (REFUSED, "write elaswave.add_arguments(parser)"),
    3: (RAISES, "Error: "),
    4: (RAISES, "AssertionError"),
    5: (TRAINS, ""),
    6: (TRAINS, ""),
    7: (TRAINS, ""),
    9: (RAISES, "cannot access local variable 'loss'"),
}


def _moved(text: str) -> Iterator[Mutant]:
    for how, step, ends in (("up", -1, _UP), ("down", 1, _DOWN)):
        for line, (end, words) in ends.items():
            yield Mutant(
                line=line,
                change=f"moved {how} by one statement",
                script=_swapped(text, line, step),
                end=end,
                words=words,
                options=EVALUATES if line == 9 else (),
            )


def _swapped(text: str, line: int, step: int) -> str:
    """The marked statement and its neighbour in the same block in each other's place."""
    lines = text.splitlines()
    (marked,) = (n for n, one in enumerate(lines, 1) if one.endswith(f"# [elastic] {line}"))
    for node in ast.walk(ast.parse(text)):
        for block in (getattr(node, "body", None), getattr(node, "orelse", None)):
            for place, statement in enumerate(block if isinstance(block, list) else ()):
                if statement.lineno == marked:
                    first, second = sorted((place, place + step))
                    return "\n".join(_swap(lines, _span(block[first]), _span(block[second])))
    raise ValueError(f"no statement begins in the line marked {line}")


def _span(statement: ast.stmt) -> tuple[int, int]:
    decorators = getattr(statement, "decorator_list", [])
    first = min(one.lineno for one in (statement, *decorators))
    assert statement.end_lineno is not None
    return first - 1, statement.end_lineno


def _swap(lines: list[str], one: tuple[int, int], two: tuple[int, int]) -> list[str]:
    between = lines[one[1] : two[0]]
    return [*lines[: one[0]], *lines[slice(*two)], *between, *lines[slice(*one)], *lines[two[1] :]]


def _replaced(text: str) -> Iterator[Mutant]:
    for line, change, old, new, end, words in REPLACED:
        assert old in text, old
        yield Mutant(
            line=line,
            change=change,
            script=text.replace(old, new),
            end=end,
            words=words,
            options={9: EVALUATES, 10: SAVES}.get(line, ()),
        )
