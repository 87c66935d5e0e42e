"""The calls of a group that go through the body of the script's loop, while that runs."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Protocol

MADE_AGAIN = ("allreduce", "broadcast", "barrier")


class Body(Protocol):
    """The body of a loop that the job owns, between two steps; see ``loop_body.py``."""

    def run(self, group: Any, call: str, args: Sequence[Any], start: Callable[[], Any]) -> Any:
        """Complete a call, through any number of losses; returns its Work."""

    def note(self, group: Any, call: str, args: Sequence[Any], start: Callable[..., Any]) -> Any:
        """Make a call that no loss may meet, as ``start(*args)``; returns its Work."""

    def interrupted(self, call: str) -> None:
        """A loss has met a call that cannot be made again."""


def made_again(method: Callable[..., Any]) -> Callable[..., Any]:
    """The call of a group, made again where a loss meets it in the body."""

    @wraps(method)
    def call(group: Any, *args: Any, **kwargs: Any) -> Any:
        body: Body | None = group._links.body
        if body is None:
            return method(group, *args, **kwargs)
        return body.run(group, method.__name__, args, lambda: method(group, *args, **kwargs))

    return call


def noted(method: Callable[..., Any]) -> Callable[..., Any]:
    """The call of a group of which the body only knows what it returns."""

    @wraps(method)
    def call(group: Any, *args: Any, **kwargs: Any) -> Any:
        body: Body | None = group._links.body
        if body is None:
            return method(group, *args, **kwargs)
        return body.note(
            group, method.__name__, args, lambda *given: method(group, *given, **kwargs)
        )

    return call
