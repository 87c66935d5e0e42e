"""Refuses by name what this adapter does not carry, before anything is built or changed."""

from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.tensor_parallel import init_utils
from deepspeed.runtime.zero.config import get_zero_config
from pydantic import ValidationError

from elaswave_plugin.adapters.answers import refuse
from elaswave_plugin.adapters.deepspeed_settings import lookup, problems
from elaswave_plugin.errors import ConfigurationError

_ADAMS = (torch.optim.Adam, torch.optim.AdamW, FusedAdam, DeepSpeedCPUAdam)


def check_shares(reserve: int, *, width: int, num_samples: int) -> None:
    """Raise ConfigurationError where ``reserve`` workers more than ``width`` have too little to do.

    ``num_samples``: those of the smallest iteration of an epoch.
    """
    if width + reserve > num_samples:
        raise ConfigurationError(
            f"{width} workers and a --reserve of {reserve} share iterations of which the smallest "
            f"of an epoch has {num_samples} samples, wanted one for each worker; use a --reserve of"
            f" at most {num_samples - width}, or larger micro-batches with fewer gradient "
            "accumulation steps; where it is the rest at the end of an epoch, drop that by "
            "dataloader_drop_last"
        )


def check_last_batch(*, num_samples: int, whole: int, dynamic_shape: bool) -> None:
    """Raise ConfigurationError where a pipeline's epoch ends in a smaller batch than the others.

    ``num_samples``: those of the last iteration of an epoch; ``whole``: those of the others.
    Source: deepspeed/runtime/pipe/engine.py, ``_exec_recv_activations``.
    """
    if num_samples != whole and not dynamic_shape:
        raise ConfigurationError(
            f"the last iteration of an epoch has {num_samples} samples, and the others {whole}, "
            "while the stages of a pipeline tell each other the shape of a batch once; set "
            '"dataloader_drop_last": true, or dynamic_shape=True in the PipelineModule'
        )


def check_pipelines(reserve: int, *, module: Any, width: int, num_microbatches: int) -> None:
    """Raise ConfigurationError where ``reserve`` workers make no pipelines, or too many.

    ``width``: pipelines of the launch; ``num_microbatches``: of all of them in a step.
    """
    axes = module.topology().get_axis_names()
    stages = module.topology().get_dim("pipe")
    if reserve and list(axes) != ["pipe", "data"]:
        raise ConfigurationError(
            f"--reserve is {reserve} and the topology has the axes {', '.join(axes)}, wanted pipe, "
            "data; leave --reserve out, or give num_stages"
        )
    if reserve % stages:
        raise ConfigurationError(
            f"--reserve is {reserve}, and workers that join get work once a whole pipeline of "
            f"{stages} stages has joined: use a multiple of {stages}"
        )
    if width + reserve // stages > num_microbatches:
        raise ConfigurationError(
            f"{width} pipelines and a --reserve of {reserve} workers share {num_microbatches} "
            "micro-batches a step, wanted one for each pipeline; use a --reserve of at most "
            f"{(num_microbatches - width) * stages}, or more gradient accumulation steps"
        )


def check_stages(config: Mapping[str, Any]) -> None:
    """Raise ConfigurationError where the stages of a pipeline are to differ."""
    moved = lookup(config, "elaswave.move_layers", "auto")
    if moved not in ("auto", "never"):
        raise ConfigurationError(
            f"elaswave.move_layers is {moved!r}, and the stages of DeepSpeed's pipelines "
            "have equally many workers and keep their layers: a pipeline that loses a worker is "
            "lost as a whole; leave it out, or use Megatron-Core, where stages may differ"
        )


def check_configuration(
    config: Mapping[str, Any], *, model: Any, mpu: Any, mesh_param: Any = None
) -> None:
    """Raise ConfigurationError naming every setting, and argument, that is not carried."""
    refuse(_problems(config, model, mpu, mesh_param))


