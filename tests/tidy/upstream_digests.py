"""Prints the digests that re-implemented functions have in unpacked releases of the frameworks.

python -m tests.tidy.upstream_digests FOLDER...          (pip download --no-deps; unzip the wheel)
"""

import ast
import sys
from itertools import chain
from pathlib import Path

from elaswave_plugin.adapters import reimplemented
from elaswave_plugin.adapters.upstream_sources import Row, source_digest


def rows() -> list[Row]:
    """List all rows of all tables."""
    tables = (one for one in vars(reimplemented).values() if isinstance(one, tuple))
    return list(chain.from_iterable(tables))


def digest_in(folder: Path, place: str) -> str | None:
    """Return the digest of the function at "module:name" below a folder; None without one."""
    module, _, names = place.partition(":")
    path = folder.joinpath(*module.split(".")).with_suffix(".py")
    if not path.is_file():
        return None
    text = path.read_text("utf-8")
    node: ast.AST | None = ast.parse(text)
    for name in names.split("."):
        inside = getattr(node, "body", ())
        node = next((one for one in inside if getattr(one, "name", None) == name), None)
    if not isinstance(node, ast.FunctionDef):
        return None
    first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
    return source_digest(text.splitlines(keepends=True)[first - 1 :])


def main(folders: list[str]) -> None:
    """Print each function that the folders have, with its digest and what is known of that."""
    for folder in folders:
        for place, _, known in rows():
            digest = digest_in(Path(folder), place)
            if digest is not None:
                print(folder, place, digest, dict(known).get(digest, "not known"))


if __name__ == "__main__":
    main(sys.argv[1:])
