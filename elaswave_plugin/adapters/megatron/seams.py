"""The patch records of an elastic Megatron-Core job, on any device."""

from collections.abc import Callable
from typing import Any

import torch

from elaswave_plugin.adapters.constructed import remembering
from elaswave_plugin.adapters.patching import PatchRecord, PatchSet
from elaswave_plugin.runtime.reduce import canonical_norm

_MEGATRON = "megatron-core"
_VALID = ">=0.16.1,<0.17"


def _only_our_groups(original: Callable[..., Any]) -> Callable[..., Any]:
    def create_group(*args: Any, backend: Any = None, **kwargs: Any) -> Any:
        # "gloo" asks for a CPU companion of the group; ours carries CPU tensors itself.
        return original(*args, backend=None if backend == "gloo" else backend, **kwargs)

    return create_group


def _canonical_norm(original: Callable[..., float]) -> Callable[..., float]:
    def get_grad_norm_fp32(
        grads_for_norm: Any, norm_type: float = 2, grad_stats_parallel_group: Any = None
    ) -> float:
        if float(norm_type) != 2.0:
            return original(grads_for_norm, norm_type, grad_stats_parallel_group)
        if isinstance(grads_for_norm, torch.Tensor):
            grads_for_norm = [grads_for_norm]
        return canonical_norm(grads_for_norm, grad_stats_parallel_group)

    return get_grad_norm_fp32


def _compact_index(original: Callable[..., Any]) -> Callable[..., Any]:
    def sharded_param_state_fully_reshardable(
        self: Any, model_sharded_state_dict: Any, is_loading: bool = False, metadata: Any = None
    ) -> Any:
        saved = [buffer.param_index_map for buffer in self.buffers]
        for buffer in self.buffers:
            lengths = [bucket.numel_unpadded for bucket in buffer.buckets]
            shifts = [
                sum(lengths[:index]) - bucket.offset for index, bucket in enumerate(buffer.buckets)
            ]
            buffer.param_index_map = {
                param: (start + shifts[bucket], stop + shifts[bucket], bucket)
                for param, (start, stop, bucket) in buffer.param_index_map.items()
            }
        try:
            return original(self, model_sharded_state_dict, is_loading, metadata)
        finally:
            for buffer, index_map in zip(self.buffers, saved, strict=True):
                buffer.param_index_map = index_map

    return sharded_param_state_fully_reshardable


def _keeping_step(original: Callable[..., None]) -> Callable[..., None]:
    def set_main_param_and_optimizer_states(self: Any, model_param: Any, tensors: Any) -> None:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        kept = {"step": state["step"]} if "step" in state else {}
        original(self, model_param, {**kept, **tensors})

    return set_main_param_and_optimizer_states


def elastic_patches(*, exact: bool) -> PatchSet:
    """What every elastic job needs, and what exact mode needs on top."""
    records = [
        PatchRecord(
            target="megatron.core.parallel_state:create_group",
            reason="its gloo groups cannot lose a member; ours are edited in place",
            distribution=_MEGATRON,
            valid=_VALID,
            parameters=(
                "ranks",
                "timeout",
                "backend",
                "pg_options",
                "use_local_synchronization",
                "group_desc",
            ),
            make=_only_our_groups,
        ),
        PatchRecord(
            target=(
                "megatron.core.optimizer.distrib_optimizer:"
                "DistributedOptimizer.sharded_param_state_fully_reshardable"
            ),
            reason=(
                "it reads state that was gathered without the padding between buckets at "
                "positions that count the padding (upstream issue 504)"
            ),
            distribution=_MEGATRON,
            valid=_VALID,
            parameters=("self", "model_sharded_state_dict", "is_loading", "metadata"),
            make=_compact_index,
        ),
        PatchRecord(
            target=(
                "megatron.core.optimizer.distrib_optimizer:"
                "DistributedOptimizer._set_main_param_and_optimizer_states"
            ),
            reason=(
                "a checkpoint that can be cut anew has no step count beside the tensors, and for "
                "torch's Adam it is looked up there"
            ),
            distribution=_MEGATRON,
            valid=_VALID,
            parameters=("self", "model_param", "tensors"),
            make=_keeping_step,
        ),
    ]
    records.append(
        PatchRecord(
            target="megatron.core.models.gpt.gpt_model:GPTModel.__init__",
            reason="a worker that changes stage runs the constructor of the same model again",
            distribution=_MEGATRON,
            valid=_VALID,
            make=remembering,
        )
    )
    if exact:
        records.append(
            PatchRecord(
                # As bound in optimizer.py, which is where the optimizers look it up.
                target="megatron.core.optimizer.optimizer:get_grad_norm_fp32",
                reason="a sum of norms of shard pieces depends on the cut, an integer sum does not",
                distribution=_MEGATRON,
                valid=_VALID,
                parameters=("grads_for_norm", "norm_type", "grad_stats_parallel_group"),
                make=_canonical_norm,
            )
        )
    return PatchSet(records)
