"""The patch records of a Megatron-LM script in an elastic job, on any device."""

from collections.abc import Callable
from functools import partial
from inspect import unwrap
from typing import Any

import torch.distributed as dist

from elaswave_plugin.adapters.megatron.compat.versions import SCRIPTS, record
from elaswave_plugin.adapters.megatron_lm.hooks import Hooks, has_index_builder
from elaswave_plugin.adapters.megatron_lm.script_writers import TENSORBOARD, WANDB
from elaswave_plugin.adapters.patching import Hook, PatchRecord, PatchSet
from elaswave_plugin.around import around

_TRAINING = "megatron.training.training"
_DATASETS = "megatron.core.datasets"
_SIGNALS = "megatron.training.dist_signal_handler"
_LOOP = ("forward_step_func", "data_iterator", "model", "optimizer", "opt_param_scheduler")


def lm_patches(hooks: Hooks) -> PatchSet:
    """Return the patches that every script needs."""
    return PatchSet(
        [
            *_start(hooks),
            *_steps(hooks),
            *_pieces(hooks),
            *_measures(hooks),
            *_checkpoints(hooks),
        ]
    )


def _record(target: str, call: Callable[..., Any], reason: str, *parameters: str) -> PatchRecord:
    """Of a function of megatron.training, which has the hook that its diff gives to it by name.

    The function there asks the hook, which is to call the one below it (``replaceable``).
    """
    make = around(call)
    hook = Hook(f"{target}_hook", lambda function: make(unwrap(function)))
    return record(target, make, reason, *parameters, valid=SCRIPTS, hook=hook)


def _start(hooks: Hooks) -> list[PatchRecord]:
    return [
        _record(
            "megatron.training.initialize:_initialize_distributed",
            hooks.initialize_distributed,
            "WORLD and all groups are ours; it finds them made",
            *("get_embedding_ranks", "get_position_embedding_ranks", "store"),
        ),
        _record(
            "megatron.training.global_vars:_set_tensorboard_writer",
            partial(hooks.open_writer, name=TENSORBOARD),
            "whoever is the last rank goes on with it",
            "args",
        ),
        _record(
            "megatron.training.global_vars:_set_wandb_writer",
            partial(hooks.open_writer, name=WANDB),
            "its run goes on when the worker that opened it is lost, and our rows go to it",
            "args",
        ),
        record(
            f"{_SIGNALS}:get_device",
            around(hooks.signal_device),
            "it knows the devices of nccl and gloo only, and ends the job with another backend",
            "local_rank",
            valid=SCRIPTS,
            hook=Hook(f"{_SIGNALS}:get_device_hook", around(hooks.signal_device)),
        ),
        _record(
            f"{_TRAINING}:get_megatron_optimizer",
            hooks.make_optimizer,
            "buffers and optimizer get room for every width before a checkpoint is loaded",
            *("config", "model_chunks", "config_overrides", "use_gloo_process_groups"),
            *("pg_collection", "dump_param_to_param_group_map"),
        ),
        record(
            f"{_DATASETS}.blended_megatron_dataset_builder:BlendedMegatronDatasetBuilder.__init__",
            around(hooks.build_datasets),
            "a worker may come to a place where data is read",
            *("self", "cls", "sizes", "is_built_on_rank", "config"),
            valid=SCRIPTS,
            hook=Hook(
                f"{_DATASETS}.blended_megatron_dataset_builder:built_on_rank_hook",
                lambda constructor: lambda: True,
            ),
        ),
        record(
            f"{_DATASETS}.utils:compile_helpers",
            around(hooks.compile_index_builder),
            "the wheel brings them built, and no Makefile",
            valid=SCRIPTS,
            hook=Hook(f"{_DATASETS}.utils:has_helpers_hook", lambda function: has_index_builder),
        ),
        _record(
            f"{_TRAINING}:build_pretraining_data_loader",
            hooks.make_loader,
            "whoever runs a micro-batch reads its samples, by their samplers",
            *("dataset", "consumed_samples"),
        ),
        _record(
            f"{_TRAINING}:build_train_valid_test_data_loaders",
            hooks.build_loaders,
            "every worker may come to a place where data is read",
            "build_train_valid_test_datasets_provider",
        ),
        _record(
            f"{_TRAINING}:cyclic_iter", hooks.cycle, "our loader starts its epochs itself", "iter"
        ),
    ]


def _steps(hooks: Hooks) -> list[PatchRecord]:
    return [
        _record(
            f"{_TRAINING}:train",
            hooks.train,
            "what was built is taken into care and sealed",
            *("forward_step_func", "model", "optimizer", "opt_param_scheduler"),
            *("train_data_iterator", "valid_data_iterator", "process_non_loss_data_func"),
            *("config", "checkpointing_context", "non_loss_data_func", "inference_model"),
        ),
        _record(
            f"{_TRAINING}:train_step",
            hooks.train_step,
            "an interrupted step is recovered and run again",
            *(*_LOOP, "config", "forward_backward_func", "iteration"),
        ),
        _record(
            f"{_TRAINING}:dummy_train_step",
            hooks.pass_over,
            "an iteration that is skipped is a step of the job, and is redone as one",
            "data_iterator",
        ),
        _record(
            f"{_TRAINING}:get_forward_backward_func",
            hooks.forward_backward,
            "the flow of the view says which micro-batches a worker runs",
            *("pp_size", "vp_size"),
        ),
        record(
            f"{_TRAINING}:mpu",
            hooks.count_samples,
            "samples are counted by the replicas of the launch: the global batch stays",
            valid=SCRIPTS,
            hook=Hook(
                f"{_TRAINING}:count_replicas_hook",
                lambda mpu: hooks.count_samples(mpu).get_data_parallel_world_size,
            ),
        ),
        *(
            _record(
                f"{_TRAINING}:{name}",
                hooks.over_everyone,
                "free workers learn it too, and stages may be unequally wide",
                parameter,
            )
            for name, parameter in (
                ("logical_and_across_model_parallel_group", "input"),
                ("reduce_max_stat_across_model_parallel_group", "stat"),
            )
        ),
    ]


