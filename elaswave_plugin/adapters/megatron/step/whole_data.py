"""Finds a forward step that goes on behind the end of its data."""

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

from elaswave_plugin.errors import ConfigurationError


class UntilItsEnd:
    """The items of an iterator, for a forward step that ends where they do."""

    def __init__(self, items: Iterator[Any]) -> None:
        self._items = items
        self._is_over = False

    def __iter__(self) -> "UntilItsEnd":
        return self

    def __next__(self) -> Any:
        try:
            return next(self._items)
        except StopIteration:
            self._is_over = True
            raise

    def read_by(self, forward_step: Callable[..., Any]) -> Callable[..., Any]:
        """Return the forward step; raises ConfigurationError where it goes on behind the end."""

        @wraps(forward_step)
        def step(*args: Any, **kwargs: Any) -> Any:
            result = forward_step(*args, **kwargs)
            if self._is_over:
                raise ConfigurationError(
                    "forward_step goes on where its data_iterator has ended, with a batch from"
                    " elsewhere, which is unknown to a worker that runs the micro-batches of a lost"
                    " worker: give forward_backward a new iter(loader) once it has made"
                    " len(loader) micro-batches, and catch no StopIteration in forward_step"
                )
            return result

        return step
