"""deepspeed.initialize with the section "elaswave": joins the job, then builds the engine in it."""

import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.dataloader import RepeatingLoader
from deepspeed.utils import groups as deepspeed_groups

from elaswave_plugin.adapters import reimplemented
from elaswave_plugin.adapters.deepspeed.compat.exact_norms import exact_patches
from elaswave_plugin.adapters.deepspeed.compat.patches import (
    deepspeed_patches,
    destruction_patches,
    launch_patches,
    newcomer_patches,
)
from elaswave_plugin.adapters.deepspeed.compat.unsupported import (
    check_configuration,
    check_stages,
)
from elaswave_plugin.adapters.deepspeed.configuration import missing_in
from elaswave_plugin.adapters.deepspeed.engine.attached import AttachedEngine
from elaswave_plugin.adapters.deepspeed.engine.job import EngineJob
from elaswave_plugin.adapters.deepspeed.engine.loader import ElasticLoader
from elaswave_plugin.adapters.deepspeed.engine.monitor import name_wandb_run
from elaswave_plugin.adapters.deepspeed.pipeline.grid import make_groups_again
from elaswave_plugin.adapters.deepspeed.pipeline.job import PipelineJob
from elaswave_plugin.adapters.deepspeed.zero.zero3_partitions import is_cut, make_whole, take_world
from elaswave_plugin.adapters.deepspeed_section import check_command_line, read_section
from elaswave_plugin.adapters.growth import check_reserve
from elaswave_plugin.adapters.patching import PatchSet
from elaswave_plugin.adapters.torch_loader import Batches, batches_of
from elaswave_plugin.adapters.upstream_sources import Row, say_unknown
from elaswave_plugin.command_line import as_launched
from elaswave_plugin.communicator.groups.c10d_tables import BACKEND
from elaswave_plugin.config import ElasticConfig
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.ipc.console import say
from elaswave_plugin.ipc.environment import AGENT, read_reserve
from elaswave_plugin.loops.script_end import leave_at_exit
from elaswave_plugin.recovery.worker import Worker
from elaswave_plugin.tracking.sinks import check_sinks
from elaswave_plugin.trainer.fatal import ends_in_a_sentence
from elaswave_plugin.words import check_words

# Where the engine keeps its job.
_JOB = "elaswave"
_TRAINER = "elaswave_plugin.adapters.deepspeed.hf_trainer"
_RUN = "run(engine, evaluate)"
_OF_A_LOADER = ("collate_fn", "shuffle", "seed", "drop_last")


@ends_in_a_sentence
def initialize(
    native: Callable[..., Any],
    config: Mapping[str, Any],
    arguments: Mapping[str, Any],
    beside: Sequence[torch.nn.Module] = (),
) -> Any:
    """``deepspeed.initialize`` with a configuration that has the section.

    ``beside``: the models that `initialize_beside` has made whole.
    """
    if isinstance(arguments.get("model"), PipelineModule):
        check_stages(config)
    settings = elastic_config(config)
    if settings is None:
        _say_detached(config)
        return native(**arguments)
    if any(one is arguments.get("model") for one in beside):
        raise ConfigurationError(
            "the model has an engine without an optimizer already, as TRL's"
            " precompute_ref_log_probs makes it in ZeRO-3, and would have two; leave that out, or"
            " give a reference model"
        )
    made = _attach(native, settings, config, dict(arguments))
    getattr(made[0], _JOB).has_beside(beside)
    return made


@ends_in_a_sentence
def refuse_second(jobs: Sequence[AttachedEngine | None]) -> NoReturn:
    """A second engine in a process of which one is in a job; ``jobs`` of the first ones."""
    for job in jobs:
        if job is not None:
            job.abandon()
    raise ConfigurationError(
        "deepspeed.initialize was called a second time, and a job has one engine: after a loss the"
        " state of another one would be that of a step that is redone; put the models (both of a"
        " GAN, actor and critic) into one module with one optimizer, leave a model that is not"
        ' trained without an engine, or take the section "elaswave" out'
    )


