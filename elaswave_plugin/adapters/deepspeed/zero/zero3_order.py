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

# Private to their class: that a record is complete, and what it consists of.
_MODE, _MODULES, _USES = (
    f"_PartitionedParameterCoordinator__{name}"
    for name in ("trace_mode", "submodule_order", "param_order")
)


class FetchOrder:
    """The last complete record that this worker has seen; none before the first."""

    def __init__(self) -> None:
        self._record: dict[str, Any] = {}

    def keep(self, offload: Any) -> None:
        """Keep the record of a ``DeepSpeedZeRoOffload``, if it is complete."""
        coordinator = offload.get_param_coordinator()
        if coordinator.is_complete_trace():
            self._record = {name: getattr(coordinator, name) for name in (_MODE, _MODULES, _USES)}

    def give(self, offload: Any) -> None:
        """Give the record to a new offload (collective over WORLD).

        Only if all workers have the same one: a loss may have come when some had completed it and
        others had not, and a worker that comes later has none. The coordinator stays the new one:
        what an old one has derived from its record depends on how far its worker had come.
        """
        mine = self._digest()
        extremes = torch.tensor([mine, -mine], dtype=torch.int64)
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
        largest, smallest = int(extremes[0]), -int(extremes[1])
        if largest == smallest != 0:
            vars(offload.get_param_coordinator()).update(self._record)

    def _digest(self) -> int:
        """Of the record, alike on every worker that has the same; 0 of none."""
        if not self._record:
            return 0
        modules = [module.ds_id for module in self._record[_MODULES]]
        uses = [(use.param.ds_id, use.step_id_last_used_at) for use in self._record[_USES]]
        return (xxhash.xxh3_64_intdigest(repr((modules, uses)).encode()) >> 1) | 1
