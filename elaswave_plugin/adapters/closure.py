"""The variables that a function of the script's reads from outside of itself."""

from collections.abc import Iterator
from types import FunctionType
from typing import Any


def nonlocals_of(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield names and values of the enclosing functions' variables; of those that are set.

    A variable that only some of a script's options set has an empty cell, for which Python's
    ``inspect.getclosurevars`` raises ValueError.
    """
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            value = cell.cell_contents
        except ValueError:
            continue
        yield name, value


def globals_of(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield names and values of the variables of its module that it names."""
    known = function.__globals__
    yield from ((name, known[name]) for name in function.__code__.co_names if name in known)
