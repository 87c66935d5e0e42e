"""The distributed optimizer's shard as three flat tensors, re-cut in place for a new width.

Nobody but the optimizer holds moments and 16-bit models' masters: a script may offload them.

The outer optimizer object, the inner torch optimizer and its parameter groups keep their identity,
so that schedulers and scalers which hold them stay valid (megatron/core/optimizer/
distrib_optimizer.py, ``DistributedOptimizer.__init__`` from "Model grad buffer ranges").
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.param_and_grad_buffer import partition_buckets
from megatron.core.optimizer import _get_param_groups, get_standard_config_overrides
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from elaswave_plugin.adapters.megatron.state import adam
from elaswave_plugin.adapters.megatron.state.whole_state import MASTER
from elaswave_plugin.core.layout.shards import MOMENTS, padded_size
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.values.untouched import untouched_zeros


class FlatShard:
    """The state of one worker's shard: masters, exp_avg, exp_avg_sq in bucket order."""

    def __init__(self, optimizer: DistributedOptimizer, config_overrides: Any = None) -> None:
        """Remember which parameters form which group; collective over WORLD.

        ``config_overrides``: what the optimizer was made with. Raises ConfigurationError when the
        groups are others than Megatron-Core makes of them.
        """
        self._optimizer = optimizer
        self._sizes: list[int] = []
        # Masters of a model in float32, by bucket: these lie in its buffers, which keep what stays.
        self._in_buffers: tuple[torch.Tensor, ...] = ()
        # Of each parameter of which this worker has a piece: its master, and where that is.
        self._pieces: list[tuple[torch.Tensor, slice]] = []
        if config_overrides is None:
            config_overrides = get_standard_config_overrides(optimizer.config)
        groups = _get_param_groups(optimizer.model_chunks, optimizer.config, config_overrides)
        dense = [group for group in groups if not group["is_expert_parallel"]]
        self.groups = [list(group["params"]) for group in dense]
        """Those that are trained, by the group of the optimizer that has them."""
        index_of = {p: index for index, params in enumerate(self.groups) for p in params}
        kinds = {(kind, index_of[param]) for kind, param in _kinds(optimizer.model_chunks)}
        self.group_of = dict(kinds)
        # By kind of parameter, also of other stages where the job tells. Layers that differ in
        # their groups cannot stand in for each other.
        self.layers_are_alike = len(self.group_of) == len(kinds)
        owned = optimizer.model_param_group_index_map
        if len(dense) != len(optimizer.optimizer.param_groups) or any(
            index_of[param] != index for param, (index, _) in owned.items()
        ):
            raise ConfigurationError(
                "the optimizer was made with config_overrides that change its parameter groups; "
                "wanted the default groups; remove config_overrides"
            )

    def regroup(self) -> None:
        """Layers have come or gone: new parameters are in the groups of those they are like."""
        self.groups = [[] for _ in self.groups]
        for kind, param in _kinds(self._optimizer.model_chunks):
            self.groups[self.group_of[kind]].append(param)

    def recut(self, in_place: Mapping[int, int] | None = None) -> None:
        """Cut the state again by the groups' present size; values are undefined until written.

        ``in_place``: the buckets whose shards stay, and which ones they were; what is written
        until the next cut leaves them alone.
        """
        outer, inner = self._optimizer, self._optimizer.optimizer
        kept = self._copied(in_place) if in_place else {}
        self._release()
        # Names the shards of a checkpoint: the place among those that share no state.
        outer.data_parallel_group_idx = parallel_state.get_model_parallel_group().rank()
        for group, params in zip(inner.param_groups, self.groups, strict=True):
            group["params"] = params
        dtypes = [(buffer.param_dtype, buffer.grad_dtype) for buffer in outer.buffers]
        outer.per_bucket_numel = [
            {dtype: [bucket.grad_data.numel() for bucket in buffer.buckets]}
            for dtype, buffer in zip(dtypes, outer.buffers, strict=True)
        ]
        # The optimizer partitions the buckets a second time, into bucket groups of its own.
        outer.per_model_bucket_groups = {
            index: partition_buckets(buffers) for index, buffers in outer.per_model_buffers.items()
        }
        outer.gbuf_ranges = [outer._build_gbuf_range_map(buffer) for buffer in outer.buffers]
        outer.model_param_gbuf_map = outer._build_model_param_gbuf_map(outer.gbuf_ranges)
        outer.model_param_group_index_map, outer.opt_group_ranges = (
            outer._build_optimizer_group_ranges(inner.param_groups, outer.gbuf_ranges)
        )
        (
            outer.model_float16_groups,
            outer.model_fp32_groups,
            outer.shard_float16_groups,
            outer.shard_fp32_groups,
            outer.shard_fp32_from_float16_groups,
        ) = outer._build_model_and_main_param_groups(
            outer.gbuf_ranges, outer.model_param_gbuf_map, outer.opt_group_ranges, outer.config
        )
        inner.param_groups = [group["orig_group"] for group in outer.opt_group_ranges]
        adam.fit_groups(inner)
        self._flatten()
        self._in_place = dict(in_place or {})
        own = self._own() if kept else []
        for bucket, parts in kept.items():
            for part, was in zip(own, parts, strict=True):
                part[bucket].copy_(was)

    def _copied(self, shards: Mapping[int, int]) -> dict[int, list[torch.Tensor]]:
        own = self._own()
        return {bucket: [part[old].clone() for part in own] for bucket, old in shards.items()}

    def _release(self) -> None:
        """Let go of the state, so that the old and the new one are never there at once."""
        self._in_buffers, self._pieces = (), []
        self._optimizer.optimizer.state.clear()
        self._optimizer.shard_fp32_from_float16_groups = []
        params: list[Any] = self.params
        for param in params:
            if param.dtype != torch.float32:
                # A piece that this worker no longer owns has no main param, as in __init__.
                param.main_param = None

    def _flatten(self) -> None:
        """Re-point optimizer state (and 16-bit models' masters) to views of flat tensors."""
        outer, inner = self._optimizer, self._optimizer.optimizer
        width = outer.data_parallel_group.size()
        self._sizes = sizes = [
            padded_size(bucket.numel_unpadded, width) // width
            for buffer in outer.buffers
            for bucket in buffer.buckets
        ]
        masters, starts = self._master_slices(sizes), [*accumulate(sizes, initial=0)]
        for param, number, span in self._places():
            main = self.main_of(param)
            if main.untyped_storage().data_ptr() != param.untyped_storage().data_ptr():
                flat_master = masters[number][span]
                flat_master.copy_(main)
                main.data = flat_master
            start = starts[number]
            self._pieces.append((main, slice(start + span.start, start + span.stop)))
        if not self._is_16_bit:
            self._in_buffers = masters
        del masters
        # Only now, since the masters were there twice until here.
        moments = {name: self._zeros() for name in MOMENTS}
        for main, span in self._pieces:
            views = {name: moment[span] for name, moment in moments.items()}
            inner.state[main] = adam.fresh_state(inner, views)

    def _zeros(self) -> torch.Tensor:
        device = self._optimizer.buffers[0].param_data.device
        return untouched_zeros(self.numel, device=device)

    @property
    def numel(self) -> int:
        """Elements of one part of the shard."""
        return sum(self._sizes)

    def _part_of(self, main: torch.Tensor, part: str) -> torch.Tensor:
        if part == MASTER:
            return main.detach()
        moment: torch.Tensor = self._optimizer.optimizer.state[main][part]
        return moment

    def _is_together(self, part: str) -> bool:
        """Return whether the pieces of a part are views of one flat tensor of the device."""
        if not self._pieces:
            return False
        storage = self._part_of(self._pieces[0][0], part).untyped_storage()
        start, size = storage.data_ptr(), torch.float32.itemsize
        is_whole = storage.nbytes() == size * self.numel
        is_here = storage.device == self._optimizer.buffers[0].param_data.device
        return (
            is_whole
            and is_here
            and all(
                (one.data_ptr(), one.dtype) == (start + size * span.start, torch.float32)
                for one, span in ((self._part_of(main, part), span) for main, span in self._pieces)
            )
        )

    @property
    def are_masters_elsewhere(self) -> bool:
        """True while the script has moved masters, as to the host; those that are apart."""
        return bool(self._pieces) and self._is_16_bit and not self._is_together(MASTER)

    @torch.no_grad()
    def _flat(self, part: str) -> torch.Tensor:
        """The flat tensor of a part; another one where the script has moved its pieces."""
        if self._is_together(part):
            storage = self._part_of(self._pieces[0][0], part).untyped_storage()
            return torch.empty(0, device=storage.device).set_(storage)
        flat = self._zeros()
        for main, span in self._pieces:
            flat[span].copy_(self._part_of(main, part).view(-1))
            if part == MASTER:
                main.data = flat[span]
            else:
                self._optimizer.optimizer.state[main][part] = flat[span]
        return flat

    def _own(self) -> list[tuple[torch.Tensor, ...]]:
        """Moments, and masters that are apart, by bucket."""
        parts = (*MOMENTS, *([MASTER] if self._is_16_bit else []))
        return [self._flat(part).split(self._sizes) for part in parts]

    @property
    def _masters(self) -> tuple[torch.Tensor, ...]:
        """By bucket."""
        return self._flat(MASTER).split(self._sizes) if self._is_16_bit else self._in_buffers

    def _places(self) -> Iterator[tuple[torch.nn.Parameter, int, slice]]:
        """Yield the parameters of which this worker has a piece: number and part of its bucket."""
        outer = self._optimizer
        first_bucket = [
            sum(len(buffer.buckets) for buffer in outer.buffers[:index])
            for index in range(len(outer.buffers))
        ]
        for param, (buffer, dtype, bucket) in outer.model_param_gbuf_map.items():
            local = outer.gbuf_ranges[buffer][dtype][bucket]["param_map"][param]["gbuf_local"]
            yield param, first_bucket[buffer] + bucket, slice(local.start, local.end)

    def adopt(self) -> int:
        """Take over what a checkpoint loaded into the optimizer; returns Adam's step count.

        0 where this worker owns no parameter, and where nothing was loaded.
        """
        inner = self._optimizer.optimizer
        for main, _ in self._pieces:
            state = inner.state[main]
            if "step" in state:
                # Loading gives all of them one tensor, which each update would count on.
                state["step"] = state["step"].clone()
        return adam.applied_steps(inner)

    @property
    def params(self) -> list[torch.nn.Parameter]:
        """All that are trained, in an order that workers of a stage share."""
        return [param for params in self.groups for param in params]

    @property
    def masters_apart(self) -> list[torch.Tensor]:
        """The masters of 16-bit weights; those of other weights are the weights."""
        return [master.detach() for master in self._masters] if self._is_16_bit else []

    @property
    def _is_16_bit(self) -> bool:
        return any(buffer.param_dtype != torch.float32 for buffer in self._optimizer.buffers)

    def _master_slices(self, sizes: list[int]) -> tuple[torch.Tensor, ...]:
        """By bucket; fp32 models keep their masters in the parameter buffer, others elsewhere."""
        outer = self._optimizer
        if self._is_16_bit:
            device = outer.buffers[0].param_data.device
            return torch.zeros(sum(sizes), dtype=torch.float32, device=device).split(sizes)
        rank = outer.data_parallel_group.rank()
        buckets = [bucket for buffer in outer.buffers for bucket in buffer.buckets]
        return tuple(
            bucket.param_data[rank * size : (rank + 1) * size]
            for bucket, size in zip(buckets, sizes, strict=True)
        )

    def owns(self, param: torch.nn.Parameter) -> bool:
        """Return whether this worker updates a piece of ``param``."""
        return param in self._optimizer.model_param_group_index_map

    def main_of(self, param: torch.nn.Parameter) -> torch.Tensor:
        """The fp32 piece of ``param`` that this worker updates."""
        group, order = self._optimizer.model_param_group_index_map[param]
        return self._optimizer.optimizer.param_groups[group]["params"][order]

    @property
    def moments(self) -> list[torch.Tensor]:
        """The pieces of both moments, wherever they are, without copying."""
        return [self._part_of(main, name) for name in MOMENTS for main, _ in self._pieces]

    def parts(self) -> list[torch.Tensor]:
        """The flat state in the order of ``core/layout/shards.py``, without copying."""
        return [*(master.detach() for master in self._masters), *map(self._flat, MOMENTS)]

    @torch.no_grad()
    def write_weights(self, masters: torch.Tensor) -> None:
        """Install masters of shape [shard_numel]; 16-bit weights follow them."""
        self._write([master.detach() for master in self._masters], masters)
        self._optimizer._copy_main_params_to_model_params()

    def write_moments(self, moments: torch.Tensor) -> None:
        """Install exp_avg and exp_avg_sq of shape [2, shard_numel]."""
        for name, values in zip(MOMENTS, moments, strict=True):
            self._write(self._flat(name).split(self._sizes), values)

    def _write(self, part: Sequence[torch.Tensor], values: torch.Tensor) -> None:
        """Install one part of the shard, by bucket, except what is in place."""
        shards = values.split([shard.numel() for shard in part])
        for number, (shard, new) in enumerate(zip(part, shards, strict=True)):
            if number not in self._in_place:
                shard.copy_(new)

    def set_applied_steps(self, count: int) -> None:
        """Set Adam's step count of every piece."""
        adam.set_applied_steps(self._optimizer.optimizer, count)


def _kinds(
    chunks: Sequence[DistributedDataParallel],
) -> list[tuple[str, torch.nn.Parameter]]:
    """The trained parameters by their name, which leaves out the layer's number."""
    return [
        (re.sub(r"\blayers\.\d+\.", "layers.", name), param)
        for chunk in chunks
        for name, param in chunk.named_parameters()
        if param.requires_grad
    ]
