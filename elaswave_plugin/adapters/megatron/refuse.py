"""What this adapter does not carry, refused by name before anything is changed."""

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.dot_product_attention import DotProductAttention

from elaswave_plugin.adapters.megatron import adam, rng
from elaswave_plugin.errors import ConfigurationError

# How a router may be balanced: by nothing, or by what one micro-batch tells.
_BALANCING = ("none", "aux_loss", "seq_aux_loss", "sinkhorn")


def check_supported(
    chunks: Sequence[Any], optimizer: Any, *, overlaps_param_gather: bool = False
) -> DistributedOptimizer:
    """Return the one distributed optimizer of a supported job with these model chunks.

    ``overlaps_param_gather``: whether the loop may gather weights in the forward pass.
    Raises ConfigurationError naming the first unsupported setting.
    """
    for chunk in chunks:
        for problem in _model_problems(chunk, overlaps_param_gather):
            raise ConfigurationError(problem)
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    if len(chained) != 1 or not isinstance(chained[0], DistributedOptimizer):
        names = ", ".join(type(one).__name__ for one in chained)
        raise ConfigurationError(
            f"the optimizer is {names}, wanted one DistributedOptimizer; "
            "set use_distributed_optimizer in the DDP and optimizer configurations: write optimizer"
            ' = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=...,'
            " use_distributed_optimizer=True), [model])"
        )
    for problem in _optimizer_problems(chained[0]):
        raise ConfigurationError(problem)
    only: DistributedOptimizer = chained[0]
    if [*map(id, only.model_chunks)] != [*map(id, chunks)]:
        raise ConfigurationError(
            "the optimizer was made for another model than the one that it is bound with: write "
            "optimizer = get_megatron_optimizer(config, [model]) with this model"
        )
    return only


def check_loop(scheduler: Any, train_iters: Any) -> None:
    """Raise ConfigurationError for a schedule without a state, or no number of steps."""
    named = ("state_dict", "load_state_dict")
    if scheduler is not None and not all(hasattr(scheduler, name) for name in named):
        raise ConfigurationError(
            f"job.bind got {type(scheduler).__name__} as scheduler, wanted one with state_dict() "
            "and load_state_dict(), since a redone step is scheduled anew: write job.bind(model, "
            "optimizer, scheduler, train_iters=...)"
        )
    if isinstance(train_iters, bool) or not isinstance(train_iters, int) or train_iters < 1:
        raise ConfigurationError(
            f"job.bind got train_iters={train_iters!r}, wanted the number of steps, at least 1"
        )


def check_grid(config: Any) -> None:
    """Raise ConfigurationError for what tensor and pipeline parallel jobs do not carry.

    Without stages a loop may finalize its gradients itself, and has no function here.
    """
    finalize = config.finalize_model_grads_func
    if finalize is None and config.pipeline_model_parallel_size == 1:
        return
    takes = () if finalize is None else inspect.signature(finalize).parameters
    if "pg_collection" not in takes:
        name = getattr(finalize, "__name__", repr(finalize))
        raise ConfigurationError(
            _unsupported("finalize_model_grads_func", name, "Megatron-Core's finalize_model_grads")
        )


def why_whole_pieces(chunks: Sequence[DistributedDataParallel]) -> str | None:
    """The reason why micro-batches cannot be cut into sample intervals; None where they can."""
    config = chunks[0].config
    if config.num_moe_experts is not None:
        return "the routers of a mixture of experts balance the tokens of a micro-batch"
    if not config.calculate_per_token_loss:
        return (
            "without calculate_per_token_loss a micro-batch counts as one, which its samples alone"
            " do not tell"
        )
    if config.hidden_dropout and config.bias_dropout_fusion:
        return "bias_dropout_fusion compiles the dropout in, whose draws have to be cut as well"
    modules = (module for chunk in chunks for module in chunk.modules())
    cores = (one.core_attention for one in modules if isinstance(one, Attention))
    names = {type(core).__name__ for core in cores if not isinstance(core, DotProductAttention)}
    if config.attention_dropout and names:
        return f"{' and '.join(sorted(names))} draws its attention_dropout by itself"
    if rng.keeps_generators():
        return "the RNG tracker (te_rng_tracker) keeps generators, whose draws cannot be cut"
    return None


def _unsupported(setting: str, seen: object, wanted: object) -> str:
    return f"{setting} is {seen}, and elaswave_plugin carries {wanted}; change it to attach"