@ends_in_a_sentence
def initialize_beside(
    native: Callable[..., Any],
    config: Mapping[str, Any],
    arguments: Mapping[str, Any],
    beside: list[torch.nn.Module],
) -> Any:
    """An engine without an optimizer, as of a reference model: whole on each worker, in no job.

    One that ZeRO-3 would cut is whole too, since a lost worker would take its part with it; its
    model is put into ``beside``. Raises ConfigurationError for the model of the job itself.
    """
    if elastic_config(config) is None:
        return native(**arguments)
    zero, module = config.get("zero_optimization"), arguments.get("model")
    if isinstance(zero, Mapping) and zero.get("stage") == 3 and module is not None:
        accelerate = _accelerate()
        if accelerate is not None and accelerate.prepares_with(config):
            raise ConfigurationError(
                "a model is prepared without an optimizer in ZeRO stage 3, as evaluate() before"
                " train() has it, and what a lost worker holds of it is gone; evaluate behind the"
                " first step"
            )
        num_bytes = make_whole(module)
        if os.environ.get("RANK", "0") == "0":
            say(
                f"a {type(module).__name__} without an optimizer, as a reference model, is whole on"
                f" each worker ({num_bytes / (1 << 20):.1f} MiB), where ZeRO-3 would cut it: a lost"
                " worker would take its part with it"
            )
        whole = {**config, "zero_optimization": {"stage": 0}}
        arguments = {**arguments, "config": whole, "config_params": None}
        beside.append(module)
    # The groups that DeepSpeed keeps for the next engine are of a WORLD that the job replaces.
    kept = dict(vars(deepspeed_groups))
    made = native(**arguments)
    vars(deepspeed_groups).update(kept)
    return made


