"""The patch records of an elastic Megatron-Core job, on any device."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from elaswave_plugin.adapters.constructed import remember, remembering
from elaswave_plugin.adapters.grad_norm import canonical_norm
from elaswave_plugin.adapters.megatron.compat import own_ranges
from elaswave_plugin.adapters.megatron.compat.versions import record
from elaswave_plugin.adapters.megatron.compat.whole_saves import WholeSaves
from elaswave_plugin.adapters.patching import Hook, PatchRecord, PatchSet
from elaswave_plugin.around import around


def _only_our_groups(
    native: Callable[..., Any], *args: Any, backend: Any = None, **kwargs: Any
) -> Any:
    # "gloo" asks for a CPU companion of the group; ours carries CPU tensors itself.
    return native(*args, backend=None if backend == "gloo" else backend, **kwargs)


def _canonical_norm(
    native: Callable[..., float],
    grads_for_norm: Any,
    norm_type: float = 2,
    grad_stats_parallel_group: Any = None,
) -> float:
    if float(norm_type) != 2.0:
        return native(grads_for_norm, norm_type, grad_stats_parallel_group)
    if isinstance(grads_for_norm, torch.Tensor):
        grads_for_norm = [grads_for_norm]
    return canonical_norm(grads_for_norm, grad_stats_parallel_group)


def _keeping_step(
    native: Callable[..., None], optimizer: Any, model_param: Any, tensors: Any
) -> None:
    group, order = optimizer.model_param_group_index_map[model_param]
    state = optimizer.optimizer.state[optimizer.optimizer.param_groups[group]["params"][order]]
    native(optimizer, model_param, _with_step(state, tensors))


def _with_step(state: dict[str, Any], loaded: dict[str, Any]) -> dict[str, Any]:
    """Return a parameter's loaded state, with the present step count where the state has one."""
    return {"step": state["step"], **loaded} if "step" in state else loaded


def elastic_patches(*, exact: bool, saves: WholeSaves | None = None) -> PatchSet:
    """Return the patches that every elastic job needs, and those that exact mode adds.

    ``saves`` is told of the job's loop later on.
    """
    saves = saves or WholeSaves()
    records = [_group_record(), *_checkpoint_records(), *saves.records(), *_model_records()]
    return PatchSet([*records, _norm_record()] if exact else records)


def _group_record() -> PatchRecord:
    return record(
        "megatron.core.parallel_state:create_group",
        around(_only_our_groups),
        "its gloo groups cannot lose a member; ours are edited in place",
        *("ranks", "timeout", "backend", "pg_options", "use_local_synchronization", "group_desc"),
        hook=Hook(
            "megatron.core.parallel_state:new_group_hook",
            lambda create_group: partial(_only_our_groups, torch.distributed.new_group),
        ),
    )


def _checkpoint_records() -> list[PatchRecord]:
    module = "megatron.core.optimizer.distrib_optimizer"
    return [
        *own_ranges.records(),
        record(
            f"{module}:DistributedOptimizer._set_main_param_and_optimizer_states",
            around(_keeping_step),
            "a checkpoint that can be cut again has no step count beside the tensors, and for "
            "torch's Adam it is looked up there",
            *("self", "model_param", "tensors"),
            hook=Hook(f"{module}:loaded_state_hook", lambda method: _with_step),
        ),
    ]


def _model_records() -> list[PatchRecord]:
    return [
        record(
            f"megatron.core.models.{module}:{model}.__init__",
            remembering,
            "a worker that changes stage runs the constructor of the same model again",
            hook=Hook(f"megatron.core.models.{module}:constructed_hook", lambda made: remember),
        )
        for module, model in (("gpt.gpt_model", "GPTModel"), ("bert.bert_model", "BertModel"))
    ]


def _norm_record() -> PatchRecord:
    return record(
        # As bound in optimizer.py, which is where the optimizers look it up.
        "megatron.core.optimizer.optimizer:get_grad_norm_fp32",
        around(_canonical_norm),
        "a sum of norms of shard pieces depends on the cut, an integer sum does not",
        *("grads_for_norm", "norm_type", "grad_stats_parallel_group"),
        hook=Hook("megatron.core.optimizer.clip_grads:l2_norm_hook", lambda norm: canonical_norm),
    )
