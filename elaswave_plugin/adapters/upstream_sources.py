"""Compares the functions that the adapters re-implement with the sources that are known of them."""

import hashlib
import linecache
import tokenize
from collections.abc import Iterable, Sequence
from functools import reduce
from importlib import import_module
from inspect import unwrap
from typing import Any

from elaswave_plugin.ipc.console import say

# "module:name" of a function, the file of `adapters/` that re-implements it or makes its results
# again, and the digests of its source, each with the releases that have it.
Row = tuple[str, str, tuple[tuple[str, str], ...]]


def say_unknown(rows: Iterable[Row]) -> None:
    """Say in one sentence which of these functions are others than in the releases known."""
    names = ", ".join(
        f"{place.replace(':', '.')} (re-implemented in adapters/{file}; known: "
        f"{', '.join(releases for _, releases in known)})"
        for place, file, known in rows
        if digest_of(place) not in dict(known)
    )
    if names:
        say(
            f"the source is that of no known release: {names}; install one of them, or run "
            "`elaswave rehearse COMMAND`, which compares your job with losses and without, before "
            "you rely on this one"
        )


def digest_of(place: str) -> str | None:
    """Return the digest of the function at "module:name"; None where there is none, or no source.

    It is that of the function itself where it is wrapped, as a patch of ours wraps it.
    """
    module, _, path = place.partition(":")
    try:
        found: Any = reduce(getattr, path.split("."), import_module(module))
        code = unwrap(found).__code__
    except (ImportError, AttributeError):
        return None
    # Of inspect, getsource() walks all modules that there are first, which takes longer.
    lines = linecache.getlines(code.co_filename)[code.co_firstlineno - 1 :]
    try:
        return source_digest(lines) if lines else None
    except (SyntaxError, tokenize.TokenError):
        return None  # a lambda within other lines


def source_digest(lines: Sequence[str]) -> str:
    """Return 16 hexadecimal digits of SHA-256 of the function with which these lines begin.

    Comments, docstrings and blank lines do not count. One pass over the tokens of Python's own
    library, since this is a part of the start of a job.
    """
    kept, indented = list(lines), int(lines[0][:1].isspace())
    depth, last, end = 0, tokenize.INDENT, len(lines)
    text: tokenize.TokenInfo | None = None
    for token in tokenize.generate_tokens(iter(lines).__next__):
        row, column = token.start
        if token.type == tokenize.COMMENT:
            kept[row - 1] = kept[row - 1][:column]
        elif token.type == tokenize.NEWLINE and text is not None:
            first, after = text.start[0] - 1, text.end[0]
            kept[first:after] = [""] * (after - first)
        depth += (token.type == tokenize.INDENT) - (token.type == tokenize.DEDENT)
        if token.type == tokenize.DEDENT and depth == indented:
            end = row - 1
            break
        if token.type not in (tokenize.COMMENT, tokenize.NL):
            starts_block = token.type == tokenize.STRING and last == tokenize.INDENT
            text, last = token if starts_block else None, token.type
    code = "\n".join(line.rstrip() for line in kept[:end] if line.strip())
    return hashlib.sha256(code.encode()).hexdigest()[:16]
