"""The memory that a launch of Megatron-LM takes for snapshots and after a loss, by its arguments.

Counted are the weights of a GPT or BERT; what activations and libraries take is not.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elaswave_plugin.core.step.dataflow import deal

# Bytes of an element: a float32 master and both of Adam's moments.
_STATE, _MOMENTS, _FLOAT, _HALF = 12, 8, 4, 2
_GIB = 2**30
_VOCABULARY_MULTIPLE = 128
# The elements of a bucket where a launch does not say, as Megatron-Core has them.
_BUCKET = 40_000_000
# With experts and with virtual stages no sums are kept.
_KEEP_NONE = (
    "num_experts",
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
)
_PARALLEL = ("tensor", "pipeline")


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of the worker that has the most of the model, of ``workers`` in all.

    ``state``: of its optimizer, and ``state_later`` with one replica less; ``contributions``: the
    gradients that it holds apart in a step after a loss, in exact mode; ``recut``: more than that
    for the moment in which the state is cut again; ``kept``: copies of gradients in every step, so
    that their sums stand through a loss, and ``redone``: gradients beside those sums, once.
    """

    workers: int
    replicas: int
    parameters: int
    snapshots: int
    snapshots_of_node: int
    state: int
    state_later: int
    recut: int
    contributions: int
    kept: int
    redone: int

    def lines(self) -> tuple[str, ...]:
        """Return it in sentences."""
        said = [
            f"memory, counted for {self.workers} workers, {self.replicas} replicas of"
            f" {self.parameters / 1e6:,.0f} M parameters:",
            f"  snapshots: {_gib(self.snapshots)} of shared memory a worker,"
            f" {_gib(self.snapshots_of_node)} a node",
        ]
        if self.replicas == 1:
            return (*said, "  a loss: there is one replica, and layers move together")
        return (
            *said,
            f"  a loss: optimizer state of a worker {_gib(self.state)} -> {_gib(self.state_later)},"
            f" {_gib(self.recut)} more for a moment; gradients that are kept apart in a step:"
            f" {_gib(self.contributions)}",
            f"  gradient sums that stand through a loss: {_gib(self.kept)} in every step; its redo"
            f" takes {_gib(self.redone)} more, or all of the step is run again",
        )


