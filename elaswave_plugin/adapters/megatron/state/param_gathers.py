"""Gathers of weights between two passes, in a model that gathers them in its forward passes.

A script stops that around an evaluation or a save, which gathers what the last update has left.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

Work = Callable[[], object]


class Calls(Protocol):
    """The calls of a script's loop."""

    is_inside: bool
    """True while a call is being made, which is made again as a whole."""


def guard_gathers(
    chunks: Sequence[Any], calls: Calls, *, run: Callable[[Work], object], sealed: Work
) -> None:
    """Have the gathers that a script asks for made by ``run``; hooks come and go once.

    ``sealed()`` says that weights are what was sealed. A worker that comes later has hooks already,
    and a save that starts again has none any more.
    Source: ``DistributedDataParallel.disable_forward_pre_hook`` of Megatron-Core.
    """
    for chunk in chunks:
        if chunk.ddp_config.overlap_param_gather:

            def guard(gather: Work) -> None:
                if calls.is_inside:
                    gather()
                else:
                    run(lambda: (gather(), sealed()))

            _guard(chunk, guard)


def _guard(chunk: Any, guard: Callable[[Work], None]) -> None:
    gather, enable, disable = (
        chunk.start_param_sync,
        chunk.enable_forward_pre_hook,
        chunk.disable_forward_pre_hook,
    )

    def start_param_sync(*args: Any, **kwargs: Any) -> None:
        guard(partial(gather, *args, **kwargs))

    def enable_forward_pre_hook() -> None:
        if not chunk.remove_forward_pre_hook_handles:
            enable()

    def disable_forward_pre_hook(param_sync: bool = True) -> None:
        if chunk.remove_forward_pre_hook_handles:
            disable(param_sync=False)
        if param_sync:
            start_param_sync(force_sync=True)

    for function in (start_param_sync, enable_forward_pre_hook, disable_forward_pre_hook):
        setattr(chunk, function.__name__, function)
