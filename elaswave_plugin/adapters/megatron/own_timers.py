"""Timers of the script's own that an interrupted step leaves running."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

from megatron.core.timers import Timers

from elaswave_plugin.adapters.closure import globals_of, nonlocals_of
from elaswave_plugin.ipc.console import say


def say_without_barriers(configs: Iterable[Any]) -> None:
    """Say where timers of a script's configurations have waited for all workers, and do not."""
    if any(one.timers is not None and one.barrier_with_L1_time for one in configs):
        say(
            "barrier_with_L1_time is switched off, as after a loss not all workers run the same"
            " passes: each worker's timers measure its own time"
        )


@contextmanager
def stopped_where_interrupted(function: Callable[..., Any]) -> Iterator[None]:
    """Inside, ``function`` runs; what an interruption leaves running begins again in its redo.

    Found are `Timers` that the function names, as a variable of its own scope or of its module, or
    as an attribute of one.
    """
    timers = [timer for one in _timers_of(function) for timer in one._timers.items()]
    running = {name for name, timer in timers if timer._started}
    try:
        yield
    except BaseException:
        for one in _timers_of(function):
            for name, timer in one._timers.items():
                timer._started = timer._started and name in running
        raise


def _timers_of(function: Callable[..., Any]) -> Iterator[Timers]:
    if not isinstance(function, FunctionType):
        return
    for _, value in (*nonlocals_of(function), *globals_of(function)):
        for one in (value, *getattr(value, "__dict__", {}).values()):
            if isinstance(one, Timers):
                yield one
