"""A sealed snapshot of one worker's shard, from its seal to the restore that reads it.

The same record is written into the snapshot's own memory, told to the agents, handed to all
trainers with a commit and planned with (standard library only).
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedShard:
    """One verified-by-checksum snapshot of one shard, and the holder of its bytes.

    ``buffer``: which of its owner's two memories it is in; ``units``: the parts of the model that
    its shard group had, in the order of its buckets; ``ranks``: the slots that shared the state, by
    ``shard``; sizes in bytes, all of them together ``length``. The memory itself does not
    name its holder.
    """

    owner: int
    buffer: int
    step: int
    epoch: int
    shard_group: tuple[int, int]
    units: tuple[int, ...]
    ranks: tuple[int, ...]
    shard: int
    length: int
    payload_bytes: int
    capsule_bytes: int
    table_digest: int
    holder: int = -1
    holder_address: str = ""
    is_copy: bool = False

    def __str__(self) -> str:
        kind = "copy of shard" if self.is_copy else "shard"
        return f"{kind} {self.shard}/{len(self.ranks)} of step {self.step} at w{self.holder}"

    @property
    def age(self) -> tuple[int, int]:
        """Rises with every seal of a buffer, although a roll-back lowers the step."""
        return self.epoch, self.step
