"""ZeRO stage 0: everything is replicated; each worker seals the part of it that is its shard.

A 16-bit model has fp32 masters in DeepSpeed's ``FP16_UnfusedOptimizer``, an fp32 model is its own
master (deepspeed/runtime/fp16/unfused_optimizer.py).
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from elaswave_plugin.adapters.deepspeed.zero import zero_state
from elaswave_plugin.core.layout.shards import ShardCut
from elaswave_plugin.tracking.state_dump import NamedPiece


class ReplicatedState(zero_state.ZeroState):
    """The whole state, cut parameter by parameter."""

    # Writing them is an exchange.
    moments_may_follow = False

    def __init__(self, engine: Any) -> None:
        self._group = engine.seq_data_parallel_group
        outer, inner = engine.optimizer, engine.basic_optimizer
        self._own = [p for group in inner.param_groups for p in group["params"]]
        params = list(self._own)
        if outer is not inner:
            params = [p for group in outer.fp16_groups for p in group]
        super().__init__(engine, inner, params)

    @property
    def _masters(self) -> list[torch.Tensor]:
        return self._own

    def lengths(self) -> tuple[int, ...]:
        """Elements of each parameter."""
        return tuple(master.numel() for master in self._masters)

    def _sizes(self) -> tuple[int, ...]:
        cut = ShardCut(buckets=self.lengths(), width=dist.get_world_size(self._group), alignment=1)
        return cut.shard_sizes

    def parts(self) -> list[torch.Tensor]:
        """This worker's share of every master and moment; short ones are filled up with zeros."""
        return [piece for whole in super().parts() for piece in self._piece(whole.reshape(-1))]

    def _piece(self, whole: torch.Tensor) -> Iterator[torch.Tensor]:
        rank, width = dist.get_rank(self._group), dist.get_world_size(self._group)
        size = -(-whole.numel() // width)
        piece = whole[rank * size : (rank + 1) * size]
        yield piece
        if piece.numel() < size:
            yield piece.new_zeros(size - piece.numel())

    def drop(self) -> None:
        """Gradients go."""
        for param in (*self.params, *self._masters):
            param.grad = None

    def recut(self) -> None:
        """Nothing is cut."""

    @torch.no_grad()
    def write_weights(self, masters: torch.Tensor) -> None:
        """Exchange the shards, so that every worker has all weights again (collective)."""
        for param, master, whole in zip(
            self.params, self._masters, self._exchanged(masters[None]), strict=True
        ):
            zero_state.write_masters(self._inner, [master], whole[0])
            param.data.copy_(master.detach())

    @torch.no_grad()
    def write_moments(self, moments: torch.Tensor) -> None:
        """Exchange the shards, so that every worker has all moments again (collective)."""
        for master, whole in zip(self._masters, self._exchanged(moments), strict=True):
            zero_state.write_moments(self._inner, [master], whole)

    def _exchanged(self, shard: torch.Tensor) -> Iterator[torch.Tensor]:
        """Gather all workers' [parts, shard_numel] to the whole [parts, numel] of each master."""
        everyone = [torch.empty_like(shard) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(everyone, shard, group=self._group)
        offset = 0
        for master, size in zip(self._masters, self._sizes(), strict=True):
            pieces = [one[:, offset : offset + size] for one in everyone]
            yield torch.cat(pieces, dim=1)[:, : master.numel()]
            offset += size

    def sync_weights(self) -> Iterator[torch.Tensor]:
        """They are whole already."""
        for param in self.params:
            yield param.detach().reshape(-1)

    def named_pieces(self) -> Iterator[NamedPiece]:
        """Every parameter whole."""
        for param, master in zip(self.params, self._masters, strict=True):
            for part, data in self.parts_of(master).items():
                yield NamedPiece(
                    name=self._engine.param_names[param],
                    part=part,
                    start=0,
                    numel=master.numel(),
                    data=data.reshape(-1),
                )
