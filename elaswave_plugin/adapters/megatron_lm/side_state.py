"""Keeps what a piece of Megatron-LM's loop changes besides model and optimizer, and puts it back.

Timers, counters of samples, the size of the batch and the rerun state machine: a piece that is
interrupted and run again must find them as they were.
"""

from importlib import import_module
from typing import Any

from megatron.core.rerun_state_machine import get_rerun_state_machine

from elaswave_plugin.adapters.megatron_lm.batch_size import go_back_to, present_batch
from elaswave_plugin.step_state.step_state import Part
from elaswave_plugin.values.detached import detached_copy

_COUNTERS = (
    "consumed_train_samples",
    "consumed_valid_samples",
    "skipped_train_samples",
    "curr_iteration",
)
_ENERGY = ("_total_energy", "_lap_energy", "_last_energy")
_TIMER = ("_elapsed", "_active_time", "_started", "_start_time")
# Of the rerun state machine: enumerations, kept by their names.
_ENUMERATIONS = ("state", "mode")
# Of it: what it saves to rerun a step is made anew at the step's beginning.
_NOT_KEPT = ("saved_state", "state_save_func", "state_restore_func")
# Of it, what passes leave only where a result was rejected, was the largest yet, or is reported.
_OF_RESULTS = ("rerun_requested", "large_value_counts", "max_values", "saved_results")
# Of it, what decides over reruns, and that neither a step nor an evaluation runs; its other fields
# are about results of one worker. Who comes later has nothing else to go back to where its first
# step is interrupted, nor who is given a place where an evaluation is.
_SHARED = (
    *(*_ENUMERATIONS, "current_iteration", "first_iteration_complete"),
    *("large_value_counts", "max_values"),
)


class SideState(Part):
    """All of it, as a part of the state of a step."""

    name = "the counters of Megatron-LM's loop"
    of_passes = True

    def keep(self) -> dict[str, Any]:
        """A copy: counters, batch, timers, rerun machine, energy."""
        training, machine = import_module("megatron.training"), get_rerun_state_machine()
        args = training.get_args()
        return {
            "counters": {name: getattr(args, name) for name in _COUNTERS if hasattr(args, name)},
            "batch": present_batch(),
            "timers": {
                name: {field: getattr(timer, field) for field in _TIMER}
                for name, timer in training.get_timers()._timers.items()
            },
            "reruns": detached_copy(
                {name: one for name, one in vars(machine).items() if name not in _NOT_KEPT}
            )
            | {name: getattr(machine, name).name for name in _ENUMERATIONS},
            "energy": {name: getattr(_energy_monitor(), name) for name in _ENERGY},
        }

    def put_back(self, kept: dict[str, Any]) -> None:
        """Make it as it was kept."""
        training = import_module("megatron.training")
        vars(training.get_args()).update(kept["counters"])
        go_back_to(kept["batch"])
        timers = training.get_timers()._timers
        for name, fields in kept["timers"].items():
            if name in timers:
                vars(timers[name]).update(fields)
        machine = get_rerun_state_machine()
        named = {name: type(getattr(machine, name)) for name in _ENUMERATIONS}
        values = {name: one[kept["reruns"][name]] for name, one in named.items()}
        vars(machine).update(detached_copy(kept["reruns"]) | values)
        vars(_energy_monitor()).update(kept["energy"])

    def is_still(self, kept: dict[str, Any]) -> bool:
        """Return whether passes have left nothing that a redo does not make; ``kept`` before them.

        Times and the machine's counts of a step are made anew.
        """
        now = self.keep()
        results = (one["reruns"] for one in (now, kept))
        # Who was given another one's state has of it what is shared.
        first, second = ([of.get(name) or None for name in _OF_RESULTS] for of in results)
        return first == second and all(now[name] == kept[name] for name in ("counters", "batch"))

    def shared(self, kept: dict[str, Any]) -> dict[str, Any]:
        """Return the part that holds for every worker."""
        reruns = {name: kept["reruns"][name] for name in _SHARED}
        return {**kept, "reruns": reruns, "energy": {}}


def _energy_monitor() -> Any:
    return import_module("megatron.training.global_vars").get_energy_monitor()
