"""The settings of Megatron-Core's configurations that are not carried with every value.

Read by ``megatron/unsupported.py`` where a model is bound, and by the tables of launch scripts.
"""

from elaswave_plugin.adapters.answers import Setting, Values

DDP, MODEL, EXPERTS = "ddp", "model", "experts"
_LATER = "0.17 to 0.19"
_UNTRIED = "nobody has run it with the plugin; leave it out"


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
)
# Without stages no message of one to the next has a shape.
_OF_STAGES = ("variable_seq_lengths",)


def settings() -> tuple[Setting, ...]:
    """Return the table."""
    return tuple(
        Setting(
            of=of,
            name=name,
            carried=carried,
            says=says,
            since=since[0] if since else "0.16",
            where=has_stages if name in _OF_STAGES else None,
        )
        for of, name, carried, says, *since in _CARRIED
    )


def has_stages(values: Values) -> bool:
    """Return whether a pipeline has more than one stage."""
    return bool(values.get("pipeline_model_parallel_size", 1) != 1)
