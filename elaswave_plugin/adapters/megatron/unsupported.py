"""Refuses what is not carried: by the table `adapters/megatron_settings.py`, and by code."""

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.dot_product_attention import DotProductAttention

from elaswave_plugin.adapters.answers import Values, refuse
from elaswave_plugin.adapters.batch_layers import batch_layers
from elaswave_plugin.adapters.growth import check_reserve
from elaswave_plugin.adapters.megatron.compat import rng
from elaswave_plugin.adapters.megatron.state import adam
from elaswave_plugin.adapters.megatron_settings import DDP, EXPERTS, MODEL, OPTIMIZER, settings
from elaswave_plugin.config import ElasticConfig
from elaswave_plugin.core.layout.reserve import grown_replicas
from elaswave_plugin.errors import ConfigurationError

# Layers that nobody has run.
_OF_MAMBA = ("MambaLayer",)


def check_supported(chunks: Sequence[Any], optimizer: Any) -> DistributedOptimizer:
    """Return the one distributed optimizer of a supported job with these model chunks.

    Raises ConfigurationError naming every unsupported setting.
    """
    problems = (one for chunk in chunks for one in _model_problems(chunk))
    refuse(dict.fromkeys(problems))
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    if len(chained) != 1 or not isinstance(chained[0], DistributedOptimizer):
        names = ", ".join(type(one).__name__ for one in chained)
        raise ConfigurationError(
            f"the optimizer is {names}, wanted one DistributedOptimizer; "
            "set use_distributed_optimizer in the DDP and optimizer configurations: write optimizer"
            ' = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=...,'
            " use_distributed_optimizer=True), [model])"
        )
    refuse(_optimizer_problems(chained[0]))
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
            "and load_state_dict(), since a redone step is scheduled again: write job.bind(model, "
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
    layers = [layer for chunk in chunks for layer in batch_layers(chunk)]
    if layers:
        return f"{layers[0]} normalises a sample by the others of its micro-batch"
    if rng.keeps_generators():
        return "the RNG tracker (te_rng_tracker) keeps generators, whose draws cannot be cut"
    return None


def _unsupported(setting: str, seen: object, wanted: object) -> str:
    return f"{setting} is {seen}, and elaswave_plugin carries {wanted}; change it to attach"


def _model_problems(model: Any) -> Iterator[str]:
    if not isinstance(model, DistributedDataParallel):
        yield _unsupported("the model", type(model).__name__, "one Megatron-Core DDP model")
        return
    ddp, config = model.ddp_config, model.config
    interleaved = config.virtual_pipeline_model_parallel_size is not None
    if interleaved and config.pipeline_model_parallel_size == 2 and not config.overlap_p2p_comm:
        # Megatron-LM's own rule: two messages between the same two workers in one batch mix up.
        yield _unsupported("overlap_p2p_comm with 2 interleaved stages", False, True)
    kinds = {type(module).__name__ for module in model.modules()}
    if config.pipeline_model_parallel_size > 1 and "T5Model" in kinds:
        # Megatron-Core itself has no stages of one.
        yield _unsupported("the number of pipeline stages of a T5Model", "more than 1", 1)
    if kinds & {*_OF_MAMBA}:
        yield _unsupported(
            "a layer", " and ".join(sorted(kinds & {*_OF_MAMBA})), "Transformer layers"
        )
    dtypes = sorted({str(buffer.param_dtype) for buffer in model.buffers})
    if len(dtypes) != 1:
        yield _unsupported("the dtype of the parameters", " and ".join(dtypes), "one dtype")
    if config.deterministic_mode and not torch.are_deterministic_algorithms_enabled():
        # It takes a gradient whose sums only torch's own switch puts in order.
        yield _unsupported(
            "deterministic_mode", True, "it with torch.use_deterministic_algorithms(True)"
        )
    yield from _setting_problems(DDP, vars(ddp))
    # Of these, a configuration need not tell what the groups are.
    sizes = {
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
    }
    yield from _setting_problems(MODEL, vars(config) | sizes)
    if config.num_moe_experts is not None:
        yield from _setting_problems(EXPERTS, vars(config))


def _setting_problems(whose: str, values: Values) -> Iterator[str]:
    """Settings of the table, of which an older version may lack those that came later."""
    for setting in settings():
        name = setting.name
        if setting.of == whose and (setting.since == "0.16" or name in values):
            reply = setting.reply(values, name)
            if reply is not None:
                yield reply.sentence


def _optimizer_problems(optimizer: DistributedOptimizer) -> Iterator[str]:
    for setting, seen, carried in adam.problems(optimizer.optimizer):
        yield _unsupported(setting, seen, carried)
    yield from _setting_problems(OPTIMIZER, vars(optimizer.config))


def check_growth(
    config: ElasticConfig,
    reserve: int,
    *,
    width: int,
    model_parallel: tuple[int, int],
    num_microbatches: int,
) -> None:
    """Raise ConfigurationError for a job that cannot have ``reserve`` workers more.

    ``width``: the data-parallel width at launch; ``model_parallel``: the sizes of tp and pp.
    """
    if not reserve:
        return
    tp, pp = model_parallel
    if reserve % tp:
        raise ConfigurationError(
            f"--reserve is {reserve}, and who joins has a place once it is a whole tensor parallel "
            f"group of {tp}: use a multiple of {tp}"
        )
    check_reserve(config, reserve, width=width, fewest=2 * tp * pp)
    if config.dataflow == "reroute":
        raise ConfigurationError(
            f"--reserve is {reserve} and dataflow is 'reroute', which has micro-batches of lost "
            "replicas only for who joins: set dataflow to auto, or leave --reserve out"
        )
    widest = width + grown_replicas(reserve, tp=tp, pp=pp)
    if widest > num_microbatches:
        most = (num_microbatches - width) * tp * pp
        raise ConfigurationError(
            f"{width} replicas and a --reserve of {reserve} workers make stages of up to {widest} "
            f"replicas for {num_microbatches} micro-batches a step; use a --reserve of at most "
            f"{most} or a larger global batch"
        )


def why_buffers_stay(model_parallel: tuple[int, int], reserve: int) -> str | None:
    """Return why forward passes may not change the model's buffers; None where they may."""
    if model_parallel != (1, 1):
        return "not with tensor or pipeline parallelism"
    return "not with --reserve" if reserve else None
