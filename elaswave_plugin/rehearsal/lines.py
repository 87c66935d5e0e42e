"""Finds the lines of a script that may have changed what differs, by its source: pure.

>>> source = '''
... class Net(Module):
...     def forward(self, x):
...         self.seen += 1
...         return x * torch.rand(1)
... for step in steps:
...     ema.update(model)
... '''
>>> [line for line, _ in changing_lines(source, "model.net.seen")]
[4]
>>> [line for line, _ in changing_lines(source, "ema.shadow['weight']")]
[7]
>>> [line for line, _ in drawing_lines(source, "torch")]
[5]
>>> [line for line, _ in gradient_lines("all_reduce(p.main_grad)")]
[1]
>>> [line for line, _ in unordered_lines("order = list({name for name in names})")]
[1]
"""

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

_NAME = re.compile(r"[A-Za-z_]\w*")
_NOT_NAMES = ("state_dict", "__class__", "model", "module", "weight", "bias", "buffer", "kept")
_DRAWS = (
    (
        "torch",
        (
            "rand",
            "randn",
            "randint",
            "randperm",
            "bernoulli",
            "multinomial",
            "normal",
            "rand_like",
            "randn_like",
            "randint_like",
            "bernoulli_",
            "normal_",
            "uniform_",
            "dropout",
        ),
    ),
    (
        "numpy.random",
        (
            "random",
            "rand",
            "randn",
            "randint",
            "choice",
            "permutation",
            "shuffle",
            "normal",
            "uniform",
            "binomial",
            "poisson",
            "integers",
            "beta",
        ),
    ),
    (
        "random",
        (
            "random",
            "randint",
            "randrange",
            "choice",
            "choices",
            "shuffle",
            "sample",
            "uniform",
            "gauss",
            "normalvariate",
            "betavariate",
        ),
    ),
)
# What makes a gradient or an order other than it was, where no variable of the script's differs.
_GRADIENTS = ("grad", "main_grad", "grad_data")
_UNORDERED = ("set", "frozenset", "hash")
_MOST = 4
Line = tuple[int, str]


Find = Callable[[str], Iterator[Line]]


def lines_for(files: Iterable[str], finds: Iterable[Find]) -> list[str]:
    """``FILE:LINE: text`` of what the first of ``finds`` that finds any line finds in a source."""
    sources = {file: text for file in files if (text := _source(file)) is not None}
    for find in finds:
        found = [
            f"{Path(file).name}:{number}: {text}"
            for file, source in sources.items()
            for number, text in find(source)
        ]
        if found:
            return found[:_MOST]
    return []


def changing_lines(source: str, name: str) -> Iterator[Line]:
    """Statements that set the last part of a name, or call a method of one of its parts.

    Those that run once, at the top of the script or in a constructor, come last.
    """
    parts = [part for part in _NAME.findall(name) if part not in _NOT_NAMES]
    later: list[Line] = []
    for part in reversed(parts):
        found = list(_changes(source, part))
        later += [(number, text) for number, text, often in found if not often]
        if any(often for _, _, often in found):
            yield from ((number, text) for number, text, often in found if often)
            return
    yield from later


def gradient_lines(source: str) -> Iterator[Line]:
    """Statements that take a gradient by its name."""
    for node in _statements(source):
        own = _own_nodes(node)
        if any(isinstance(inner, ast.Attribute) and inner.attr in _GRADIENTS for inner in own):
            yield _line(source, node)


def unordered_lines(source: str) -> Iterator[Line]:
    """Statements with a set, or a hash of a text: their order is each interpreter's own."""
    for node in _statements(source):
        for inner in _own_nodes(node):
            called = inner.func if isinstance(inner, ast.Call) else None
            is_named = isinstance(called, ast.Name) and called.id in _UNORDERED
            if is_named or isinstance(inner, ast.Set | ast.SetComp):
                yield _line(source, node)
                break


def drawing_lines(source: str, generator: str) -> Iterator[Line]:
    """Calls that draw from a generator, by their names."""
    kind = "torch" if generator.startswith("torch") else generator
    names = dict(_DRAWS).get(kind, ())
    for node in _statements(source):
        calls = (inner for inner in _own_nodes(node) if isinstance(inner, ast.Call))
        if any(_draws(call, names, kind) for call in calls):
            yield _line(source, node)


def _draws(call: ast.Call, names: Sequence[str], kind: str) -> bool:
    if not isinstance(call.func, ast.Attribute) or call.func.attr not in names:
        return isinstance(call.func, ast.Name) and call.func.id in names
    owner = ast.unparse(call.func.value)
    if kind == "random":
        return owner == "random"
    return not owner.endswith("random") if kind == "torch" else owner.endswith("random")


def _changes(source: str, name: str) -> Iterator[tuple[int, str, bool]]:
    for node, often in _statements_and_loops(source):
        if any(name in _names_set(inner) for inner in _own_nodes(node)):
            yield (*_line(source, node), often)


def _names_set(node: ast.AST) -> set[str]:
    """Names that a statement sets, or whose object a call on it may change."""
    found: set[str] = set()
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        targets = [node.target]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        targets = [node.func.value]
    for target in targets:
        for inner in ast.walk(target):
            if isinstance(inner, ast.Name):
                found.add(inner.id)
            elif isinstance(inner, ast.Attribute):
                found.add(inner.attr)
    return found


def _statements(source: str) -> Iterator[ast.stmt]:
    return (node for node, _ in _statements_and_loops(source))


def _statements_and_loops(source: str) -> Iterator[tuple[ast.stmt, bool]]:
    """Every statement, and whether it runs often: in a loop, or in a function but a constructor."""

    def walk(node: ast.AST, often: bool) -> Iterator[tuple[ast.stmt, bool]]:
        for child in ast.iter_child_nodes(node):
            inside = often or isinstance(node, ast.For | ast.While)
            if isinstance(node, ast.FunctionDef):
                inside = node.name not in ("__init__", "main")
            if isinstance(child, ast.stmt) and not isinstance(child, ast.Import | ast.ImportFrom):
                yield child, inside
            yield from walk(child, inside)

    yield from walk(ast.parse(source), False)


def _own_nodes(statement: ast.stmt) -> Iterator[ast.AST]:
    """The nodes of a statement without the statements in it."""
    yield statement
    for child in ast.iter_child_nodes(statement):
        if not isinstance(child, ast.stmt):
            yield from ast.walk(child)


def _line(source: str, node: ast.stmt) -> Line:
    return node.lineno, source.splitlines()[node.lineno - 1].strip()


def _source(file: str) -> str | None:
    try:
        text = Path(file).read_text("utf-8")
        ast.parse(text)
    except (OSError, ValueError, SyntaxError):
        return None
    return text