def memory_of(arguments: Mapping[str, Any], *, workers: int, nodes: int = 1) -> Memory | str:
    """Predict the memory of a launch; where its arguments do not tell, the sentence that says so.

    ``arguments``: as `launch_files.Launch` has them.
    """
    wanted = ("num_layers", "hidden_size", "num_attention_heads", "vocab_size")
    missing = [name for name in wanted if not isinstance(arguments.get(name), int)]
    if missing or not workers:
        options = [f"--{name.replace('_', '-')}" for name in missing]
        options += [] if workers else ["the number of workers (doctor --workers N)"]
        return f"memory: not counted, since the launch does not tell {', '.join(options)}"
    tp, pp = (_number(arguments, f"{of}_model_parallel_size", 1) for of in _PARALLEL)
    replicas, rest = divmod(workers, tp * pp)
    if rest or not replicas:
        return f"memory: not counted, since {workers} workers are no multiple of TP {tp} x PP {pp}"
    parameters = max(_of_stage(arguments, stage, tp=tp, pp=pp) for stage in range(pp))
    shard = -(-parameters // replicas)
    later = -(-parameters // max(1, replicas - 1))
    copies = 1 if nodes > 1 else 0
    is_half = bool(arguments.get("bf16") or arguments.get("fp16"))
    snapshots = 2 * _STATE * shard * (1 + copies)
    keeps = replicas > 1 and not any(arguments.get(name) for name in _KEEP_NONE)
    keeps = keeps and arguments.get("elaswave_consistency", "exact") == "exact"
    return Memory(
        workers=workers,
        replicas=replicas,
        parameters=sum(_of_stage(arguments, stage, tp=1, pp=pp) for stage in range(pp)),
        snapshots=snapshots,
        snapshots_of_node=snapshots * -(-workers // nodes),
        state=shard * (_STATE if is_half else _MOMENTS),
        state_later=later * (_STATE if is_half else _MOMENTS),
        recut=shard * (_STATE if is_half else _MOMENTS),
        contributions=_contributions(arguments, parameters, replicas),
        kept=_gradient_bytes(arguments) * shard * keeps,
        redone=_gradient_bytes(arguments) * parameters * keeps,
    )


def _contributions(arguments: Mapping[str, Any], parameters: int, replicas: int) -> int:
    """Of a worker in a step after the loss of a replica, beside its own gradients.

    Two buckets are on their way at its end; with stages, a micro-batch of a lost replica has
    gradients of its own.
    """
    if replicas == 1:
        return 0
    micro = _number(arguments, "micro_batch_size", 1)
    batch = _number(arguments, "global_batch_size", micro * replicas)
    flow = deal(
        num_microbatches=max(replicas, batch // micro),
        launch_slots=range(replicas),
        live=range(1, replicas),
    )
    shipped = [
        part
        for slot in range(1, replicas)
        for part in flow.contributions(slot)
        if part != flow.in_place(slot)
    ]
    size = _gradient_bytes(arguments)
    bucket = size * _number(arguments, "ddp_bucket_size", max(_BUCKET, 1_000_000 * replicas))
    gradients, owners = parameters * size, replicas - 1
    # The sums of lost replicas, and terms that come before their turn: one of each owner.
    shares = len({part.replica for part in shipped}) + min(len(shipped), owners) - 1
    stages = any(_number(arguments, f"{of}_model_parallel_size", 1) > 1 for of in _PARALLEL)
    return gradients * shares // owners + 2 * min(bucket, gradients) + gradients * stages


def _gradient_bytes(arguments: Mapping[str, Any]) -> int:
    """Bytes of an element."""
    halves = arguments.get("fp16") and not arguments.get("accumulate_allreduce_grads_in_fp32")
    return _HALF if halves else _FLOAT


def _of_stage(arguments: Mapping[str, Any], stage: int, *, tp: int, pp: int) -> int:
    """Parameters of a worker of this stage."""
    hidden = _number(arguments, "hidden_size", 0)
    count = _number(arguments, "num_layers", 0) // pp * _of_layer(arguments, hidden, tp)
    multiple = _number(arguments, "make_vocab_size_divisible_by", _VOCABULARY_MULTIPLE) * tp
    vocabulary = -(-_number(arguments, "vocab_size", 0) // multiple) * multiple
    norm = hidden if arguments.get("normalization") == "RMSNorm" else 2 * hidden
    if stage == 0:
        count += vocabulary * hidden // tp
        if arguments.get("position_embedding_type", "learned_absolute") == "learned_absolute":
            count += _number(arguments, "max_position_embeddings", 0) * hidden
    if stage == pp - 1:
        shares = not arguments.get("untie_embeddings_and_output_weights")
        count += norm + (0 if shares and pp == 1 else vocabulary * hidden // tp)
    return count


def _of_layer(arguments: Mapping[str, Any], hidden: int, tp: int) -> int:
    heads = _number(arguments, "num_attention_heads", 1)
    channels = _number(arguments, "kv_channels", hidden // heads)
    groups = heads
    if arguments.get("group_query_attention"):
        groups = _number(arguments, "num_query_groups", 1)
    ffn = _number(arguments, "ffn_hidden_size", _usual_ffn(arguments, hidden))
    experts = _number(arguments, "num_experts", 0)
    if experts:
        ffn = _number(arguments, "moe_ffn_hidden_size", ffn)
    gates = 2 if arguments.get("swiglu") else 1
    wide = (heads + 2 * groups) * channels
    norm = hidden if arguments.get("normalization") == "RMSNorm" else 2 * hidden
    has_bias = not arguments.get("disable_bias_linear")
    expert = (gates + 1) * hidden * ffn + (gates * ffn if has_bias else 0)
    attention = hidden * wide + heads * channels * hidden
    if has_bias or arguments.get("add_qkv_bias"):
        attention += wide
    # What is cut over TP, and what every position has.
    cut = attention + max(1, experts) * expert
    whole = 2 * norm + experts * hidden + (hidden * (1 + max(1, experts)) if has_bias else 0)
    return cut // tp + whole


def _usual_ffn(arguments: Mapping[str, Any], hidden: int) -> int:
    """The width of an MLP where none is given (megatron/training/arguments.py)."""
    return int(4 * hidden * 2 / 3 / 64) * 64 if arguments.get("swiglu") else 4 * hidden


def _number(arguments: Mapping[str, Any], name: str, default: int) -> int:
    value = arguments.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def _gib(count: int) -> str:
    return f"{count / _GIB:.3g} GiB"
