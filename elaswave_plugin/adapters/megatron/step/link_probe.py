"""Measures the time of messages between neighbouring stages, in the job, before its first step.

Each worker of a stage and its partner of the next one send a message to and fro, a small one and a
large one; half a round trip is one way. All pairs of an even stage do so at once, then those of an
odd one, as in a step.
"""

import time
from statistics import median

import torch
import torch.distributed as dist
from megatron.core import parallel_state

SMALL_BYTES, LARGE_BYTES = 64, 1 << 20
ROUNDS = 5


def measure_link() -> tuple[float, float] | None:
    """Seconds of a message to the next stage, and of each byte in it; None at the last stage.

    Collective over a pipeline.
    """
    group = parallel_state.get_pipeline_model_parallel_group()
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    found = None
    for parity in (0, 1):
        begins = rank % 2 == parity
        partner = rank + 1 if begins else rank - 1
        if 0 <= partner < size:
            peer = dist.get_global_rank(group, partner)
            small_s, large_s = (
                _one_way_s(group, peer, numel, begins=begins)
                for numel in (SMALL_BYTES, LARGE_BYTES)
            )
            if begins:
                byte_s = max(0.0, large_s - small_s) / (LARGE_BYTES - SMALL_BYTES)
                found = small_s, byte_s
    return found


def _one_way_s(group: dist.ProcessGroup, peer: int, numel: int, *, begins: bool) -> float:
    """Half of the median round trip; the first one opens the link and warms up."""
    message = torch.zeros(numel, dtype=torch.uint8)
    trips = []
    for _ in range(1 + ROUNDS):
        began_s = time.perf_counter()
        for sends in (begins, not begins):
            (dist.send if sends else dist.recv)(message, peer, group=group)
        trips.append(time.perf_counter() - began_s)
    return median(trips[1:]) / 2
