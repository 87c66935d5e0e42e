"""A function that stands for another one, which it is given."""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

# Of these, whatever asks a replacement asks for its own.
_FRAMEWORKS = ("torch.", "megatron.core.", "elaswave_plugin.")


def around(call: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return what has ``call(function, *arguments)`` stand for a function that it is given."""

    def make(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return call(function, *args, **kwargs)

        return replacement

    return make


def is_of_a_framework() -> bool:
    """Return whether the replacement that asks this is called by a framework, not by a script."""
    asker = sys._getframe(3).f_globals.get("__name__", "")
    return bool(asker.startswith(_FRAMEWORKS))
