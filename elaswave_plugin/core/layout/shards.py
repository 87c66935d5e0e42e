"""The cut of a flat optimizer state over data-parallel workers, and its moves with the width.

A bucket of L elements is cut into n equal shards of S = ceil(L / (n * A)) * A elements, A being the
framework's alignment; shard r owns [r S, (r+1) S) of every bucket. A shard's state is laid out flat
as three parts of 4-byte elements (master | exp_avg | exp_avg_sq), each with its buckets one after
the other.

>>> cut_before, cut_after = ShardCut(buckets=(1000,), width=4), ShardCut(buckets=(1000,), width=3)
>>> cut_before.shard_sizes, cut_after.shard_sizes
((256,), (384,))
>>> [str(p) for p in pieces_for(target=1, before=cut_before, after=cut_after)]
['bucket 0 [384, 512) from 1', 'bucket 0 [512, 768) from 2']
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

# Shards are multiples of 128 elements in Megatron-Core
# (megatron/core/distributed/param_and_grad_buffer.py, bucket padding).
ALIGNMENT = 128
PARTS = ("master", "exp_avg", "exp_avg_sq")
# What a forward pass needs, and what the update needs in addition.
WEIGHTS, MOMENTS = PARTS[:1], PARTS[1:]
ELEMENT_BYTES = 4


def padded_size(length: int, width: int, alignment: int = ALIGNMENT) -> int:
    """Elements of a bucket of ``length`` when it is cut over ``width`` workers."""
    unit = width * alignment
    return -(-length // unit) * unit


def reserved_size(length: int, max_width: int) -> int:
    """Elements a bucket must reserve so that every width up to ``max_width`` fits."""
    return max(padded_size(length, width) for width in range(1, max_width + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardCut:
    """The cut of all buckets (unpadded lengths, elements) over ``width`` workers.

    Every shard is a multiple of ``alignment`` elements.
    """

    buckets: tuple[int, ...]
    width: int
    alignment: int = ALIGNMENT

    @property
    def shard_sizes(self) -> tuple[int, ...]:
        """Elements of one shard in each bucket."""
        return tuple(
            padded_size(length, self.width, self.alignment) // self.width for length in self.buckets
        )

    @property
    def shard_numel(self) -> int:
        """Elements of one part of one shard."""
        return sum(self.shard_sizes)

    @property
    def payload_bytes(self) -> int:
        """Bytes of one shard's state, all parts."""
        return len(PARTS) * self.shard_numel * ELEMENT_BYTES

    def spans(self, shard: int) -> Iterator[tuple[int, int, int, int]]:
        """(bucket, start, stop, offset in the part) of the real elements that ``shard`` owns."""
        offset = 0
        for bucket, (length, size) in enumerate(zip(self.buckets, self.shard_sizes, strict=True)):
            start, stop = min(shard * size, length), min((shard + 1) * size, length)
            if start < stop:
                yield bucket, start, stop, offset
            offset += size


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPiece:
    """Elements [start, stop) of a bucket, and where they lie in the old and the new shard."""

    bucket: int
    start: int
    stop: int
    source: int
    source_offset: int
    target_offset: int

    def __str__(self) -> str:
        return f"bucket {self.bucket} [{self.start}, {self.stop}) from {self.source}"


def pieces_for(
    *, target: int, before: ShardCut, after: ShardCut, origins: Mapping[int, int] | None = None
) -> tuple[ShardPiece, ...]:
    """List the parts of shard ``target`` of the new cut, by shard of the old cut, in order.

    ``origins``: the old bucket of each new one that lay in the old cut; None: the same ones in the
    same order. Together the pieces cover exactly the real elements of these buckets' new shard.
    """
    sizes = before.shard_sizes
    pieces = []
    for bucket, start, stop, offset in after.spans(target):
        origin = bucket if origins is None else origins.get(bucket)
        if origin is None:
            continue
        size, base = sizes[origin], sum(sizes[:origin])
        for source in range(start // size, (stop - 1) // size + 1):
            low, high = max(start, source * size), min(stop, (source + 1) * size)
            pieces.append(
                ShardPiece(
                    bucket=bucket,
                    start=low,
                    stop=high,
                    source=source,
                    source_offset=base + low - source * size,
                    target_offset=offset + low - start,
                )
            )
    return tuple(pieces)
