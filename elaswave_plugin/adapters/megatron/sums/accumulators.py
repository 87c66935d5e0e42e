"""Gradient buffers apart from each other for contributions that a pipeline runs interleaved.

A worker that runs several contributions of ``core/step/sum_order.py`` adds each one's gradients by
itself. Only views change hands: ``main_grad`` of every parameter and ``grad_data`` of every bucket.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel

# Not a contribution: of gradients that nobody adds up.
ASIDE = -1


class GradAccumulators:
    """The native gradient buffers of all chunks, and as many more as contributions overlap."""

    def __init__(
        self,
        chunks: Sequence[DistributedDataParallel],
        *,
        in_place: int | None,
        await_sent: Callable[[], None],
        kept: int | None = None,
        spare: list[torch.Tensor] | None = None,
    ) -> None:
        """``in_place``: the contribution whose gradients stay in the native buffers, if one does.

        ``await_sent`` returns once released buffers may be written again; ``kept``: the
        contribution of which the native buffers have a part already; ``spare``: memory like them.
        """
        self._buffers = [buffer for chunk in chunks for buffer in chunk.buffers]
        self._home = [buffer.grad_data for buffer in self._buffers]
        self._in_place, self._await_sent = in_place, await_sent
        self._of: dict[int, list[torch.Tensor]] = {} if kept is None else {kept: self._home}
        self._spare: list[list[torch.Tensor]] = [] if spare is None else [spare]

    def select(self, contribution: int) -> None:
        """Accumulate into the buffers of a contribution (by its first micro-batch) from now on."""
        if contribution not in self._of:
            fresh = self._native() if contribution == self._in_place else self._taken()
            for flat in fresh:
                flat.zero_()
            self._of[contribution] = fresh
        self._point(self._of[contribution])

    def release(self, contribution: int) -> None:
        """The gradients of a contribution are on their way: its buffers may be used after that."""
        self._spare.append(self._of.pop(contribution))

    def _native(self) -> list[torch.Tensor]:
        others = [one for one in self._spare if one is not self._home]
        if len(others) < len(self._spare):
            self._await_sent()
        self._spare = others
        return self._home

    def _taken(self) -> list[torch.Tensor]:
        if not self._spare:
            return [torch.empty_like(home) for home in self._home]
        self._await_sent()
        return self._spare.pop()

    def _point(self, flats: list[torch.Tensor]) -> None:
        for buffer, flat in zip(self._buffers, flats, strict=True):
            if buffer.grad_data is flat:
                continue
            buffer.grad_data = flat
            for bucket in buffer.buckets:
                stop = bucket.offset + bucket.grad_data.numel()
                bucket.grad_data = flat[bucket.offset : stop]
            for param, (start, stop, _) in buffer.param_index_map.items():
                param.main_grad = flat[start:stop].view(param.shape)

    def __enter__(self) -> "GradAccumulators":
        return self

    def __exit__(self, *error: Any) -> None:
        """Point everything back at the native buffers, which may be offloaded where it is there."""
        self._of.clear()
        self._spare.clear()
        self._point(self._home)
