"""The constructor arguments of an object, kept so that its constructor can run on it again."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

_ARGUMENTS = "_elaswave_arguments"


def remembering(original: Callable[..., None]) -> Callable[..., None]:
    """A constructor that keeps with the object what it was called with."""

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.__dict__[_ARGUMENTS] = (args, kwargs)

    return __init__


def remember(made: Any, local_names: Mapping[str, Any]) -> None:
    """Keep with an object what its constructor was called with; ``local_names``: its locals()."""
    arguments = dict(local_names)
    for implied in ("self", "__class__"):
        arguments.pop(implied, None)
    made.__dict__[_ARGUMENTS] = ((), arguments)


def arguments_of(made: Any) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return the arguments with which an object was constructed; None if they were not kept."""
    return made.__dict__.get(_ARGUMENTS)
