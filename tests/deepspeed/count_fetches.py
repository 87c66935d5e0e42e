"""Counts, in a worker, what ZeRO-3 gathers and records in each step; a redone step counts anew."""

import json
from pathlib import Path
from typing import Any

from deepspeed.runtime.zero import partition_parameters
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

from elaswave_plugin.adapters.deepspeed.engine.job import EngineJob


def count(folder: str) -> None:
    """Write the counts of every step to ``fetches-SLOT.json`` in the folder, after each step."""
    steps: dict[int, dict[str, int]] = {}
    serve, complete = EngineJob._serve, EngineJob._step
    gather = partition_parameters._dist_allgather_fn
    record = PartitionedParameterCoordinator.record_module

    def served(self: EngineJob, loader: Any, step: int, iteration: int) -> Any:
        if iteration == 0:
            steps[step] = {"gathers": 0, "records": 0}
        return serve(self, loader, step, iteration)

    def gathered(*args: Any, **kwargs: Any) -> Any:
        if steps:
            steps[max(steps)]["gathers"] += 1
        return gather(*args, **kwargs)

    def recorded(self: Any, module: Any) -> None:
        steps[max(steps)]["records"] += 1
        record(self, module)

    def completed(self: EngineJob, *args: Any, **kwargs: Any) -> None:
        complete(self, *args, **kwargs)
        Path(folder, f"fetches-{self._worker.slot}.json").write_text(json.dumps(steps))

    EngineJob._serve, EngineJob._step = served, completed  # type: ignore[method-assign]
    partition_parameters._dist_allgather_fn = gathered
    PartitionedParameterCoordinator.record_module = recorded