def _attach(
    native: Callable[..., Any],
    settings: ElasticConfig,
    config: Mapping[str, Any],
    arguments: dict[str, Any],
) -> Any:
    check_configuration(
        config,
        **{name: arguments.get(name) for name in ("model", "mpu", "mesh_param")},
    )
    workers, reserve = int(os.environ.get("WORLD_SIZE", "1")), read_reserve(os.environ)
    module = arguments.get("model")
    is_pipeline = isinstance(module, PipelineModule)
    stages = module.topology().get_dim("pipe") if isinstance(module, PipelineModule) else 1
    check_reserve(settings, reserve, width=workers // stages, fewest=2 * stages)
    settings.check_slots(workers + reserve)
    check_sinks(settings)
    accelerate = _accelerate()
    by_trainer = accelerate is not None and accelerate.drives_trainer()
    cut = module is not None and is_cut(module)
    launch_patches().apply()
    exact = exact_patches().records if settings.consistency == "exact" else ()
    patches = PatchSet([*deepspeed_patches().records, *exact])
    patches.apply()
    worker = Worker(config=settings, environ=os.environ, model_parallel=(1, stages))
    _install_groups(worker)
    if is_pipeline:
        make_groups_again(module)
    elif cut:
        take_world(module)
    name_wandb_run(settings, config, worker.run_id)
    seed = _agreed_seed(worker)
    training_data = arguments.pop("training_data", None)
    beside = newcomer_patches() if worker.detached else None
    if beside is not None:
        beside.apply()
    engine, optimizer, _, scheduler = native(**arguments)
    if beside is not None:
        beside.undo()
    trainer = import_module(f"{_TRAINER}.hooks") if by_trainer else None
    kind = PipelineJob if is_pipeline else EngineJob
    if trainer is not None:
        kind = import_module(f"{_TRAINER}.job").TrainerJob
    job = kind(worker, engine, patches=patches, seed=seed)
    if worker.owns_rank_0:
        used = _reimplemented(engine, is_pipeline=is_pipeline, accelerates=bool(accelerate))
        say_unknown([*used, *(reimplemented.DEEPSPEED_EXACT if exact else ())])
    object.__setattr__(engine, _JOB, job)
    accelerated = None if accelerate is None else accelerate.attach(job, engine)
    if trainer is not None:
        trainer.attach(job, accelerated)
    leave_at_exit(job.leave, abandon=job.abandon)
    _leave_with_the_groups(job)
    if training_data is not None:
        collate_fn = arguments.get("collate_fn")
        if is_pipeline:
            loader = loader_of(engine, training_data, collate_fn=collate_fn, shuffle=False)
            engine.set_dataloader(RepeatingLoader(loader))
        else:
            engine.training_dataloader = loader_of(engine, training_data, collate_fn=collate_fn)
    return engine, optimizer, engine.training_dataloader, scheduler


def _reimplemented(engine: Any, *, is_pipeline: bool, accelerates: bool) -> list[Row]:
    """List what a job of this engine uses of the functions that are re-implemented."""
    stage = int(engine.zero_optimization_stage())
    rows = [*reimplemented.DEEPSPEED]
    if stage == 0:
        # An engine of float32 weights has torch's optimizer itself.
        has_masters = engine.optimizer is not engine.basic_optimizer
        rows += reimplemented.ZERO_0 if has_masters else ()
    else:
        rows += reimplemented.ZERO_3 if stage == 3 else reimplemented.ZERO_12
    rows += reimplemented.PIPELINE if is_pipeline else ()
    return [*rows, *(reimplemented.ACCELERATE if accelerates else ())]


def _say_detached(config: Mapping[str, Any]) -> None:
    """Without an agent, which would say it: once for the job, what its configuration lacks."""
    if AGENT not in os.environ and os.environ.get("RANK", "0") == "0":
        print(f"elaswave: nothing attaches: {missing_in(config)}", file=sys.stderr)


def _accelerate() -> Any:
    """Import the module that carries HF Accelerate; None unless the script has imported that."""
    if "accelerate" not in sys.modules:
        return None
    return import_module("elaswave_plugin.adapters.deepspeed.accelerate.accelerate")


def _install_groups(worker: Worker) -> None:
    """Make WORLD ours; a group that the script has made already is replaced."""
    if dist.is_initialized() and dist.get_backend() != BACKEND:
        dist.destroy_process_group()
    if not dist.is_initialized():
        dist.init_process_group(**worker.groups.install(worker.view.ranks))


def _agreed_seed(worker: Worker) -> int:
    """The seed of the settings, else that of the first worker's generator at the launch."""
    if worker.detached:
        return worker.job_constants["seed"]
    own = torch.initial_seed() >> 1 if worker.config.seed is None else worker.config.seed
    seed = torch.tensor([own], dtype=torch.int64)
    dist.broadcast(seed, src=0)
    worker.remember(seed=int(seed))
    return int(seed)


def _leave_with_the_groups(job: AttachedEngine) -> None:
    """Leave with the others before the script destroys the groups that this takes."""

    def leaving_first(native: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(native)
        def destroy_process_group(group: Any = None) -> None:
            if group is None or group is dist.group.WORLD:
                job.leave()
            native(group)

        return destroy_process_group

    patches = destruction_patches(leaving_first)
    patches.apply()
    job.at_leave.append(patches.undo)


def loader_of(engine: Any, data: Any, **options: Any) -> Any:
    """A training loader over a map-style dataset, or one that gives a torch DataLoader's batches.

    Without the section it is DeepSpeed's own.
    """
    job = _job_of(engine, "loader(engine, dataset)")
    _check_names(options)
    collate_fn, drop_last = options.get("collate_fn"), options.get("drop_last")
    shuffle, seed = options.get("shuffle", True), options.get("seed", 0)
    sampler, reshuffles, like = None, False, None
    if isinstance(data, torch.utils.data.DataLoader):
        like = data
        given = _read_loader(data, micro_batch_size=int(engine.train_micro_batch_size_per_gpu()))
        _check_said_once(options, shuffle=given.shuffle, seed=given.seed)
        collate_fn = collate_fn or given.collate_fn
        shuffle, seed = given.shuffle, seed if given.seed is None else given.seed
        drop_last = given.drop_last if drop_last is None else drop_last
        data, sampler = given.dataset, given.sampler
        reshuffles = sampler is None
    if job is None:
        order: Any = sampler or torch.utils.data.DistributedSampler(
            data, engine.dp_world_size, engine.global_rank, shuffle=shuffle, seed=seed
        )
        return engine.deepspeed_io(data, data_sampler=order, collate_fn=collate_fn)
    return _make_loader(
        job,
        data,
        collate=collate_fn or engine.collate_fn,
        shuffle=shuffle,
        seed=seed,
        drop_last=bool(engine.dataloader_drop_last()) if drop_last is None else drop_last,
        sampler=sampler,
        reshuffles=reshuffles,
        like=like,
    )


def run_in(engine: Any, work: Callable[[], Any], *, phase: str) -> Any:
    """Call ``work()``, and again after a loss; without the section it is just called."""
    job = _job_of(engine, _RUN)
    _check_work(work, phase)
    return work() if job is None else job.run(work, phase=phase)


def mean_of(engine: Any, value: Any) -> torch.Tensor:
    """The mean of a value over all workers' samples; without the section over the workers."""
    job = _job_of(engine, "mean(engine, value)")
    if job is not None:
        return job.mean(value)
    total = torch.as_tensor(value).detach().to(engine.device, torch.float64, copy=True)
    dist.all_reduce(total)
    return total / dist.get_world_size()


@ends_in_a_sentence
def _job_of(engine: Any, line: str) -> AttachedEngine | None:
    """The job of an engine; None without the section. Raises ConfigurationError for no engine."""
    if not hasattr(engine, "deepspeed_io"):
        raise ConfigurationError(
            f"elaswave_plugin.deepspeed.{line.partition('(')[0]} got a {type(engine).__name__} as"
            f" engine: write {line}, with the first of the four that deepspeed.initialize returns"
        )
    return getattr(engine, _JOB) if hasattr(engine, _JOB) else None


@ends_in_a_sentence
def _check_work(work: object, phase: object) -> None:
    if not callable(work):
        raise ConfigurationError(
            f"elaswave_plugin.deepspeed.run got {type(work).__name__} {work!r:.40}, wanted a"
            f" function, which it calls again after a loss: write {_RUN}, without calling it"
        )
    if not isinstance(phase, str):
        raise ConfigurationError(
            f"elaswave_plugin.deepspeed.run got phase={phase!r}, wanted a name: write"
            ' run(engine, evaluate, phase="evaluation")'
        )


@ends_in_a_sentence
def _check_names(options: Mapping[str, Any]) -> None:
    check_words(options, _OF_A_LOADER, "elaswave_plugin.deepspeed.loader: unknown name")


@ends_in_a_sentence
def _check_said_once(options: Mapping[str, Any], **said: Any) -> None:
    """Raise ConfigurationError for another value of what a DataLoader says itself."""
    for name, value in said.items():
        if value is not None and options.get(name, value) != value:
            raise ConfigurationError(
                f"elaswave_plugin.deepspeed.loader got {name}={options[name]!r}, and the DataLoader"
                f" has {value!r}: leave {name} out"
            )


@ends_in_a_sentence
def _read_loader(loader: Any, *, micro_batch_size: int) -> Batches:
    return batches_of(loader, micro_batch_size=micro_batch_size)


@ends_in_a_sentence
def _make_loader(job: AttachedEngine, data: Any, **options: Any) -> ElasticLoader:
    return job.make_loader(data, **options)


def elastic_config(config: Mapping[str, Any]) -> ElasticConfig | None:
    """The settings of a configuration, as the job was launched; None without an enabled section.

    Raises ConfigurationError for a wrong section, enabled or not, and for what the agents were not
    told.
    """
    settings = read_section(config)
    if settings is None:
        return None
    check_command_line(sys.argv[1:])
    return as_launched(settings, os.environ)