def _problems(config: Mapping[str, Any], model: Any, mpu: Any, mesh_param: Any) -> Iterator[str]:
    if isinstance(model, PipelineModule) and has_other_axes(model):
        axes = ", ".join(model.topology().get_axis_names())
        yield f"the topology has the axes {axes}, and elaswave_plugin carries pipe and data only"
    if isinstance(model, PipelineModule) and lookup(config, "elaswave.consistency", "") == "exact":
        yield 'elaswave.consistency is exact, and the model a PipelineModule: set it to "fast"'
    if mpu is not None:
        yield "mpu is given, and elaswave_plugin carries data parallelism only; leave it out"
    if mesh_param is not None:
        yield (
            f"mesh_param is {mesh_param!r}, and elaswave_plugin carries data parallelism only;"
            " leave it out"
        )
    if init_utils._TP_MODEL_INIT_ARGS is not None:
        yield (
            "deepspeed.tp_model_init was called, and elaswave_plugin carries no tensor parallelism"
            " of DeepSpeed's; leave it out"
        )
    yield from problems(_parsed(config))


def _parsed(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the configuration with its ZeRO section as DeepSpeed reads it, former names included.

    As it is where DeepSpeed is going to complain.
    """
    try:
        zero = get_zero_config(dict(config)).model_dump(mode="json")
    except (ValidationError, TypeError):
        return config
    given = config.get("zero_optimization")
    unknown = {
        key: value
        for key, value in (given.items() if isinstance(given, Mapping) else ())
        if key not in zero
    }
    return {**config, "zero_optimization": {**unknown, **zero}}


def check_engine(engine: Any) -> None:
    """Raise ConfigurationError for what shows in the built engine only."""
    for problem in _engine_problems(engine):
        raise ConfigurationError(problem)


def check_schedules(engine: Any) -> None:
    """Raise ConfigurationError where the script steps a scheduler of torch's by itself."""
    # Torch leaves this mark on the optimizer, and nothing that leads to the scheduler.
    is_scheduled = hasattr(engine.basic_optimizer.step, "_wrapped_by_lr_sched")
    if is_scheduled and engine.lr_scheduler is None:
        raise ConfigurationError(
            "a learning-rate scheduler of torch has the optimizer, and the script steps it, also in"
            " a step that is redone after a loss; give it to deepspeed.initialize as lr_scheduler,"
            " which steps it once a step, and leave scheduler.step() out"
        )


def check_pipeline(engine: Any) -> None:
    """Raise ConfigurationError for what is carried elsewhere, and not of a pipeline."""
    if type(engine) is not PipelineEngine:
        raise ConfigurationError(
            f"the engine is a {type(engine).__name__}, and of pipelines elaswave_plugin carries "
            "PipelineEngine only; use PipelineModule"
        )
    if engine.monitor.enabled:
        raise ConfigurationError(
            "a monitor of DeepSpeed's is enabled, and of a pipeline none goes on after the loss of "
            'rank 0; use "wandb" or "tensorboard" in the section elaswave'
        )


def _engine_problems(engine: Any) -> Iterator[str]:
    inner = engine.basic_optimizer
    if not isinstance(inner, _ADAMS):
        kind = type(inner)
        yield (
            f"the optimizer is {kind.__name__} of {kind.__module__}, wanted Adam or AdamW of torch,"
            " or DeepSpeed's FusedAdam or DeepSpeedCPUAdam"
        )
    for name in ("amsgrad", "capturable"):
        if any(group.get(name) for group in inner.param_groups):
            yield f"{name} is set in {type(inner).__name__}, which is not carried; unset it"
    outer = engine.optimizer
    if isinstance(outer, BF16_Optimizer):
        yield (
            "DeepSpeed takes its BF16_Optimizer for this configuration, and elaswave_plugin carries"
            " bf16 in the others; leave data_types.grad_accum_dtype out, and give a pipeline "
            "zero_optimization.stage 1"
        )
    if isinstance(outer, FP16_Optimizer):
        yield (
            "DeepSpeed takes its FP16_Optimizer for FusedAdam in 16 bits without ZeRO, and "
            "elaswave_plugin does not carry its flat masters; set zero_optimization.stage to 1, or "
            "torch_adam in the optimizer's params"
        )
    if engine.has_moe_layers:
        yield "the model has MoE layers, and elaswave_plugin carries dense models only"


def has_other_axes(module: Any) -> bool:
    """Return whether there are other axes than stages and pipelines."""
    return tuple(sorted(module.topology().get_axis_names())) != ("data", "pipe")


def refuse_batch_of_its_own() -> NoReturn:
    """Raise ConfigurationError for a batch that could not be served again."""
    raise ConfigurationError(
        "engine.forward was called in training mode with a batch that the plugin did not "
        "serve, so that it could not be served again; take the batches from "
        "elaswave_plugin.deepspeed.loader(engine, dataset), or give the dataset to "
        "deepspeed.initialize as training_data"
    )


def refuse_boundary(is_boundary: bool) -> NoReturn:
    """Raise ConfigurationError for ``engine.set_gradient_accumulation_boundary()``."""
    raise ConfigurationError(
        f"engine.set_gradient_accumulation_boundary({is_boundary}) was called: a step that is"
        " redone begins in the middle of the script's count, and would lose samples; leave it out,"
        " call engine.step() after each engine.backward(loss), and set gradient_accumulation_steps"
    )


def refuse_count(line: str) -> NoReturn:
    """Raise ConfigurationError for a loop that ends at a count of its batches, in exact mode."""
    raise ConfigurationError(
        f"the loop of the script ends by a count of its batches ({line}), and in exact mode a step"
        " takes more of them after a loss of workers, so that the loop would make fewer steps; end"
        " it by engine.global_steps, count where accelerator.sync_gradients is true, or set"
        ' "consistency" to "fast"'
    )


def refuse_step_alone() -> NoReturn:
    """Raise ConfigurationError for a step whose losses did not go through ``engine.backward``."""
    raise ConfigurationError(
        "engine.step was called after no engine.backward(loss), so that the share of this worker"
        " was not weighted; call engine.backward(loss) in the place of loss.backward() and"
        " engine.scale(loss).backward()"
    )


def refuse_no_sync() -> NoReturn:
    """Raise ConfigurationError for ``engine.no_sync()``."""
    raise ConfigurationError(
        "engine.no_sync() was called: it leaves the count of a step's micro-batches to the"
        " script, and a step that is redone begins in the middle of that count, and would"
        " lose samples; leave it out, call engine.step() after each engine.backward(loss),"
        " and set gradient_accumulation_steps: the engine reduces once a step then"
    )


def refuse_coalescing() -> NoReturn:
    """Raise ConfigurationError for ``engine.coalesce_grad_reduction()``."""
    raise ConfigurationError(
        "engine.coalesce_grad_reduction() was called: it reduces where its block ends, which is"
        " no call that a loss could be absorbed in; leave it out, call engine.step() after each"
        " engine.backward(loss), and set gradient_accumulation_steps"
    )


def refuse_late_load() -> NoReturn:
    """Raise ConfigurationError for a load behind the first batch."""
    raise ConfigurationError(
        "engine.load_checkpoint was called after the first batch, and the state that it "
        "replaces is in the snapshots already; load before the loop starts"
    )


def refuse_pass(kind: str) -> NoReturn:
    """Raise ConfigurationError for a pass of a model of that ``kind`` beside its engine."""
    raise ConfigurationError(
        f"the model was called (its {kind}), and not by engine(batch), so that"
        " a loss in it would end the script; call the engine in the place of its model, and"
        " evaluate by elaswave_plugin.deepspeed.run(engine, evaluate)"
    )
