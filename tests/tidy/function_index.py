"""The index of docs/inside.md: the files of the functions that the page names."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "elaswave_plugin"
PAGE = ROOT / "docs" / "inside.md"
NAME = "functions"
_NAMED = re.compile(r"`(?:([A-Z]\w+)\.)?(\w+)\(\)`")


def functions_list() -> str:
    """Write the list: each file, with the functions in it that the page names before the index."""
    text = PAGE.read_text("utf-8").partition(f"<!-- {NAME}:")[0]
    # Journeys have their files beside them.
    known = set(re.findall(r"\.py:([\w.]+)`", text))
    found: dict[str, list[str]] = {}
    for owner, function in dict.fromkeys(_NAMED.findall(text)):
        name = f"{owner}.{function}" if owner else function
        for path in [] if name in known else files_of(owner, function):
            found.setdefault(path, []).append(f"{name}()")
    named = ((path, ", ".join(f"`{one}`" for one in found[path])) for path in sorted(found))
    return "\n".join(f"- `{path}`: {functions}" for path, functions in named)


def files_of(owner: str, function: str) -> list[str]:
    """Find the files that define a function, or a method of a class."""
    found = [path for path, name, method in _definitions() if method == function and name == owner]
    if not found and owner:  # a method that the class inherits
        found = [path for path, name, method in _definitions() if method == function and name]
    return sorted(dict.fromkeys(found))


@cache
def _definitions() -> tuple[tuple[str, str, str], ...]:
    """(file, class or nothing, function) of the package."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        where = path.relative_to(PACKAGE).as_posix()
        for node in ast.parse(path.read_text("utf-8")).body:
            inside = node.body if isinstance(node, ast.ClassDef) else [node]
            name = node.name if isinstance(node, ast.ClassDef) else ""
            found += [(where, name, one.name) for one in inside if isinstance(one, ast.FunctionDef)]
    return tuple(found)
