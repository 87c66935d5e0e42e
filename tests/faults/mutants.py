"""Mutants of `examples/train_gpt.py`: one of its ten marked lines is wrong; how each one ends.

What changes a line is for any script whose lines are marked.
"""

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tests.faults.harness import SCRIPT
from tests.faults.replacements import (
    LESS,
    PLAIN,
    RAISES,
    REFUSED,
    REPLACED,
    TRAINS,
    Replacement,
)

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
    options = {9: EVALUATES, 10: SAVES}
    yield from left_out(text, _LEFT_OUT, {9: EVALUATES})
    yield from moved(text, _UP, _DOWN, {9: EVALUATES})
    yield from replaced(text, REPLACED, options)
    yield _plain(text)


_NO_WORLD = "torch.distributed is not initialized: write torch.distributed.init_process_group("
# what: (how it ends, the words)
_LEFT_OUT = {
    1: (RAISES, "NameError: name 'elaswave' is not defined"),
    2: (REFUSED, "write elaswave.add_arguments(parser)"),
    # On the CPU, where the records that attach applies stand in for torch.cuda.
    3: (RAISES, "Error: "),
    4: (REFUSED, _NO_WORLD),
    5: (REFUSED, "job.train is called before job.bind: write job.bind("),
    6: (RAISES, "name 'train_batches' is not defined"),
    7: (RAISES, "name 'forward_backward' is not defined"),
    8: (RAISES, "IndentationError"),
    9: (RAISES, "NameError: name 'loss' is not defined"),
    10: (RAISES, "IndentationError"),
}


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
    3: (TRAINS, ""),
    4: (REFUSED, _NO_WORLD),
    5: (TRAINS, ""),
    6: (TRAINS, ""),
    7: (TRAINS, ""),
    9: (RAISES, "cannot access local variable 'loss'"),
}


def _plain(text: str) -> Mutant:
    """None of the lines that join the job is there; it joins by its calls, which say what lacks."""
    (attach, _), *others = PLAIN
    for old, new in ((attach, "torch.cuda.set_device = id"), *others):
        assert old in text, old
        text = text.replace(old, new)
    return Mutant(
        line=3,
        change="left out, and all behind it as without the plugin",
        script=text,
        end=LESS,
        words="the script has its batches in memory",
    )


# By line: how it ends, and the words.
Ends = Mapping[int, tuple[str, str]]
Options = Mapping[int, tuple[str, ...]]


def left_out(text: str, ends: Ends, options: Options) -> Iterator[Mutant]:
    """A marked statement is not there."""
    lines = text.splitlines()
    for line, (end, words) in ends.items():
        statement, _ = _marked(text, line)
        first, stop = _span(statement)
        if hasattr(statement, "body"):
            stop = first + 1  # its head
        yield Mutant(
            line=line,
            change="left out",
            script="\n".join([*lines[:first], *lines[stop:]]),
            end=end,
            words=words,
            options=options.get(line, ()),
        )


def moved(text: str, up: Ends, down: Ends, options: Options) -> Iterator[Mutant]:
    """A marked statement and its neighbour are in each other's place."""
    for how, step, ends in (("up", -1, up), ("down", 1, down)):
        for line, (end, words) in ends.items():
            yield Mutant(
                line=line,
                change=f"moved {how} by one statement",
                script=_swapped(text, line, step),
                end=end,
                words=words,
                options=options.get(line, ()),
            )


def _swapped(text: str, line: int, step: int) -> str:
    """The marked statement and its neighbour in the same block in each other's place."""
    statement, block = _marked(text, line)
    place = block.index(statement)
    first, second = sorted((place, place + step))
    return "\n".join(_swap(text.splitlines(), _span(block[first]), _span(block[second])))


def _marked(text: str, line: int) -> tuple[ast.stmt, list[ast.stmt]]:
    """The statement whose first line has this mark, and the block that it is in."""
    lines = text.splitlines()
    (marked,) = (n for n, one in enumerate(lines, 1) if one.endswith(f"# [elastic] {line}"))
    for node in ast.walk(ast.parse(text)):
        for block in (getattr(node, "body", None), getattr(node, "orelse", None)):
            for statement in block if isinstance(block, list) else ():
                if statement.lineno == marked:
                    return statement, block
    raise ValueError(f"no statement begins in the line marked {line}")


def _span(statement: ast.stmt) -> tuple[int, int]:
    decorators = getattr(statement, "decorator_list", [])
    first = min(one.lineno for one in (statement, *decorators))
    assert statement.end_lineno is not None
    return first - 1, statement.end_lineno


def _swap(lines: list[str], one: tuple[int, int], two: tuple[int, int]) -> list[str]:
    between = lines[one[1] : two[0]]
    return [*lines[: one[0]], *lines[slice(*two)], *between, *lines[slice(*one)], *lines[two[1] :]]


def replaced(text: str, replacements: Sequence[Replacement], options: Options) -> Iterator[Mutant]:
    """Something else is written in the place of a line, or of a part of it."""
    for line, change, old, new, end, words in replacements:
        assert old in text, old
        yield Mutant(
            line=line,
            change=change,
            script=text.replace(old, new),
            end=end,
            words=words,
            options=options.get(line, ()),
        )
