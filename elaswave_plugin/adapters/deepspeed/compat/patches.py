"""The patch records of an elastic DeepSpeed job."""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from elaswave_plugin.adapters.constructed import arguments_of, remembering
from elaswave_plugin.adapters.patching import PatchRecord, PatchSet
from elaswave_plugin.errors import ConfigurationError

DEEPSPEED = "deepspeed"
VALID = ">=0.19.8,<0.20"
_ACCELERATE = ">=1.15,<1.16"
_TRANSFORMERS = ">=5.20,<6"
_TRL = ">=1.16,<1.17"
_A_LOSS_ENDS_IT = "a loss must end it everywhere, and the script runs on"
_BEHIND = "a worker that comes later has no part in it where the others have it behind them"
# (target, method of accelerate.py, AcceleratedJob, fingerprint, reason)
_ACCELERATE_SEAMS: tuple[tuple[str, str, tuple[str, ...], str], ...] = (
    (
        "data_loader:DataLoaderShard.__iter__",
        "iterate",
        ("self",),
        "it reads a batch ahead of the step, for as many processes as there were at launch",
    ),
    (
        "data_loader:DataLoaderDispatcher.__iter__",
        "dispatch",
        ("self",),
        "one process reads for all, and no other one knows the place in the data",
    ),
    (
        "data_loader:DataLoaderAdapter.state_dict",
        "state",
        ("self",),
        "a stateful loader does not know the place to which the job has read in its stead",
    ),
    (
        "accelerator:Accelerator._do_sync",
        "count",
        ("self",),
        "a step that is redone counts its micro-batches from the first again",
    ),
    (
        "utils.deepspeed:DeepSpeedEngineWrapper.backward",
        "backward",
        ("self", "loss", "sync_gradients", "kwargs"),
        "a script counts steps by sync_gradients, and one that was lost is none",
    ),
    (
        "scheduler:AcceleratedScheduler.__init__",
        "adopt",
        ("self", "scheduler", "optimizers", "step_with_optimizer", "split_batches"),
        "a scheduler that the script steps is in no snapshot; the engine steps it",
    ),
    (
        "scheduler:AcceleratedScheduler.step",
        "skip_step",
        ("self", "args", "kwargs"),
        "a scheduler that the script steps is in no snapshot; the engine steps it",
    ),
    (
        "data_loader:BatchSamplerShard.__len__",
        "length",
        ("self",),
        "an evaluation has more batches for less workers, and the user is told the line",
    ),
    (
        "accelerator:Accelerator.log",
        "log",
        # Of its decorator.
        ("args", "kwargs"),
        "the trackers of a main process that is lost are with it, and the user is told",
    ),
    (
        "accelerator:Accelerator.prepare_data_loader",
        "prepare",
        ("self", "data_loader", "device_placement", "slice_fn_for_dispatch"),
        "a worker that is left alone fills the last batch as those of the launch do",
    ),
    ("accelerator:Accelerator.gather", "collective", ("self", "tensor"), _A_LOSS_ENDS_IT),
    (
        "accelerator:Accelerator.gather_for_metrics",
        "collective",
        ("self", "input_data", "use_gather_object"),
        _A_LOSS_ENDS_IT,
    ),
    (
        "accelerator:Accelerator.reduce",
        "collective",
        ("self", "tensor", "reduction", "scale"),
        _A_LOSS_ENDS_IT,
    ),
    (
        "accelerator:Accelerator.pad_across_processes",
        "collective",
        ("self", "tensor", "dim", "pad_index", "pad_first"),
        _A_LOSS_ENDS_IT,
    ),
    ("accelerator:Accelerator.wait_for_everyone", "wait", ("self",), _A_LOSS_ENDS_IT),
    (
        "accelerator:Accelerator.clip_grad_norm_",
        "given",
        ("self", "parameters", "max_norm", "norm_type"),
        _BEHIND,
    ),
    (
        "accelerator:Accelerator.save_state",
        "save",
        ("self", "output_dir", "safe_serialization", "save_model_func_kwargs"),
        _BEHIND,
    ),
    (
        "accelerator:Accelerator.get_state_dict",
        "whole",
        ("self", "model", "unwrap"),
        _BEHIND,
    ),
    (
        "accelerator:Accelerator.load_state",
        "load",
        ("self", "input_dir", "load_kwargs", "load_model_func_kwargs"),
        "a worker that comes later loads what the others have loaded, or stays away",
    ),
)

_ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
# What says the width beside torch.distributed: (distribution, target, versions, whether it is an
# attribute that only instances have).
_WIDTHS = (
    (
        "deepspeed",
        "deepspeed.runtime.pipe.topology:PipelineParallelGrid.get_data_parallel_world_size",
        VALID,
        False,
    ),
    *(
        ("deepspeed", f"{_ENGINE}.{name}", VALID, True)
        for name in ("world_size", "dp_world_size", "seq_dp_world_size")
    ),
    *(
        ("accelerate", f"accelerate.state:{state}.num_processes", _ACCELERATE, True)
        for state in ("PartialState", "AcceleratorState")
    ),
)
_BY_SHARES = "a prompt's completions lie in shares of any size, which ranks do not follow in order"
# (function, method of generation.py, fingerprint, reason)
_TRL_SEAMS: tuple[tuple[str, str, tuple[str, ...], str], ...] = (
    ("gather", "gather", ("tensor",), _BY_SHARES),
    ("gather_object", "gather_object", ("object",), _BY_SHARES),
    (
        "split_tensor_dict",
        "split",
        ("tensor_dict", "num_chunks"),
        "it drops what a share has beyond a multiple of the micro-batches",
    ),
)


def constructor_arguments(optimizer: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a ZeRO optimizer's constructor arguments; raises ConfigurationError if unrecorded."""
    arguments = arguments_of(optimizer)
    if arguments is None:
        raise ConfigurationError(
            f"the {type(optimizer).__name__} was not made by deepspeed.initialize with the section "
            "elaswave; pass the model and a plain optimizer to it"
        )
    return arguments


def _already_flat(
    original: Callable[[list[torch.Tensor]], torch.Tensor],
) -> Callable[[list[torch.Tensor]], torch.Tensor]:
    def defragment(tensors: list[torch.Tensor]) -> torch.Tensor:
        flat = flat_buffer_of(tensors)
        return original(tensors) if flat is None else flat

    return defragment


def flat_buffer_of(tensors: list[torch.Tensor]) -> torch.Tensor | None:
    """The one-dimensional buffer whose consecutive pieces are ``tensors``; None where none is."""
    first = tensors[0]
    storage = first.untyped_storage()
    position = 0
    for tensor in tensors:
        together = tensor.untyped_storage().data_ptr() == storage.data_ptr()
        if not together or tensor.storage_offset() != position:
            return None
        position += tensor.numel()
    if storage.nbytes() != position * first.element_size():
        return None
    flat = torch.empty(0, dtype=first.dtype, device=first.device)
    return flat.set_(storage, 0, (position,), (1,))


def deepspeed_patches() -> PatchSet:
    """Return the patches that every elastic job needs; applied before the engine is built."""
    constructors = [
        PatchRecord(
            target=target,
            reason="a new layout runs the constructor of the same object again, as it was called",
            distribution=DEEPSPEED,
            valid=VALID,
            make=remembering,
        )
        for target in (
            "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.__init__",
            "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3.__init__",
        )
    ]
    return PatchSet(
        [
            *constructors,
            PatchRecord(
                target="deepspeed.runtime.dataloader:RepeatingLoader.__next__",
                reason="it takes two empty epochs for the end; a worker that comes later has many",
                distribution=DEEPSPEED,
                valid=VALID,
                parameters=("self",),
                make=_endless,
            ),
            PatchRecord(
                # As bound in stage3.py, which is where the optimizer looks it up.
                target="deepspeed.runtime.zero.stage3:defragment",
                reason=(
                    "it collects garbage for up to a second, also where the partitions are flat"
                ),
                distribution=DEEPSPEED,
                valid=VALID,
                parameters=("tensors",),
                make=_already_flat,
            ),
        ]
    )


def newcomer_patches() -> PatchSet:
    """Return the patches for building an engine beside a running job; undone once it is built."""
    return PatchSet(
        [
            PatchRecord(
                # As bound in engine.py, which is where the engine looks it up.
                target="deepspeed.runtime.engine:MonitorMaster",
                reason="the monitors are open elsewhere: a worker that comes later is not rank 0",
                distribution=DEEPSPEED,
                valid=VALID,
                parameters=("monitor_config",),
                make=_opens_nothing,
            ),
            PatchRecord(
                target="deepspeed.runtime.pipe.p2p:recv",
                reason="an engine of a pipeline waits for its neighbour, which sends only once",
                distribution=DEEPSPEED,
                valid=VALID,
                parameters=("tensor", "src_stage", "async_op"),
                make=_receives_nothing,
            ),
        ]
    )


def detached_patches() -> PatchSet:
    """Return the patches for a ZeRO-3 model's pass beside a running job; undone after it."""
    return PatchSet(
        [
            PatchRecord(
                # As bound in the coordinator, which compares what it has recorded.
                target=(
                    "deepspeed.runtime.zero.partitioned_param_coordinator"
                    ":assert_ints_same_as_other_ranks"
                ),
                reason="a worker that comes later has no other one to compare its passes with",
                distribution=DEEPSPEED,
                valid=VALID,
                parameters=("args", "kwargs"),  # DeepSpeed's own wrapper
                make=_compares_nothing,
            ),
        ]
    )


def stage_patches(finding: Callable[[Any], Any] | None) -> PatchSet:
    """``finding`` wraps the constructor of modules that look for their stage; never undone.

    None lists the records only.
    """
    return PatchSet(
        [
            PatchRecord(
                target="deepspeed.runtime.pipe.module:PipelineModule.__init__",
                reason="it takes its stage from a rank of the launch; joined slots have none",
                distribution=DEEPSPEED,
                valid=VALID,
                make=finding or _builds_nothing,
            ),
        ]
    )


def launch_patches() -> PatchSet:
    """Return the patches for before torch.distributed is initialized in a worker; never undone."""
    return PatchSet(
        [
            PatchRecord(
                target="deepspeed.comm.torch:build_shm_op",
                reason=(
                    "on a CPU it compiles for a minute an operation for inference that keeps the "
                    "launch's world size for ever, and leaves files in shared memory"
                ),
                distribution=DEEPSPEED,
                valid=VALID,
                parameters=(),
                make=_builds_nothing,
            ),
        ]
    )


def destruction_patches(leaving_first: Callable[[Any], Any] | None) -> PatchSet:
    """``leaving_first`` wraps the function by which scripts destroy their groups at the end.

    None lists the records only.
    """
    return PatchSet(
        [
            PatchRecord(
                target="torch.distributed:destroy_process_group",
                reason="leaving the job takes its groups, and a script may destroy them first",
                distribution="torch",
                valid=">=2.11,<2.16",
                parameters=("group",),
                make=leaving_first or _builds_nothing,
            ),
        ]
    )


def _opens_nothing(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda monitor_config: SimpleNamespace(enabled=monitor_config.enabled)


def _receives_nothing(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda tensor, src_stage, async_op=False: None


def _compares_nothing(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: None


def _endless(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def __next__(self: Any) -> Any:
        while True:
            try:
                return next(self.data_iter)
            except StopIteration:
                self.data_iter = iter(self.loader)

    return __next__


def _builds_nothing(original: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: None


def accelerate_patches(part: Any) -> PatchSet:
    """Return the patches that lead Accelerate's calls through ``part``; None: to list them only."""
    return PatchSet(
        [
            PatchRecord(
                target=f"accelerate.{target}",
                reason=reason,
                distribution="accelerate",
                valid=_ACCELERATE,
                parameters=parameters,
                make=functools.partial(_routed, part, name),
            )
            for target, name, parameters, reason in _ACCELERATE_SEAMS
        ]
    )


def width_patches(distribution: str, asks: Callable[[str], None] | None) -> PatchSet:
    """Have ``asks`` called where the width is read, by the name; None: to list it only."""
    return PatchSet(
        [
            PatchRecord(
                target=target,
                reason="it follows the workers, and the user is told the lines that multiply by it",
                distribution=distribution,
                valid=valid,
                make=functools.partial(_told_of, asks, target.rpartition(".")[2]),
                of_instances=of_instances,
            )
            for of, target, valid, of_instances in _WIDTHS
            if of == distribution
        ]
    )


def _told_of(asks: Any, name: str, native: Any) -> Any:
    if native is None:
        return _ToldAttribute(asks, name)

    @functools.wraps(native)
    def width(self: Any) -> Any:
        asks(name)
        return native(self)

    return width


class _ToldAttribute:
    """An attribute as its instances have it in their dict; who reads it is told."""

    def __init__(self, asks: Callable[[str], None], name: str) -> None:
        self._asks, self._name = asks, name

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        self._asks(self._name)
        try:
            return vars(instance)[self._name]
        except KeyError:
            raise AttributeError(self._name) from None

    def __set__(self, instance: Any, value: Any) -> None:
        vars(instance)[self._name] = value


def processor_patches(finding: Callable[..., Any] | None) -> PatchSet:
    """``finding`` wraps Accelerate's choice of a backend where there is no GPU; never undone.

    None lists the records only.
    """
    return PatchSet(
        [
            PatchRecord(
                target="accelerate.state:PartialState._prepare_backend",
                reason="without a GPU it finds no backend, and takes each worker for the only one",
                distribution="accelerate",
                valid=_ACCELERATE,
                parameters=("self", "cpu", "sagemaker_dp", "backend"),
                make=finding or _builds_nothing,
            ),
        ]
    )


def asking_patches() -> PatchSet:
    """Return the patches for asking a loss that is told of other processes; undone after it."""
    return PatchSet(
        [
            PatchRecord(
                # As bound in operations.py, whose collectives take their number of processes there.
                target="accelerate.utils.operations:PartialState",
                reason="a loss that gathers, as TRL's, has only the processes that there are",
                distribution="accelerate",
                valid=_ACCELERATE,
                parameters=("cpu", "kwargs"),
                make=_as_it_is,
            ),
        ]
    )


def _as_it_is(state: Any) -> Any:
    """Return a class of the same state, which is not told what the original's is told now."""
    return type(state.__name__, (state,), {"_shared_state": dict(state._shared_state)})


def trainer_patches(hooks: Any) -> PatchSet:
    """Lead transformers.Trainer through ``hooks``; None to list the records only."""
    return PatchSet(
        [
            PatchRecord(
                target="transformers.trainer:Trainer._run_epoch",
                reason="the first call gives the Trainer, whose steps a loss has made again",
                distribution="transformers",
                valid=_TRANSFORMERS,
                parameters=(
                    *("self", "model", "epoch", "train_dataloader", "steps_in_epoch"),
                    *("num_update_steps_per_epoch", "trial", "ignore_keys_for_eval", "start_time"),
                    *("resume_from_checkpoint", "epochs_trained"),
                    "steps_trained_in_current_epoch",
                ),
                make=functools.partial(_routed, hooks, "run_epoch"),
            ),
            PatchRecord(
                target="transformers.trainer:Trainer._evaluate",
                reason="a worker that comes later has nobody to evaluate with before it enters",
                distribution="transformers",
                valid=_TRANSFORMERS,
                parameters=("self", "trial", "ignore_keys_for_eval", "skip_scheduler"),
                make=functools.partial(_routed, hooks, "evaluate"),
            ),
            PatchRecord(
                target="transformers.trainer_callback:CallbackHandler.on_train_begin",
                reason="trackers open their runs here, which later main processes go on with",
                distribution="transformers",
                valid=_TRANSFORMERS,
                parameters=("self", "args", "state", "control", "kwargs"),
                make=functools.partial(_routed, hooks, "train_begins"),
            ),
            PatchRecord(
                # As bound in trainer.py, which gathers the loss that it logs, and nothing else.
                target="transformers.trainer:nested_gather",
                reason="every worker has the mean loss over all of them, also of those it has lost",
                distribution="transformers",
                valid=_TRANSFORMERS,
                parameters=("tensors", "parallel_mode", "name"),
                make=_gathers_nothing,
            ),
        ]
    )


def resume_patches() -> PatchSet:
    """Have the Trainer of a worker that comes later begin without a checkpoint."""
    return PatchSet(
        [
            PatchRecord(
                target="transformers.trainer:Trainer.train",
                reason="a worker that comes later has its state from the others, and the checkpoint"
                " that its script finds is of this job, or gone by now",
                distribution="transformers",
                valid=_TRANSFORMERS,
                parameters=("self", "resume_from_checkpoint", "trial", "ignore_keys_for_eval"),
                make=_resumes_nothing,
            )
        ]
    )


def generation_patches(part: Any, module: str) -> PatchSet:
    """Lead functions of a module of TRL through ``part``; None to list the records only."""
    return PatchSet(
        [
            PatchRecord(
                # As bound in the module of the trainer, which calls them there.
                target=f"{module}:{name}",
                reason=reason,
                distribution="trl",
                valid=_TRL,
                parameters=parameters,
                make=functools.partial(_routed, part, through),
            )
            for name, through, parameters, reason in _TRL_SEAMS
        ]
    )


def _resumes_nothing(native: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(native)
    def train(self: Any, resume_from_checkpoint: Any = None, *args: Any, **given: Any) -> Any:
        return native(self, None, *args, **given)

    return train


def _gathers_nothing(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda tensors, parallel_mode, name=None: tensors


def _routed(part: Any, name: str, native: Callable[..., Any]) -> Callable[..., Any]:
    through = getattr(part, name)

    @functools.wraps(native)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return through(native, *args, **kwargs)

    return replacement
