"""The structure of the package: circles of files, names that stay in their rooms, journeys."""

import ast
import re
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter

from tests.tidy.function_index import PAGE, files_of
from tests.tidy.rules import PACKAGE

# (source, module, whether it is a package's), as `modules` of test_tidy.py gives them.
Files = Iterable[tuple[str, str, bool]]

# Journeys of docs/inside.md: the most files of each.
MOST_FILES = {"death": 36, "bytes": 20, "microbatch": 20, "stages": 28, "section": 12}
_STEP = re.compile(r"`([\w/]+\.py):([\w.]+)`")


def circle(files: Files) -> list[str]:
    """Return modules that import each other in a circle, in functions or for a type checker."""
    trees = {module: ast.parse(source) for source, module, _ in files}
    graph = {
        module: {one for one in _imports(tree) if one in trees} for module, tree in trees.items()
    }
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        return list(error.args[1])
    return []


def who_imports(name: str, files: Files) -> set[str]:
    """Return the modules, without the package's name, that import ``name`` of our own modules."""
    return {
        module.partition(".")[2]
        for source, module, _ in files
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE)
        if name in {alias.name for alias in node.names}
    }


def journeys(page: str) -> dict[str, list[tuple[str, str]]]:
    """Return the files and functions of each journey that a page has: a list item with a name."""
    items = re.findall(r"^- \*\*(\w+)\*\*(.*?)(?=^- |^#|^$)", page, re.MULTILINE | re.DOTALL)
    found = {name: _STEP.findall(text) for name, text in items}
    return {name: steps for name, steps in found.items() if steps}


def journey_findings(page: str) -> list[str]:
    """Find functions of journeys that are not in the file that is named, and too many files."""
    found = []
    for name, steps in journeys(page).items():
        for path, function in steps:
            owner, _, short = function.rpartition(".")
            if path not in files_of(owner, short) and not _has_class(path, function):
                found.append(f"{name}: {path} has no {function}")
        files = {path for path, _ in steps}
        if len(files) > MOST_FILES[name]:
            found.append(f"{name}: {len(files)} files, at most {MOST_FILES[name]}")
    return found


def _has_class(path: str, name: str) -> bool:
    source = (PAGE.parents[1] / PACKAGE / path).read_text("utf-8")
    return bool(re.search(rf"^class {name}\b", source, re.MULTILINE))


def _imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        yield from _imports(node)
