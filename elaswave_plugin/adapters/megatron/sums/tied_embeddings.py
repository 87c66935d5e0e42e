"""The gradient of an embedding that the first and the last stage share, at unequal stage widths.

Megatron-Core all-reduces it between pairs of workers that own the same elements (megatron/core/
distributed/finalize_model_grads.py, ``_allreduce_word_embedding_grads``). Unequally wide stages cut
it differently, so each owner sends its interval to the owners of the same elements at the other
stage: two terms, G = G_first + G_last, whose sum does not depend on their order.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.utils import get_attr_wrapped_model

from elaswave_plugin.communicator.groups import group_calls
from elaswave_plugin.core.layout.shards import padded_size
from elaswave_plugin.core.planner.pipeline_flow import PipelineFlow

Chunks = Sequence[DistributedDataParallel]


class TiedWeight(NamedTuple):
    """A stage's place for the shared weight: elements [start, start + numel) of a bucket."""

    start: int
    numel: int
    bucket_numel: int

    def owned(self, shard: int, width: int) -> tuple[int, int]:
        """Elements [low, high) of the weight that a shard owns when the bucket is cut ``width``."""
        size = padded_size(self.bucket_numel, width) // width
        low, high = shard * size - self.start, (shard + 1) * size - self.start
        return min(max(low, 0), self.numel), min(max(high, 0), self.numel)


def tied_parameter(chunks: Chunks) -> torch.nn.Parameter | None:
    """The weight that this stage shares with another one, if it does."""
    for chunk in chunks:
        module = get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True)
        if module.share_embeddings_and_output_weights and module.pre_process != module.post_process:
            weight: torch.nn.Parameter = module.shared_embedding_or_output_weight()
            return weight
    return None


def find_tied_weight(chunks: Chunks) -> TiedWeight | None:
    """Find this stage's place for the weight that it shares with another one; None without one."""
    weight = tied_parameter(chunks)
    for buffer in (buffer for chunk in chunks for buffer in chunk.buffers):
        if weight is not None and weight in buffer.param_index_map:
            start, stop, index = buffer.param_index_map[weight]
            bucket = buffer.buckets[index]
            return TiedWeight(start - bucket.offset, stop - start, bucket.numel_unpadded)
    return None


def add_other_stage(
    chunks: Chunks,
    *,
    flow: PipelineFlow,
    slot: int,
    tied: dict[int, TiedWeight],
    group: dist.ProcessGroup,
    ranks: tuple[int, ...],
    tag: int,
) -> None:
    """Add what the other stage computed to the elements of the shared weight that ``slot`` owns.

    ``tied``: where each of the two stages keeps it; ``group`` holds all workers that have a place,
    ``ranks`` are its slots. Collective over both stages; nothing happens at the others.
    """
    coordinate = flow.coordinate(slot)
    weight = tied_parameter(chunks)
    if coordinate is None or weight is None or coordinate.stage not in tied:
        return
    (other,) = tied.keys() - {coordinate.stage}
    grad = weight.main_grad.view(-1)  # type: ignore[attr-defined]  # DDP sets it
    arriving, sends = [], []
    for peer, low, high in _overlaps(flow, coordinate.stage, coordinate.order, other, tied):
        rank = ranks.index(flow.layout.stages[other][peer].slots[coordinate.tp])
        theirs = torch.empty_like(grad[low:high])
        # A copy: the sum goes into the same memory, maybe before the bytes have left.
        mine = grad[low:high].clone()
        arriving.append((low, group_calls.receive(theirs, group, rank=rank, tag=tag)))
        sends.append(group_calls.send(mine, group, rank=rank, tag=tag))
    for low, one in arriving:
        theirs = one.wait()
        grad[low : low + theirs.numel()] += theirs
    for work in sends:
        work.wait()


def _overlaps(
    flow: PipelineFlow, stage: int, order: int, other: int, tied: dict[int, TiedWeight]
) -> Iterator[tuple[int, int, int]]:
    """(replica at the other stage, low, high) of the elements that both it and this one own."""
    low, high = tied[stage].owned(order, len(flow.layout.stages[stage]))
    width = len(flow.layout.stages[other])
    for peer in range(width):
        start, stop = tied[other].owned(peer, width)
        first, last = max(low, start), min(high, stop)
        if first < last:
            yield peer, first, last