def _pieces(hooks: Hooks) -> list[PatchRecord]:
    again = "it contains collectives, and starts again after a recovery"
    return [
        _record(
            f"{_TRAINING}:training_log", hooks.training_log, again, *_parameters_of_training_log()
        ),
        _record(
            f"{_TRAINING}:evaluate_and_print_results",
            hooks.evaluation,
            again,
            *("prefix", "forward_step_func", "data_iterator", "model", "iteration"),
            *("process_non_loss_data_func", "config", "verbose", "write_to_tensorboard"),
            "non_loss_data_func",
        ),
        _record(
            f"{_TRAINING}:evaluate",
            hooks.evaluate,
            "the last rank shows its losses, and need not be in the last stage",
            *("forward_step_func", "data_iterator", "model", "process_non_loss_data_func"),
            *("config", "verbose", "non_loss_data_func", "eval_iters"),
        ),
        _record(f"{_TRAINING}:save_checkpoint_and_time", hooks.piece, again),
        _record(
            f"{_TRAINING}:checkpoint_and_decide_exit",
            hooks.decide_exit,
            again,
            *("model", "optimizer", "opt_param_scheduler", "iteration"),
            *("num_floating_point_operations_so_far", "checkpointing_context"),
            "train_data_iterator",
        ),
        _record(f"{_TRAINING}:print_datetime", hooks.piece, again, "string", "override_timestamp"),
        *(
            record(
                f"megatron.core.timers:Timer.{name}",
                around(hooks.timer),
                "its barrier starts again after a recovery",
                *("self", "barrier"),
                valid=SCRIPTS,
                hook=Hook(
                    "megatron.core.timers:barrier_hook",
                    lambda method: partial(hooks.piece, dist.barrier),
                ),
            )
            for name in ("start", "stop")
        ),
        record(
            "megatron.core.utils:StragglerDetector.__exit__",
            around(hooks.leave_detector),
            "it shows the stack of whatever passes it, also of a step that is made again",
            *("self", "ex_type", "ex_val", "ex_tb"),
            valid=SCRIPTS,
            hook=Hook("megatron.core.utils:no_error_hook", lambda method: BaseException),
        ),
    ]


def _measures(hooks: Hooks) -> list[PatchRecord]:
    return [
        _record(
            f"{_TRAINING}:calc_params_l2_norm",
            hooks.params_norm,
            "free workers take part, and stages may be unequally wide",
            *("model", "force_create_fp32_copy"),
        ),
        *(
            record(
                f"megatron.core.energy_monitor:EnergyMonitor.{name}",
                around(hooks.piece),
                "it adds up over all workers, and starts again after a recovery",
                "self",
            )
            for name in ("lap", "get_total")
        ),
    ]


def _parameters_of_training_log() -> tuple[str, ...]:
    return (
        *("loss_dict", "total_loss_dict", "learning_rate", "iteration", "loss_scale"),
        *("report_memory_flag", "skipped_iter", "grad_norm", "params_norm", "num_zeros_in_grad"),
        *("max_attention_logit", "pg_collection", "is_first_iteration"),
    )


def _checkpoints(hooks: Hooks) -> list[PatchRecord]:
    checkpointing = "megatron.training.checkpointing"
    return [
        _record(
            f"{_TRAINING}:load_checkpoint",
            hooks.load,
            "a worker that comes back gets the state of the others",
            *("ddp_model", "optimizer", "opt_param_scheduler", "load_arg", "strict"),
            *("checkpointing_context", "skip_load_to_model_and_opt", "tp_group", "pp_group"),
            "dp_cp_group",
        ),
        _record(
            f"{checkpointing}:_load_base_checkpoint",
            hooks.load_base,
            "a checkpoint that cannot be read is named, with the newest one that can",
            *("load_dir", "args", "rank0", "sharded_state_dict", "checkpointing_context"),
        ),
        _record(
            f"{checkpointing}:open_file",
            hooks.open_tracker,
            "the tracker names a checkpoint by a rename: it is never seen half written",
            *("args", "kwargs"),
        ),
        _record(
            f"{checkpointing}:get_checkpoint_name",
            hooks.name_files,
            "a checkpoint of the format torch is written beside its place",
            *("checkpoints_path", "iteration", "release", "pipeline_parallel", "tensor_rank"),
            *("pipeline_rank", "expert_parallel", "expert_rank", "return_base_dir", "basename"),
        ),
        record(
            f"{checkpointing}:mpu",
            hooks.who_saves,
            "a worker without a place writes no file of the format torch",
        ),
        _record(f"{_TRAINING}:save_checkpoint", hooks.save, "a save starts again after a recovery"),
        _record(
            f"{checkpointing}:generate_state_dict",
            hooks.state_to_save,
            "a worker without a place has nothing of its own to save",
        ),
        _record(
            f"{checkpointing}:get_rng_state",
            hooks.rng_state,
            "what is saved does not depend on who ran which micro-batch last",
            *("ckpt_format", "tp_group", "pp_group"),
        ),
    ]
