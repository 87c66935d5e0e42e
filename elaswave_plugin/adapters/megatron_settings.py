"""The settings of Megatron-Core's configurations that are not carried with every value.

Read by ``megatron/unsupported.py`` where a model is bound, and by the tables of launch scripts.
"""

from elaswave_plugin.adapters.answers import Setting, Values

DDP, MODEL, EXPERTS, OPTIMIZER = "ddp", "model", "experts", "optimizer"
_LATER = "0.17 to 0.19"
_UNTRIED = "nobody has run it with the plugin; leave it out"
# How a router may be balanced: by nothing, or by what one micro-batch tells.
_BALANCING = ("aux_loss", "none", "seq_aux_loss", "sinkhorn")


# Whose setting, its name, the values that are carried, why and what to do, and the versions that
# have it where that is not all.
_CARRIED = (
    (
        DDP,
        "use_distributed_optimizer",
        (True,),
        "the plugin seals and moves shards of its state; set it in DDP and optimizer configuration",
    ),
    (
        DDP,
        "use_megatron_fsdp",
        (False,),
        "its shards are in no snapshot; use the plain DDP of Megatron",
    ),
    (
        DDP,
        "num_distributed_optimizer_instances",
        (1,),
        "the plugin keeps copies of shards by itself; leave it at 1",
    ),
    (DDP, "nccl_ub", (False,), "its buffers are registered once, for one width; unset it"),
    (
        DDP,
        "reduce_scatter_with_fp32_accumulation",
        (False,),
        "it sums by an all-to-all of its own; use grad_reduce_in_fp32",
    ),
    (
        MODEL,
        "context_parallel_size",
        (1,),
        "sequences are not cut over workers yet; use tensor and sequence parallelism",
    ),
    (
        MODEL,
        "expert_model_parallel_size",
        (1,),
        "every worker of a replica holds all experts for now; leave it at 1",
    ),
    (
        MODEL,
        "mtp_num_layers",
        (None, 0),
        "its losses are kept beside the micro-batches; train without multi-token prediction",
    ),
    (
        MODEL,
        "cuda_graph_impl",
        ("none",),
        "a graph replays the groups and buffers of its capture; train without CUDA graphs",
    ),
    (
        MODEL,
        "delay_wgrad_compute",
        (False,),
        "contributions to gradients are complete when a backward pass is; unset it",
    ),
    (MODEL, "fp8", (None,), "amax histories and scales are in no snapshot; train in bf16"),
    (MODEL, "fp4", (None,), "its scales are in no snapshot; train in bf16"),
    (MODEL, "quant_recipe", (None,), "its scales are in no snapshot; train in bf16"),
    (MODEL, "use_kitchen", (False,), "its scales are in no snapshot; train in bf16"),
    (MODEL, "symmetric_ar_type", (None,), "its memory is registered for one group; leave it"),
    (MODEL, "cpu_offloading", (False,), "tensors on their way are lost with a step; unset it"),
    (
        MODEL,
        "fine_grained_activation_offloading",
        (False,),
        "tensors on their way are lost with a step; use recomputation",
    ),
    (MODEL, "tp_comm_overlap", (False,), "its buffers belong to one TP group for ever; unset it"),
    (
        MODEL,
        "defer_embedding_wgrad_compute",
        (False,),
        "contributions to gradients are complete when a backward pass is; unset it",
    ),
    (
        MODEL,
        "variable_seq_lengths",
        (False,),
        "pipeline stages agree on one shape of a message; pad sequences to one length",
    ),
    (
        MODEL,
        "pipeline_model_parallel_layout",
        (None,),
        "the planner deals layers evenly; use pipeline_model_parallel_size alone",
    ),
    (DDP, "param_name_patterns_for_fp32_local_accumulation", ((),), _UNTRIED, _LATER),
    (MODEL, "gtp_weight_remat_size", (1,), _UNTRIED, _LATER),
    (MODEL, "use_transformer_engine_op_fuser", (False,), _UNTRIED, _LATER),
    (MODEL, "moe_router_force_biased", (None,), _UNTRIED, _LATER),
    (MODEL, "moe_paged_stash", (False,), _UNTRIED, _LATER),
    (
        EXPERTS,
        "expert_tensor_parallel_size",
        (None,),
        "experts are cut as the other layers are; leave it out",
    ),
    (
        EXPERTS,
        "moe_token_dispatcher_type",
        ("allgather", "alltoall", "alltoall_seq"),
        "flex sends tokens by kernels of its own between ranks that it keeps; use alltoall",
    ),
    (
        EXPERTS,
        "moe_router_load_balancing_type",
        _BALANCING,
        "it averages over what replicas run at the same time; use aux_loss",
    ),
    (
        EXPERTS,
        "moe_grouped_gemm",
        (False,),
        "experts of one weight each can be cut and moved, grouped ones not yet; unset it",
    ),
    (EXPERTS, "moe_latent_size", (None,), _UNTRIED),
    (
        EXPERTS,
        "moe_shared_expert_overlap",
        (False,),
        "it runs collectives on a stream of its own, which no loss interrupts; unset it",
    ),
    (
        EXPERTS,
        "overlap_moe_expert_parallel_comm",
        (False,),
        "it interleaves micro-batches, which are dealt one by one; unset it",
    ),
    (EXPERTS, "moe_enable_routing_replay", (False,), _UNTRIED),
    (
        EXPERTS,
        "moe_router_force_load_balancing",
        (False,),
        "it draws from a stream of each rank, which no micro-batch tells; use it to measure only",
    ),
    (
        OPTIMIZER,
        "use_precision_aware_optimizer",
        (False,),
        "moments and masters are kept in float32; unset it",
    ),
    (
        OPTIMIZER,
        "optimizer_cuda_graph",
        (False,),
        "a graph replays the buffers of its capture; train without CUDA graphs",
        _LATER,
    ),
)


def has_stages(values: Values) -> bool:
    """Return whether a pipeline has more than one stage."""
    return bool(values.get("pipeline_model_parallel_size", 1) != 1)


def _cuts_experts_otherwise(values: Values) -> bool:
    width = values.get("tensor_model_parallel_size", 1)
    return bool(values["expert_tensor_parallel_size"] != width)


def _balances_otherwise(values: Values) -> bool:
    chosen = values.get("moe_router_load_balancing_type", "none")
    kinds = chosen if isinstance(chosen, list) else str(chosen).split()
    return not set(kinds) <= set(_BALANCING)


# Among which settings one matters; the others always do.
_WHERE = (
    # Without stages no message of one to the next has a shape.
    ("variable_seq_lengths", has_stages),
    ("expert_tensor_parallel_size", _cuts_experts_otherwise),
    ("moe_router_load_balancing_type", _balances_otherwise),
)


def settings() -> tuple[Setting, ...]:
    """Return the table."""
    where = dict(_WHERE)
    return tuple(
        Setting(
            of=of,
            name=name,
            carried=carried,
            says=says,
            since=since[0] if since else "0.16",
            where=where.get(name),
        )
        for of, name, carried, says, *since in _CARRIED
    )
