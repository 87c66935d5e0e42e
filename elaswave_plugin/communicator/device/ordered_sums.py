"""Sums over a native group in rank order: copies between its members, which do the adding.

A native backend adds in an order of its own, which may be another one once a loss has changed the
group's members. These sums are those of `algorithms.py` bit for bit, in the same two ways: what is
small goes from every member to every member, what is large to the owner of each piece and back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from elaswave_plugin.communicator.device.ordered_kernel import Combine

Tensors = Sequence[torch.Tensor]

# Neither was measured on a GPU; the bits do not depend on them.
EXCHANGE_BYTES = 1 << 20
# Up to this, what arrives at one member is so little that rounds cost more than bytes.
CHUNK_BYTES = 64 << 20
# So much memory receives the terms of others, however large a tensor is.


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderedSums:
    """The sums of one member, left to right over the ranks; all members make the same calls.

    `exchange(outs, ins)`: outs[r] becomes ins[our rank] of rank r, where neither is empty.
    `combine`: adds up what has arrived; `multiply`: a product in place of a sum. `average`: divide
    by the number of members at the end.
    """

    rank: int
    size: int
    exchange: Callable[[list[torch.Tensor], list[torch.Tensor]], None]
    combine: Combine
    multiply: bool
    average: bool

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Make the tensor the sum of all members'."""
        if not tensor.numel():
            return
        flat = tensor.detach().contiguous().view(-1)
        for block in torch.split(flat, max(1, CHUNK_BYTES // flat.element_size())):
            self._all_reduce(block)
        if flat.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(flat.view(tensor.shape))

    def _all_reduce(self, block: torch.Tensor) -> None:
        if block.nbytes * (self.size - 1) <= EXCHANGE_BYTES:
            self._sum([block] * self.size, block)
            return
        parts = list(block.tensor_split(self.size))
        own = parts[self.rank]
        self._sum(parts, own)
        self.exchange(self._without_own(parts), self._without_own([own] * self.size))

    def reduce_scatter(self, out: torch.Tensor, parts: Tensors) -> None:
        """Make `out` the sum of all members' parts[our rank]; it may be the memory of one."""
        flats = [part.detach().contiguous().view(-1) for part in parts]
        into = out.detach() if out.is_contiguous() else torch.empty_like(flats[self.rank])
        into = into.view(-1)
        most = max(flat.nbytes for flat in flats) * (self.size - 1)
        count = -(-most // CHUNK_BYTES)
        if not count:
            return
        chunks = zip(*(flat.tensor_split(count) for flat in flats), strict=True)
        for chunk, space in zip(chunks, into.tensor_split(count), strict=True):
            self._sum(chunk, space)
        if into.data_ptr() != out.data_ptr():
            out.detach().copy_(into.view(out.shape))

    def _sum(self, parts: Tensors, out: torch.Tensor) -> None:
        """Make `out` the sum of all members' parts[our rank]."""
        own = parts[self.rank]
        rows = own.new_empty((self.size, own.numel()))
        self.exchange(self._without_own(rows.unbind()), self._without_own(parts))
        self.combine(rows, own, out, self.rank, self.multiply)
        if self.average:
            out.div_(self.size)

    def _without_own(self, tensors: Tensors) -> list[torch.Tensor]:
        """Return the tensors, empty at the own rank, as no member sends to itself."""
        return [t[:0] if rank == self.rank else t for rank, t in enumerate(tensors)]
