"""Ends the ``no_sync`` of passes that were interrupted, before the next ones begin.

Megatron-Core's pipelines enter it by hand, and an interrupted one leaves it to Python to end it, at
whatever time the garbage collector comes to it: in the middle of a later pass, whose gradients it
would have counted, or reduced, too early.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any


class OpenPasses:
    """The contexts of ``no_sync`` that passes of these chunks have entered and not left."""

    def __init__(self, chunks: Sequence[Any]) -> None:
        """Stand before ``no_sync``, also where the configuration has it already.

        Source: ``no_sync`` of ``DistributedDataParallel``, and ``disable_grad_sync`` in
        megatron/core/pipeline_parallel/schedules.py.
        """
        self._open: list[AbstractContextManager[Any]] = []
        self._chunks = chunks
        for chunk in chunks:
            chunk.no_sync = self._entering(chunk.no_sync)
        for config in {id(chunk.config): chunk.config for chunk in chunks}.values():
            given = config.no_sync_func
            one_each = isinstance(given, list)
            config.no_sync_func = [*map(self._of, given)] if one_each else self._of(given)

    def end(self) -> None:
        """End those that an interruption has left open."""
        while self._open:
            self._open.pop().__exit__(None, None, None)

    def _of(self, function: Any) -> Any:
        owner: Any = getattr(function, "__self__", None)
        is_ours = any(owner is chunk for chunk in self._chunks)
        is_native = is_ours and function.__name__ == "no_sync"
        return owner.no_sync if is_native else function

    def _entering(self, native: Callable[[], AbstractContextManager[Any]]) -> Any:
        return lambda: _Pass(native(), self._open)


class _Pass:
    """A context that is left once, by who has entered it or by `OpenPasses.end`."""

    def __init__(
        self, no_sync: AbstractContextManager[Any], others: list[AbstractContextManager[Any]]
    ) -> None:
        self._no_sync, self._open = no_sync, others

    def __enter__(self) -> None:
        self._no_sync.__enter__()
        self._open.append(self._no_sync)

    def __exit__(self, *error: Any) -> None:
        if self._no_sync in self._open:
            self._open.remove(self._no_sync)
            self._no_sync.__exit__(*error)
