"""Keeps the warnings of libraries to a few lines a node (standard library only).

Each worker would repeat them, in two lines each. The first worker of a node shows the first ones,
each once and in one line; those of the script's own files come from every worker as ever.
PYTHONWARNINGS and -W have their usual effect.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

MOST_LINES = 4
"""And one that says that there are more."""
_LONGEST = 240


class _Few:
    """The stand-in for `warnings.showwarning`."""

    def __init__(self, *, shows: bool) -> None:
        self._left = MOST_LINES if shows else -1
        self._show = warnings.showwarning
        self._seen: set[tuple[str, int, str]] = set()

    def __call__(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if not _is_of_a_library(filename):
            return self._show(message, category, filename, lineno, file, line)
        text = str(message).strip().split("\n")[0]
        if self._left < 0 or (filename, lineno, text) in self._seen:
            return None
        self._seen.add((filename, lineno, text))
        said = f"{filename}:{lineno}: {category.__name__}: {text[:_LONGEST]}"
        if not self._left:
            said = "elaswave: more warnings of libraries are not shown; PYTHONWARNINGS=default does"
        self._left -= 1
        out = sys.stderr if file is None else file
        if out is not None:
            out.write(f"{said}\n")
        return None


def show_few_warnings(environ: Mapping[str, str]) -> None:
    """Do so from now on in this process, a trainer that begins, or a zygote.

    A zygote, and a worker that was started again, show none of libraries.
    """
    if not sys.warnoptions and "PYTHONWARNINGS" not in environ:
        first = environ.get("LOCAL_RANK", "0") == "0" and environ.get("ELASWAVE_INCARNATION") == "0"
        shown: Any = _Few(shows=first)
        warnings.showwarning = shown


def _is_of_a_library(filename: str) -> bool:
    """Return whether it lies in a folder of installed packages, or of Python itself."""
    parts = Path(filename).parts
    return (
        "site-packages" in parts
        or "dist-packages" in parts
        or filename.startswith(os.path.dirname(os.__file__))
    )
