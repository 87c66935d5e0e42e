"""Counts the statements of the package, room by room, docstrings not counted.

python -m benchmarks.weight [FOLDER]

FOLDER: the package of another checkout, to compare with.
"""

import argparse
import ast
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "elaswave_plugin"


def statements(source: str) -> int:
    """Count the statements of a module, without strings that stand by themselves.

    >>> statements('"It adds."\\ndef add(a, b):\\n    return a + b')
    2
    """
    nodes = ast.walk(ast.parse(source))
    return sum(isinstance(node, ast.stmt) and not _is_text(node) for node in nodes)


def rooms(package: Path) -> Counter[str]:
    """The statements of each folder of a package; "." is its root."""
    found: Counter[str] = Counter()
    for path in package.rglob("*.py"):
        found[path.parent.relative_to(package).as_posix()] += statements(path.read_text("utf-8"))
    return found


def _is_text(node: ast.AST) -> bool:
    value = node.value if isinstance(node, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def main(argv: Sequence[str] | None = None) -> None:
    """Print a line for each room, and one for all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=PACKAGE)
    found = rooms(parser.parse_args(argv).folder)
    for room, count in sorted(found.items()):
        print(f"{count:7,} {room}")
    print(f"{found.total():7,} all")


if __name__ == "__main__":
    main()
