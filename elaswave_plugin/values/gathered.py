"""Plain values of all workers for each of them: collectives over host memory, without pickle."""

from typing import Any

import torch
import torch.distributed as dist

from elaswave_plugin.errors import UnreadableValueError
from elaswave_plugin.values.plain import LONGEST_BYTES, decode, encode

# Around what `encode` bounds: the version that it names.
_LONGEST = LONGEST_BYTES + (1 << 10)


def gathered(
    mine: Any, what: str = "what a worker tells the others", *, group: Any = None
) -> list[Any]:
    """Gather each worker's plain value, by rank (collective over WORLD, or a group).

    Raises ConfigurationError for one of this worker that is not plain, UnreadableValueError.
    """
    told = _bytes_of(mine, what)
    count = torch.tensor(len(told))
    counts = [torch.zeros_like(count) for _ in range(dist.get_world_size(group))]
    dist.all_gather(counts, count, group=group)
    lengths = [checked(int(one), what) for one in counts]
    row = torch.zeros(max(lengths), dtype=torch.uint8)
    row[: len(told)] = told
    rows = [torch.zeros_like(row) for _ in lengths]
    dist.all_gather(rows, row, group=group)
    return [
        decode(row[:length].numpy().data, f"{what} (of rank {rank})")
        for rank, (row, length) in enumerate(zip(rows, lengths, strict=True))
    ]


def told_by(rank: int, mine: Any, what: str = "what a worker tells the others") -> Any:
    """Return the plain value of one rank on all; ``mine`` counts there (collective over WORLD)."""
    is_source = dist.get_rank() == rank
    told = _bytes_of(mine if is_source else None, what)
    count = torch.tensor(len(told))
    dist.broadcast(count, src=rank)
    length = checked(int(count), what)
    if not is_source:
        told = torch.zeros(length, dtype=torch.uint8)
    dist.broadcast(told, src=rank)
    return decode(told.numpy().data, f"{what} (of rank {rank})")


def _bytes_of(value: Any, what: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(encode(value, what)), dtype=torch.uint8)


def checked(length: int, what: str) -> int:
    """Return a length that another worker has told; raises UnreadableValueError for no such one."""
    if not 0 < length <= _LONGEST:
        raise UnreadableValueError(f"{what} has {length} bytes, wanted at most {_LONGEST}")
    return length
