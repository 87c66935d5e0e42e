"""Finds collectives between replicas in what runs once a micro-batch.

After a loss workers run unequal numbers of micro-batches, so that such calls do not meet.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any

from megatron.core import parallel_state

from elaswave_plugin.communicator.links.link_table import LinkTable
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.values.set_within import set_within

_OF_FRAMEWORKS = ("torch", "megatron", "elaswave_plugin")


def without_collectives(
    links: LinkTable, forward_step: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Call the script's forward step, in which no collective may meet another replica.

    Nor may one in the loss function that it returns. Raises ConfigurationError with its place.
    """
    result = _watched(links, forward_step, args, kwargs)
    if not isinstance(result, tuple) or len(result) != 2:
        raise ConfigurationError(
            f"forward_step returned a {type(result).__name__}, wanted (output, loss function): "
            "write `return output, partial(loss_func, ...)` at its end"
        )
    output, loss_func = result
    if not callable(loss_func):
        return result
    return output, lambda *given, **named: _watched(links, loss_func, given, named)


def _watched(
    links: LinkTable, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    with set_within(links, "watch", partial(_refuse_between_replicas, links.slot)):
        return function(*args, **kwargs)


def _refuse_between_replicas(slot: int, call: str, members: Sequence[int]) -> None:
    """Raise ConfigurationError for a call that meets another replica of this worker's stage."""
    group: Any = parallel_state.get_data_parallel_group()
    if not (set(group.members) - {slot}) & set(members) or _gathers_weights():
        return
    raise ConfigurationError(
        f"{call} is called {_place()}, which runs once a micro-batch, and after a loss workers run "
        "unequal numbers of these: delete that line; the job reports the mean over all workers"
    )


def _gathers_weights() -> bool:
    """Return whether DDP has led here, whose gathers of weights the job makes beforehand."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("megatron.core.distributed."):
            return True
        frame = frame.f_back
    return False


def _place() -> str:
    """Return where the script called it: the innermost frame that is of no framework."""
    folders = []
    for name in _OF_FRAMEWORKS:
        spec = find_spec(name)
        folders += [] if spec is None else [*(spec.submodule_search_locations or ())]
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith((*(f"{folder}/" for folder in folders), "<")):
            return f"in {frame.f_code.co_name} ({Path(path).name}:{frame.f_lineno})"
        frame = frame.f_back
    return "in the model"
