"""A function that stands for another one, which it is given."""

from collections.abc import Callable
from functools import wraps
from typing import Any


def around(call: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return what has ``call(function, *arguments)`` stand for a function that it is given."""

    def make(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return call(function, *args, **kwargs)

        return replacement

    return make
