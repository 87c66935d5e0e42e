"""State of a step that belongs to layers: the new holder of a layer fetches it from the old one."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from elaswave_plugin.errors import ElasWaveError
from elaswave_plugin.values.plain import checked, decode, encode, gathered

_WHAT = "the state of a step"


def send(value: Any, rank: int) -> None:
    """Send a plain value with host tensors in it to a rank of WORLD."""
    tensors: list[torch.Tensor] = []
    plain = torch.frombuffer(bytearray(encode(value, _WHAT, beside=tensors)), dtype=torch.uint8)
    num_bytes = sum(one.numel() * one.element_size() for one in tensors)
    dist.send(torch.tensor([len(plain), num_bytes]), rank)
    for tensor in (plain, *tensors):
        dist.send(tensor.contiguous(), rank)


def receive(rank: int) -> Any:
    """Receive what a rank of WORLD sends; raises UnreadableValueError."""
    lengths = torch.zeros(2, dtype=torch.int64)
    dist.recv(lengths, rank)
    length, beside_bytes = lengths.tolist()
    plain = torch.empty(checked(length, _WHAT), dtype=torch.uint8)
    dist.recv(plain, rank)
    tensors: list[torch.Tensor] = []
    value = decode(plain.numpy().data, _WHAT, beside=tensors, beside_bytes=beside_bytes)
    for tensor in tensors:
        dist.recv(tensor, rank)
    return value


# A part of the state, and a name in it.
Key = tuple[str, str]


class Movable(Protocol):
    """The calls that a part of the state of a step has to offer (`step_state.py`)."""

    def missing(self, kept: Any) -> Mapping[str, bool]:
        """Say of what is kept whether the worker lacks it, by name."""

    def part_of(
        self, kept: Any, names: Sequence[str], *, is_current: bool
    ) -> Mapping[str, Any]: ...

    def take_in(self, kept: Any, more: Mapping[str, Any]) -> None:
        """Take in what another worker has handed over."""


def fetch_missing(
    parts: Mapping[str, Movable], kept: Mapping[str, Any], *, is_placed: bool, is_current: bool
) -> bool:
    """Fetch, install and keep what others kept of layers that are here now; True if any did.

    ``is_current``: whether ``kept`` is of the present moment, or of the beginning of the step
    before. Collective over WORLD. Raises ElasWaveError where none is left that has it.
    """
    missing = {
        (part, name): is_needed
        for part, one in kept.items()
        if is_placed
        for name, is_needed in parts[part].missing(one).items()
    }
    anybody = torch.tensor(len(missing))
    dist.all_reduce(anybody)
    if not int(anybody):
        return False
    asked: list[dict[Key, bool]] = gathered(missing)
    found = _found(parts, kept, {key for keys in asked for key in keys}, is_current=is_current)
    holders: list[set[Key]] = gathered(set(found))
    for rank, keys in enumerate(asked):
        for giver, dealt in _dealt(keys, holders).items():
            if dist.get_rank() == giver:
                send({key: found[key] for key in dealt}, rank)
            elif dist.get_rank() == rank:
                for (part, name), value in receive(giver).items():
                    parts[part].take_in(kept[part], {name: value})
    return True


def _found(
    parts: Mapping[str, Movable], kept: Mapping[str, Any], keys: set[Key], *, is_current: bool
) -> dict[Key, Any]:
    """Those that this worker has."""
    found = {}
    for part in sorted({part for part, _ in keys} & kept.keys()):
        names = sorted(name for one, name in keys if one == part)
        here = parts[part].part_of(kept[part], names, is_current=is_current)
        found.update({(part, name): value for name, value in here.items()})
    return found


def _dealt(keys: Mapping[Key, bool], holders: Sequence[set[Key]]) -> dict[int, list[Key]]:
    """Deal each key to the first rank that has it; raises ElasWaveError if a needed one is lost."""
    dealt: dict[int, list[Key]] = {}
    for key, is_needed in keys.items():
        giver = next((rank for rank, has in enumerate(holders) if key in has), None)
        if giver is not None:
            dealt.setdefault(giver, []).append(key)
        elif is_needed:
            raise ElasWaveError(
                f"all workers with {key[1]} ({key[0]}) are lost; restart from the last checkpoint"
            )
    return dealt
