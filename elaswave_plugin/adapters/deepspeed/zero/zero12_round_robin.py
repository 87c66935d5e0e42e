"""The order of parameters with `round_robin_gradients`: the launch's in a job, its own in a file.

ZeRO 1 and 2 then deal the parameters of a group to its partitions in turn, so the order in the flat
state depends on the number of workers. A job keeps that of its launch, as its snapshots know flat
positions only. A checkpoint does not tell its order: it has the one in which as many load it.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist

# Elements that one broadcast moves at most: what a save needs beside a second copy of a partition.
_MOST = 1 << 24


class RoundRobin:
    """The orders of a ``DeepSpeedZeroOptimizer``, which the setting may have or not."""

    def __init__(self, optimizer: Any) -> None:
        self._zero = optimizer
        self._is_set = bool(optimizer.round_robin_gradients)
        self._launched = self._width

    @property
    def _width(self) -> int:
        return dist.get_world_size(self._zero.real_dp_process_group[0])

    def keep(self) -> None:
        """Have the constructor that runs next cut the order of the launch."""
        if not self._is_set:
            return
        native = type(self._zero)._round_robin_reorder
        vars(self._zero)["_round_robin_reorder"] = lambda tensors, partitions: native(
            self._zero, tensors, self._launched
        )

    @contextmanager
    def in_native_order(self, parts_of: Callable[[Any], dict[str, torch.Tensor]]) -> Iterator[None]:
        """Have DeepSpeed write what a job launched with the present workers would (collective).

        ``parts_of(master)``: the master and its moments by name.
        """
        zero = self._zero
        if not self._is_set or self._width == self._launched:
            yield
            return
        inner, masters = zero.optimizer, zero.single_partition_of_fp32_groups
        groups = zero.round_robin_bit16_groups
        state, params = inner.state, [group["params"] for group in inner.param_groups]
        native = [
            type(zero)._round_robin_reorder(zero, g, self._width)[0] for g in zero.bit16_groups
        ]
        moved: list[torch.Tensor] = []
        moved_state: dict[torch.Tensor, Any] = defaultdict(dict)
        for order, master in enumerate(masters):
            parts = {
                name: self._moved(
                    part, groups[order], native[order], zero.real_dp_process_group[order]
                )
                for name, part in parts_of(master).items()
            }
            moved.append(parts.pop("master"))
            moved_state[moved[-1]] = {**state[master], **parts}
        try:
            zero.round_robin_bit16_groups, zero.single_partition_of_fp32_groups = native, moved
            inner.state = moved_state
            for group, one in zip(inner.param_groups, moved, strict=True):
                group["params"] = [one]
            yield
        finally:
            zero.round_robin_bit16_groups, zero.single_partition_of_fp32_groups = groups, masters
            inner.state = state
            for group, one in zip(inner.param_groups, params, strict=True):
                group["params"] = one

    def _moved(
        self, part: torch.Tensor, old: list[Any], new: list[Any], group: Any
    ) -> torch.Tensor:
        """Return this worker's partition of the same state with its parameters in another order."""
        rank, size = dist.get_rank(group), part.numel()
        mine = torch.zeros_like(part)
        starts = dict(zip(map(id, old), _starts(old), strict=True))
        for param, target in zip(new, _starts(new), strict=True):
            done = 0
            while done < param.numel():
                owner, place = divmod(starts[id(param)] + done, size)
                length = min(param.numel() - done, size - place, _MOST)
                if owner == rank:
                    piece = part[place : place + length].contiguous()
                else:
                    piece = torch.empty(length, dtype=part.dtype, device=part.device)
                dist.broadcast(piece, src=dist.get_global_rank(group, owner), group=group)
                begin = target + done - rank * size
                first, last = max(begin, 0), min(begin + length, size)
                if first < last:
                    mine[first:last] = piece[first - begin : last - begin]
                done += length
        return mine


def _starts(params: list[Any]) -> list[int]:
    """Return the flat position of each parameter."""
    return [0, *accumulate(param.numel() for param in params)][:-1]
