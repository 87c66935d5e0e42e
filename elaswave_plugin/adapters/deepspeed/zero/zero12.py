"""ZeRO stages 1 and 2: one flat partition of fp32 masters a parameter group.

DeepSpeed pads a group of L elements to a multiple of 2 n and cuts it into n equal partitions
(deepspeed/runtime/zero/stage_1_and_2.py, ``DeepSpeedZeroOptimizer.__init__``).
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from deepspeed.runtime.utils import all_gather_dp_groups

from elaswave_plugin.adapters.deepspeed.compat.patches import constructor_arguments
from elaswave_plugin.adapters.deepspeed.zero import zero_state
from elaswave_plugin.adapters.deepspeed.zero.zero12_round_robin import RoundRobin
from elaswave_plugin.tracking.state_dump import NamedPiece


class PartitionedState(zero_state.ZeroState):
    """The partitions of a ``DeepSpeedZeroOptimizer``."""

    def __init__(self, engine: Any) -> None:
        self._zero = engine.optimizer
        self._arguments = constructor_arguments(self._zero)
        self._groups = [list(params) for params in self._zero.bit16_groups]
        params = [param for group in self._groups for param in group]
        super().__init__(engine, self._zero.optimizer, params)
        self.alignment = self._zero.nccl_start_alignment_factor
        self._order = RoundRobin(self._zero)

    @property
    def _masters(self) -> list[torch.Tensor]:
        return self._zero.single_partition_of_fp32_groups

    def lengths(self) -> tuple[int, ...]:
        """Elements of each parameter group, with the padding between its parameters."""
        return tuple(
            sum(meta.numel() for meta in metas) + sum(padding)
            for metas, padding in zip(
                self._zero.round_robin_bit16_meta,
                self._zero.round_robin_bit16_padding,
                strict=True,
            )
        )

    def drop(self) -> None:
        """Drop gradients; ``recut`` makes half-filled buckets and counters again."""
        for param in self._engine.module.parameters():
            param.grad = None

    def recut(self) -> None:
        """Run the constructor of the same object again, with the arguments of the first time.

        The inner optimizer, its groups and everything that holds them stay the same.
        """
        optimizer, inner = self._zero, self._inner
        args, kwargs = self._arguments
        optimizer.destroy()
        inner.state.clear()
        for group, params in zip(inner.param_groups, self._groups, strict=True):
            group["params"] = list(params)
        optimizer.__dict__.clear()
        self._order.keep()
        optimizer.__init__(*args, **kwargs)
        if self._engine._support_torch_style_backward:
            optimizer.register_grad_acc_post_hook(self._engine._backward_post_hook)

    def write_weights(self, masters: torch.Tensor) -> None:
        """Install the masters; this worker's 16-bit weights follow them."""
        zero_state.write_masters(self._inner, self._masters, masters)
        for order, master in enumerate(self._masters):
            rank = torch.distributed.get_rank(self._zero.real_dp_process_group[order])
            weights = self._zero.parallel_partitioned_bit16_groups[order][rank]
            weights.data.copy_(master.detach())

    def sync_weights(self) -> Iterator[torch.Tensor]:
        """Gather every group's weights; every worker then holds all of them."""
        optimizer = self._zero
        all_gather_dp_groups(
            groups_flat=optimizer.bit16_groups_flat,
            partitioned_param_groups=optimizer.parallel_partitioned_bit16_groups,
            dp_process_group=optimizer.real_dp_process_group,
            start_alignment_factor=optimizer.nccl_start_alignment_factor,
            allgather_bucket_size=optimizer.allgather_bucket_size,
        )
        for flat, length in zip(optimizer.bit16_groups_flat, self.lengths(), strict=True):
            yield flat[:length]

    def saving(self) -> AbstractContextManager[None]:
        """Have the state in the order of DeepSpeed for the present workers."""
        return self._order.in_native_order(self.parts_of)

    def named_pieces(self) -> Iterator[NamedPiece]:
        """Yield the pieces of parameters that this worker's partitions hold."""
        for order, master in enumerate(self._masters):
            size = master.numel()
            first = torch.distributed.get_rank(self._zero.real_dp_process_group[order]) * size
            for param, offset in zip(
                self._zero.round_robin_bit16_groups[order],
                self._zero.round_robin_bit16_offsets[order],
                strict=True,
            ):
                start, stop = max(first, offset), min(first + size, offset + param.numel())
                for part, data in self.parts_of(master).items():
                    if start < stop:
                        yield NamedPiece(
                            name=self._engine.param_names[param],
                            part=part,
                            start=start - offset,
                            numel=param.numel(),
                            data=data[start - first : stop - first],
                        )
