"""Batches of a script's own loaders, for stages of unequal width.

While all stages are whole, each replica of a stage has a stream of its own, alike on all stages.
After a loss, stages run a micro-batch on other replicas: one worker reads it, for all of them.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from elaswave_plugin.adapters.megatron_lm.external_loader import ExternalLoader
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.recovery.worker import Worker
from elaswave_plugin.step_state.moved_state import receive, send


def share_batches(
    loaders: Sequence[ExternalLoader], runs: Sequence[tuple[int, int]], worker: Worker
) -> None:
    """Have every worker hold the micro-batches that it runs; collective over WORLD.

    ``loaders``: of the call, one a model chunk; ``runs``: each micro-batch with the slots that read
    it, in one order everywhere. Raises ConfigurationError where no loader is left.
    """
    own = next((one for one in loaders if one.was_read), loaders[0])
    readers = _readers(own, worker, num_microbatches=1 + max(microbatch for microbatch, _ in runs))
    own.keep_pace()
    for microbatch, slot in sorted(runs):
        reader = readers[microbatch]
        if worker.slot not in (reader, slot):
            continue
        if reader != slot == worker.slot:
            batch = receive(worker.ranks.index(reader))
        else:
            batch = own.read(microbatch)
        if reader != slot and worker.slot == reader:
            send(batch, worker.ranks.index(slot))
        else:
            for loader in loaders:
                loader.take(microbatch, batch)


def _readers(own: ExternalLoader, worker: Worker, *, num_microbatches: int) -> Sequence[int]:
    """The slot that reads each micro-batch: of its replica, or else any that has a stream."""
    told = torch.tensor([own.has_stream, own.was_read, own.replica], dtype=torch.int64)
    table = [torch.zeros_like(told) for _ in worker.ranks]
    dist.all_gather(table, told)
    rows = {slot: row.tolist() for slot, row in zip(worker.ranks, table, strict=True)}
    # The streams of stages that read nothing are behind.
    having = [slot for slot, (has, read, _) in rows.items() if has and read]
    having = having or [slot for slot, (has, _, _) in rows.items() if has]
    if not having:
        raise ConfigurationError(
            "no worker is left that has a loader of the script's: have the datasets provider "
            "return its loaders on every worker whose tensor-parallel rank is 0"
        )
    of_replica = {rows[slot][2]: slot for slot in reversed(having)}
    return [
        of_replica.get(number % own.num_replicas, having[number % len(having)])
        for number in range(num_microbatches)
    ]
