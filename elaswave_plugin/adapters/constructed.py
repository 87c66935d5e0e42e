"""How an object was constructed, so that its constructor can run again on the same object."""

import functools
from collections.abc import Callable
from typing import Any

_ARGUMENTS = "_elaswave_arguments"


def remembering(original: Callable[..., None]) -> Callable[..., None]:
    """A constructor that keeps with the object what it was called with."""

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.__dict__[_ARGUMENTS] = (args, kwargs)

    return __init__


def arguments_of(made: Any) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments with which an object was constructed; None where nobody saw it."""
    arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = made.__dict__.get(_ARGUMENTS)
    return arguments
