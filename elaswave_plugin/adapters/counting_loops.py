"""Finds the line by which a script's loop ends at a count of its batches."""

import ast
import inspect
import linecache
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

from elaswave_plugin.adapters.script_lines import script_frames

# A loop that asks for one of these goes by the steps of the job.
_BY_STEPS = ("global_steps", "sync_gradients", "was_step_applied")
# Functions whose iterators end by a count, and those that number what another one gives.
_ENDING, _NUMBERING = ("range", "trange", "repeat", "islice"), ("enumerate", "zip")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

Loop = ast.For | ast.While
Tests = tuple[ast.expr, ...]
# Names that are given a value, the value, and the tests that this is behind.
Value = tuple[set[str], ast.expr, Tests]


def counting_line() -> str | None:
    """Return "file:line" of where the loop that asks for a batch ends by a count; None of others.

    Where a generator asks, so does the loop that asks the generator. A count that another function
    keeps is not found.
    """
    for frame in script_frames():
        loops = _loops_around(frame)
        line = _count_in(loops, frame.f_lineno)
        if line is not None:
            return f"{Path(frame.f_code.co_filename).name}:{line}"
        yields = frame.f_code.co_flags & inspect.CO_GENERATOR
        if (loops and not yields) or frame.f_code.co_name == "<module>":
            break
    return None


def _loops_around(frame: FrameType) -> list[Loop]:
    """Return the loops of a function around the line where it is, the innermost first."""
    code, line = frame.f_code, frame.f_lineno
    if code.co_name.startswith("<") and code.co_name != "<module>":
        return []
    try:
        tree = ast.parse("".join(linecache.getlines(code.co_filename, frame.f_globals)))
    except SyntaxError:
        # A notebook's cell, which has commands of its own.
        return []
    loops: list[Loop] = []
    # From the outside to the inside.
    for one in ast.walk(tree):
        if isinstance(one, (*_FUNCTIONS, ast.For, ast.While)) and (
            one.lineno <= line <= (one.end_lineno or 0)
        ):
            loops = [] if isinstance(one, _FUNCTIONS) else [one, *loops]
    return loops


def _count_in(loops: Sequence[Loop], line: int) -> int | None:
    """Return the line of the count by which these loops end, the innermost being at a line."""
    counted: set[str] = set()
    # That of a loop which ends by a count of its own, unless one around it goes by steps.
    fixed: int | None = None
    for loop in loops:
        # The data end all loops around the one that iterates over them.
        asks = loop is loops[0] or fixed is not None
        by_steps = _with_followers({*_BY_STEPS}, loop)
        if asks:
            counted |= _counts(loop, by_steps)
        exits = [*_exits(loop)]
        if asks and any(by_steps & _names(test) for _, tests in exits for test in tests):
            return None
        for exit_line, tests in exits:
            if any(counted & _names(test) for test in tests):
                return exit_line
        if isinstance(loop, ast.While):
            fixed = None
        elif asks:
            called, is_over_data = _called(loop.iter), line <= (loop.iter.end_lineno or 0)
            if not is_over_data or called & {*_ENDING}:
                fixed = fixed or loop.lineno
    return fixed


def _counts(loop: Loop, by_steps: set[str]) -> set[str]:
    """Return names that count the turns of a loop, and names that follow them."""
    found: set[str] = set()
    if isinstance(loop, ast.For) and _called(loop.iter) & {*_ENDING, *_NUMBERING}:
        found = {ast.unparse(getattr(loop.target, "elts", [loop.target])[0])}
    for names, value, tests in _values(loop):
        if names & _names(value) and not any(by_steps & _names(test) for test in tests):
            found |= names
    return _with_followers(found, loop)


def _with_followers(names: set[str], loop: Loop) -> set[str]:
    """Return these names, and those that a loop gives a value of one of them."""
    found, values = {*names}, [*_values(loop)]
    for _ in values:
        found.update(*(given for given, value, _ in values if found & _names(value)))
    return found


def _values(loop: Loop) -> Iterator[Value]:
    """Yield what a loop gives to names."""
    for one, tests, _ in _statements(loop.body):
        if isinstance(one, ast.AugAssign):
            yield {ast.unparse(one.target)}, ast.BinOp(one.target, one.op, one.value), tests
        elif isinstance(one, ast.Assign):
            for target in one.targets:
                given = getattr(target, "elts", [target])
                yield {ast.unparse(name) for name in given}, one.value, tests


def _exits(loop: Loop) -> Iterator[tuple[int, Tests]]:
    """Yield the line of each statement that leaves a loop, and the tests that it is behind."""
    if isinstance(loop, ast.While):
        yield loop.lineno, (loop.test,)
    for one, tests, within in _statements(loop.body):
        if isinstance(one, ast.Return) or (isinstance(one, ast.Break) and not within):
            yield one.lineno, tests


def _statements(
    body: Sequence[ast.AST], tests: Tests = (), within: bool = False
) -> Iterator[tuple[ast.AST, Tests, bool]]:
    """Yield statements, the tests that each is behind, and whether it is in a loop among them."""
    for one in body:
        yield one, tests, within
        if isinstance(one, (*_FUNCTIONS, ast.ClassDef)):
            continue
        more = (*tests, one.test) if isinstance(one, ast.If) else tests
        inner = within or isinstance(one, (ast.For, ast.While))
        for part in ("body", "orelse", "handlers", "cases", "finalbody"):
            yield from _statements(getattr(one, part, ()), more, inner)


def _names(node: ast.AST) -> set[str]:
    """Return the names in an expression, as in step, self.step, global_steps of any engine."""
    found: set[str] = set()
    for one in ast.walk(node):
        if isinstance(one, ast.Name):
            found.add(one.id)
        elif isinstance(one, ast.Attribute):
            found |= {ast.unparse(one)} | ({one.attr} & {*_BY_STEPS})
    return found


def _called(node: ast.AST) -> set[str]:
    """Return the names of the functions that an expression calls."""
    calls = (one.func for one in ast.walk(node) if isinstance(one, ast.Call))
    return {getattr(one, "id", getattr(one, "attr", "")) for one in calls}
