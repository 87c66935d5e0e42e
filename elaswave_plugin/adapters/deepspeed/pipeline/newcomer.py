"""The knowledge that a later worker of a job of pipelines needs from the others.

Its state comes from the snapshots. Here is what they do not have: where an epoch of the data was
left before its end, and the tensors of its stage that no step changes.
"""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from elaswave_plugin.adapters.deepspeed.engine.first_pass import Structure
from elaswave_plugin.adapters.deepspeed.pipeline.framework import PipelineFramework
from elaswave_plugin.errors import ElasWaveError
from elaswave_plugin.recovery.worker import Worker


class PipelineKnowledge:
    """The knowledge of one worker, which may be without a pipeline."""

    def __init__(self, worker: Worker, framework: PipelineFramework) -> None:
        self._worker = worker
        self._framework = framework

    def tell(self) -> Any:
        """Return the loader's place, and the structure of this worker's part of the model."""
        assert self._framework.loader is not None
        return self._framework.loader.tell(), self._framework.structure.told()

    def follow(self, step: int, told: Sequence[Any | None]) -> None:
        """Send each stage's tensors from a worker that knows them (called on every worker).

        ``told``: by rank, None for newcomers. Raises ElasWaveError where no worker of a stage
        with such tensors knows them, ConfigurationError on one that came with another model.
        """
        ranks, stages = self._worker.ranks, self._framework.placement.stages
        mine = next(stage for stage in stages if self._worker.slot in stage)
        peers = [rank for rank, slot in enumerate(ranks) if slot in mine]
        source = next((rank for rank in peers if told[rank] is not None), None)
        structure = None if source is None else Structure.of(told[source][1])  # type: ignore[index]
        if told[dist.get_rank()] is None:
            self._learn_place(next(one for one in told if one is not None)[0])
            if structure is not None:
                self._framework.fit(structure)
        tensors = [*self._framework.unsealed(structure)]
        if told[dist.get_rank()] is None:
            for tensor in tensors:
                if source is None:
                    raise ElasWaveError(
                        "all workers that held the frozen parameters and buffers of this worker's "
                        "stage were lost before it joined; restart from the last checkpoint"
                    )
                dist.recv(tensor, src=source)
        elif source == dist.get_rank():
            for tensor in tensors:
                for rank in peers:
                    if told[rank] is None:
                        dist.send(tensor, dst=rank)

    def _learn_place(self, told: Any) -> None:
        assert self._framework.loader is not None
        self._framework.loader.take_up(told)
