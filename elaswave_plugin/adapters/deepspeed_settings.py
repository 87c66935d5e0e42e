"""The keys of a DeepSpeed configuration that are not carried with every value.

``deepspeed/compat/unsupported.py`` obeys this table, `elaswave doctor` and docs/limits.md read it.
"""

from collections.abc import Iterator, Mapping
from typing import Any

# (path of the key, the values that are carried, what to do); without the key it is the first one.
CARRIED: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("zero_optimization.offload_optimizer.device", ("none", "cpu"), "offload to the CPU, or not"),
    ("zero_optimization.offload_optimizer.ratio", (1.0,), "offload all of the optimizer, or none"),
    ("zero_optimization.offload_optimizer.super_offload", (False,), "leave it out"),
    ("zero_optimization.offload_param.device", ("none", "cpu"), "offload to the CPU, or not"),
    ("zero_optimization.zero_hpz_partition_size", (1,), "use plain ZeRO-3, without hpZ"),
    ("zero_optimization.zero_quantized_weights", (False,), "use plain ZeRO-3, without ZeRO++"),
    ("zero_optimization.zero_quantized_gradients", (False,), "use plain ZeRO-3, without ZeRO++"),
    ("zero_optimization.zero_quantized_nontrainable_weights", (False,), "leave ZeRO++ out"),
    ("zero_optimization.zenflow", (None,), "leave ZenFlow out"),
    ("gradient_allreduce_op", ("mean",), "a sum of gradients changes with the number of workers"),
    ("managed_gradient_accumulation", (True,), "let DeepSpeed count the micro-batches"),
    ("sequence_parallel_size", (1,), "sequence parallelism is not carried"),
    ("tensor_parallel.autotp_size", (0,), "tensor parallelism is not carried"),
    ("expert_parallel.enabled", (False,), "mixtures of experts are not carried"),
    ("data_efficiency.enabled", (False,), "data efficiency changes the batch"),
    ("hybrid_engine.enabled", (False,), "the hybrid engine is not carried"),
    ("autotuning.enabled", (False,), "tune first, then train"),
    ("torch_autocast.enabled", (False,), "use bf16"),
    ("compile.deepcompile", (False,), "call engine.compile() without DeepCompile"),
    ("compile.autoep_non_moe", (False,), "mixtures of experts are not carried"),
    ("comet.enabled", (False,), "use W&B, TensorBoard or CSV, which another worker can open again"),
    ("checkpoint.use_node_local_storage", (False,), "a lost node takes its part with it"),
    ("checkpoint.writer", (None,), "let torch write checkpoints"),
    (
        "datastates_ckpt",
        (False,),
        "let torch write checkpoints: a save has ended when it returns",
    ),
    ("elaswave.dataflow", ("auto",), "every worker takes a share of each micro-batch"),
    ("elaswave.clocks", ("off",), "all workers have the same to do"),
    ("elaswave.memory_limit_gib", (None,), "shares are not planned by bytes; leave it out"),
)
IN_EXACT_MODE = 'in exact mode; else set "consistency" to "fast"'
# The same with "consistency": "exact", whose rounds and sums have a place for nothing else.
EXACT: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    (
        "zero_optimization.stage",
        (0, 1, 2),
        "in exact mode, where a lost worker's micro-batches are passed while other workers pass"
        " nothing, and a pass of stage 3 gathers weights from all of them; else set"
        ' "consistency" to "fast"',
    ),
    ("zero_optimization.offload_optimizer.device", ("none",), IN_EXACT_MODE),
    ("zero_optimization.reduce_scatter", (True,), IN_EXACT_MODE),
    ("data_types.grad_accum_dtype", (None,), IN_EXACT_MODE),
    ("prescale_gradients", (False,), IN_EXACT_MODE),
    ("gradient_predivide_factor", (1.0,), IN_EXACT_MODE),
    ("elaswave.slow_workers", ("name",), IN_EXACT_MODE),
    ("elaswave.loss", (None,), IN_EXACT_MODE),
    ("elaswave.rehearse_first_step", (None,), IN_EXACT_MODE),
)
# DeepSpeed 0.19.8 refuses them with any value (deepspeed/runtime/config.py, `_REMOVED_...`).
REMOVED = (
    *("amp", "compression_training", "curriculum_learning", "eigenvalue", "elasticity"),
    *("graph_harvesting", "nebula", "progressive_layer_drop", "quantize_training"),
    *("sparse_attention", "sparse_gradients", "zero_optimization.mics_hierarchical_params_gather"),
    *("zero_optimization.mics_shard_size", "zero_optimization.zeropp_loco_param"),
)
OPTIMIZERS = ("adam", "adamw")


def lookup(config: Mapping[str, Any], path: str, default: Any) -> Any:
    """Return the value at a dotted path of a configuration; the default where there is none."""
    value: Any = config
    for key in path.split("."):
        if not isinstance(value, Mapping):
            return default
        value = value.get(key)
        if value is None:
            return default
    return value


def problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each key that is not carried; what switches nothing on is carried."""
    rows = [*CARRIED]
    if lookup(config, "elaswave.consistency", "fast") == "exact":
        rows += EXACT
    for path, carried, advice in rows:
        seen = lookup(config, path, carried[0])
        if seen not in carried:
            wanted = " or ".join(map(repr, carried))
            yield f"{path} is {seen!r}, and elaswave_plugin carries {wanted}: {advice}"
    both = ("round_robin_gradients", "parameter_alignment")
    if all(lookup(config, f"zero_optimization.{key}", False) for key in both):
        yield (
            "zero_optimization has round_robin_gradients and parameter_alignment, and "
            "elaswave_plugin carries one of them: paddings would move with the order; set one"
        )
    for path in REMOVED:
        section, _, key = path.rpartition(".")
        if key in (lookup(config, section, {}) if section else config):
            yield f"{path} was removed from DeepSpeed, which refuses it with any value; take it out"
    optimizer = config.get("optimizer")
    if optimizer and str(optimizer.get("type", "")).lower() not in OPTIMIZERS:
        yield (
            f"optimizer.type is {optimizer.get('type')!r}, and elaswave_plugin carries Adam and "
            "AdamW; 1-bit and other optimizers keep state of another shape"
        )
