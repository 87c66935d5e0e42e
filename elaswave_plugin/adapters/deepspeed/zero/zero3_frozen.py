"""Weights that ZeRO-3 has cut and that are not trained: whole once a node, written once.

No step changes them, so they are in no snapshot, and the part of a lost worker is nowhere else.
Before the first step the workers gather each of them into memory that those of a node share;
after a change of the view each worker reads its new partitions there.
"""

from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from elaswave_plugin.adapters.deepspeed.zero.zero3_partitions import cut_again
from elaswave_plugin.core.layout.shards import padded_size
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.ipc.shared_memory import Place, SharedMemory
from elaswave_plugin.snapshot.free_memory import available_bytes
from elaswave_plugin.values.plain import gathered

_ALIGNMENT_BYTES = 16


class _Offer(NamedTuple):
    """The memory that a worker has, and whether all of the weights are in it."""

    place: Place
    is_whole: bool


class FrozenWeights:
    """The cut parameters of a model that are not trained; usually none."""

    def __init__(self, params: Iterable[Any]) -> None:
        self._params = list(params)
        sizes = [padded_size(_bytes_of(one), 1, _ALIGNMENT_BYTES) for one in self._params]
        *self._offsets, self._num_bytes = accumulate(sizes, initial=0)
        self._memory: SharedMemory | None = None
        self._is_whole = False

    def share(self) -> None:
        """Have this node's copy: gathered at first, and of the others' copies on a later worker.

        Collective over WORLD. Raises ConfigurationError where a node has too little memory.
        """
        if not self._params:
            return
        mine = dist.get_rank()
        if self._memory is None:
            self._memory = SharedMemory.make("frozen", self._num_bytes)
        everyone = gathered((tuple(self._memory.place), self._is_whole))
        offers = [_Offer(Place(*place), is_whole) for place, is_whole in everyone]
        rank, memory = self._choose(offers)
        writes = rank == mine and not self._is_whole
        self._check_room(writes)
        whole = [rank for rank, offer in enumerate(offers) if offer.is_whole]
        if len(whole) < len(offers):
            for place, weights in self._gathered(whole[0] if whole else None):
                if writes:
                    _view(memory, place, len(weights)).copy_(weights)
            dist.barrier()
        if rank != mine:
            self._memory.close()
        self._memory, self._is_whole = memory, True

    def _choose(self, offers: list[_Offer]) -> tuple[int, SharedMemory]:
        """Return the rank and the memory of the first of this node, one that is whole if any is."""
        assert self._memory is not None
        mine = dist.get_rank()
        if self._is_whole:
            return mine, self._memory
        for rank in sorted(range(len(offers)), key=lambda one: not offers[one].is_whole):
            found = self._memory if rank == mine else SharedMemory.find(offers[rank].place)
            if found is not None:
                return rank, found
        raise AssertionError("a worker's own memory is among those on offer")

    def _check_room(self, writes: bool) -> None:
        left = available_bytes() if writes else self._num_bytes
        least = torch.tensor([left], dtype=torch.int64)
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
        if int(least) < self._num_bytes:
            raise ConfigurationError(
                f"the weights that are not trained have {self._num_bytes} bytes, of which ZeRO-3"
                f" jobs keep one copy in the memory of each node, and a node has {int(least)} left;"
                " free memory, or use stage 2, where every worker holds them anyway"
            )

    def _gathered(self, source: int | None) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the place and all bytes of each: from a worker that has them, or from all parts."""
        for place, param in zip(self._offsets, self._params, strict=True):
            length, device = _bytes_of(param), param.ds_tensor.device
            if source is None:
                own = param.ds_tensor.detach().view(torch.uint8)
                parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
                dist.all_gather(parts, own)
                yield place, torch.cat(parts)[:length].cpu()
                continue
            weights = torch.empty(length, dtype=torch.uint8, device=device)
            if source == dist.get_rank():
                assert self._memory is not None
                weights.copy_(_view(self._memory, place, length))
            dist.broadcast(weights, src=source)
            yield place, weights.cpu()

    @torch.no_grad()
    def recut(self) -> None:
        """Cut them again over the present workers, with their values (collective over WORLD)."""
        self.share()
        cut_again(self._params)
        for place, param in zip(self._offsets, self._params, strict=True):
            part = param.ds_tensor.view(torch.uint8)
            start = dist.get_rank() * len(part)
            length = min(len(part), _bytes_of(param) - start)
            if length > 0:
                assert self._memory is not None
                part[:length].copy_(_view(self._memory, place + start, length))


def _bytes_of(param: Any) -> int:
    """Bytes of the whole parameter."""
    return int(param.ds_numel * param.ds_tensor.element_size())


def _view(memory: SharedMemory, place: int, length: int) -> torch.Tensor:
    return torch.frombuffer(memory.data, dtype=torch.uint8, offset=place, count=length)