def _model_problems(model: Any, overlaps_param_gather: bool) -> Iterator[str]:
    if not isinstance(model, DistributedDataParallel):
        yield _unsupported("the model", type(model).__name__, "one Megatron-Core DDP model")
        return
    sizes = {
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
    }
    for setting, size in sizes.items():
        if size != 1:
            yield _unsupported(setting, size, 1)
    ddp, config = model.ddp_config, model.config
    interleaved = config.virtual_pipeline_model_parallel_size is not None
    if interleaved and config.pipeline_model_parallel_size == 2 and not config.overlap_p2p_comm:
        # Megatron-LM's own rule: two messages between the same two workers in one batch mix up.
        yield _unsupported("overlap_p2p_comm with 2 interleaved stages", False, True)
    dtypes = sorted({str(buffer.param_dtype) for buffer in model.buffers})
    if len(dtypes) != 1:
        yield _unsupported("the dtype of the parameters", " and ".join(dtypes), "one dtype")
    wanted: list[tuple[str, object, object]] = [
        ("use_distributed_optimizer", ddp.use_distributed_optimizer, True),
        ("use_megatron_fsdp", ddp.use_megatron_fsdp, False),
        ("num_distributed_optimizer_instances", ddp.num_distributed_optimizer_instances, 1),
        ("average_in_collective", ddp.average_in_collective, False),
        (
            "overlap_param_gather",
            ddp.overlap_param_gather,
            ddp.overlap_param_gather and overlaps_param_gather,
        ),
        ("nccl_ub", ddp.nccl_ub, False),
        (
            "reduce_scatter_with_fp32_accumulation",
            ddp.reduce_scatter_with_fp32_accumulation,
            False,
        ),
        ("mtp_num_layers", config.mtp_num_layers, None),
        ("cuda_graph_impl", config.cuda_graph_impl, "none"),
        ("delay_wgrad_compute", config.delay_wgrad_compute, False),
        ("fp8", config.fp8, None),
        ("fp4", config.fp4, None),
        ("quant_recipe", config.quant_recipe, None),
        ("use_kitchen", config.use_kitchen, False),
        ("symmetric_ar_type", config.symmetric_ar_type, None),
        ("cpu_offloading", config.cpu_offloading, False),
        ("tp_comm_overlap", config.tp_comm_overlap, False),
        ("defer_embedding_wgrad_compute", config.defer_embedding_wgrad_compute, False),
        ("variable_seq_lengths", config.variable_seq_lengths, False),
        ("pipeline_model_parallel_layout", config.pipeline_model_parallel_layout, None),
    ]
    if config.deterministic_mode and not torch.are_deterministic_algorithms_enabled():
        # It takes a gradient whose sums only torch's own switch puts in order.
        yield _unsupported(
            "deterministic_mode", True, "it with torch.use_deterministic_algorithms(True)"
        )
    for setting, seen, carried in (*wanted, *_later_settings(model)):
        if seen != carried:
            yield _unsupported(setting, seen, carried)
    if config.num_moe_experts is not None:
        yield from _expert_problems(config)


def _expert_problems(config: Any) -> Iterator[str]:
    """Of a mixture of experts: whatever is not a function of one micro-batch, or was never run."""
    chosen = config.moe_router_load_balancing_type
    for kind in chosen if isinstance(chosen, list) else [chosen]:
        # The other kinds average over what the replicas happen to run at the same time.
        if kind not in _BALANCING:
            yield _unsupported("moe_router_load_balancing_type", kind, " and ".join(_BALANCING))
    wanted: list[tuple[str, object, object]] = [
        (
            "expert_tensor_parallel_size",
            config.expert_tensor_parallel_size,
            config.tensor_model_parallel_size,
        ),
        # It sends tokens by kernels of its own, between ranks that it keeps.
        ("moe_token_dispatcher_type flex", config.moe_token_dispatcher_type == "flex", False),
        ("moe_grouped_gemm", config.moe_grouped_gemm, False),
        ("moe_latent_size", config.moe_latent_size, None),
        ("moe_shared_expert_overlap", config.moe_shared_expert_overlap, False),
        ("overlap_moe_expert_parallel_comm", config.overlap_moe_expert_parallel_comm, False),
        ("moe_enable_routing_replay", config.moe_enable_routing_replay, False),
        # Its draws are from a stream of each rank, which no micro-batch tells.
        ("moe_router_force_load_balancing", config.moe_router_force_load_balancing, False),
    ]
    for setting, seen, carried in wanted:
        if seen != carried:
            yield _unsupported(setting, seen, carried)


def _later_settings(model: DistributedDataParallel) -> Iterator[tuple[str, object, object]]:
    """Settings that came with 0.17 to 0.19, where they are there: name, seen, carried."""
    accumulated = "param_name_patterns_for_fp32_local_accumulation"
    for owner, name, carried in (
        (model.ddp_config, accumulated, ()),
        (model.config, "gtp_weight_remat_size", 1),
        (model.config, "use_transformer_engine_op_fuser", False),
        (model.config, "moe_router_force_biased", None),
        (model.config, "moe_paged_stash", False),
    ):
        if hasattr(owner, name):
            yield name, getattr(owner, name), carried


def _optimizer_problems(optimizer: DistributedOptimizer) -> Iterator[str]:
    for setting, seen, carried in adam.problems(optimizer.optimizer):
        yield _unsupported(setting, seen, carried)
    for name in ("use_precision_aware_optimizer", "optimizer_cuda_graph"):
        # The second is there from 0.17 on.
        if getattr(optimizer.config, name, False):
            yield _unsupported(name, True, False)
