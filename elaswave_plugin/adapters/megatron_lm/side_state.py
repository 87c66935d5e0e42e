"""What a piece of Megatron-LM's loop changes besides model and optimizer, and how to put it back.

Timers, counters of samples, the rerun state machine and the positions of the data loaders: a piece
that is interrupted and run again must find them as they were.
"""

import copy
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from megatron.core.rerun_state_machine import get_rerun_state_machine

from elaswave_plugin.adapters.megatron_lm.loader import MicrobatchLoader

_COUNTERS = (
    "consumed_train_samples",
    "consumed_valid_samples",
    "skipped_train_samples",
    "curr_iteration",
)
# Of the rerun state machine: what it saves to rerun a step is made anew at the step's beginning.
_NOT_KEPT = ("saved_state", "error_injector", "state_save_func", "state_restore_func")


def remember(loaders: Sequence[MicrobatchLoader]) -> Callable[[], None]:
    """Keep all of it; returns the function that puts it back."""
    training, machine = import_module("megatron.training"), get_rerun_state_machine()
    args = training.get_args()
    counters = {name: getattr(args, name) for name in _COUNTERS if hasattr(args, name)}
    timers = [(timer, dict(vars(timer))) for timer in training.get_timers()._timers.values()]
    reruns = _kept(machine)
    positions = [(loader, loader.position) for loader in loaders]

    def put_back() -> None:
        vars(args).update(counters)
        for timer, fields in timers:
            vars(timer).update(fields)
        vars(machine).update(copy.deepcopy(reruns))
        for loader, position in positions:
            loader.position = position

    return put_back


def _kept(machine: Any) -> dict[str, Any]:
    return {
        name: copy.deepcopy(value) for name, value in vars(machine).items() if name not in _NOT_KEPT
    }
