"""The order in which ZeRO-3 fetches parameters, carried over a change of the layout.

DeepSpeed's coordinator records in one pass which module follows which, and from then on fetches
ahead and keeps what is used again soon (partitioned_param_coordinator.py). The order has nothing to
do with the number of workers. A coordinator without it gathers each parameter when it is needed
and compares its record between the workers.
"""

from typing import Any

import torch
import torch.distributed as dist
import xxhash

# Private to their class: what a complete record consists of.
_MODULES = "_PartitionedParameterCoordinator__submodule_order"
_USES = "_PartitionedParameterCoordinator__param_order"


class FetchOrder:
    """The coordinator that was the last to have a complete record; none before the first."""

    def __init__(self) -> None:
        self._coordinator: Any = None

    def keep(self, offload: Any) -> None:
        """Keep the coordinator of a ``DeepSpeedZeRoOffload``, if its record is complete."""
        coordinator = offload.get_param_coordinator()
        if coordinator.is_complete_trace():
            self._coordinator = coordinator

    def give(self, offload: Any) -> None:
        """Have the kept coordinator go on in another offload (collective over WORLD).

        Only if everyone has the same record: a loss may have come when some had completed it and
        others had not, and a worker that comes later has none.
        """
        mine = self._digest()
        extremes = torch.tensor([mine, -mine], dtype=torch.int64)
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
        largest, smallest = int(extremes[0]), -int(extremes[1])
        if largest == smallest != 0:
            # What an interrupted backward pass had begun in it.
            self._coordinator.release_backward_leftovers()
            offload.param_coordinator = self._coordinator

    def _digest(self) -> int:
        """Of the record, alike on every worker that has the same; 0 of none."""
        coordinator = self._coordinator
        if coordinator is None or not coordinator.is_complete_trace():
            return 0
        modules = [module.ds_id for module in getattr(coordinator, _MODULES)]
        uses = [(use.param.ds_id, use.step_id_last_used_at) for use in getattr(coordinator, _USES)]
        return (xxhash.xxh3_64_intdigest(repr((modules, uses)).encode()) >> 1) | 1
