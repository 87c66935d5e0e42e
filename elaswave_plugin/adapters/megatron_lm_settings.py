"""The arguments of Megatron-LM's scripts that are not carried with every value.

``megatron_lm/attach.py`` obeys this table, `elaswave doctor` and docs/limits.md read it.
"""

from collections.abc import Callable, Iterator
from functools import partial

from elaswave_plugin.adapters import megatron_settings
from elaswave_plugin.adapters.answers import UNSET, Answer, Setting, Values
from elaswave_plugin.adapters.megatron_settings import EXPERTS, has_stages

# Arguments that are named otherwise than the setting of Megatron-Core which they make.
_ARGUMENTS = (
    ("reduce_scatter_with_fp32_accumulation", "ddp_reduce_scatter_with_fp32_accumulation"),
    ("cpu_offloading", "cpu_offloading_num_layers"),
)
# Options that are named otherwise than their argument.
_OPTIONS = (
    ("nccl_ub", "--use-nccl-ub"),
    ("fp8", "--fp8-format"),
    ("fp4", "--fp4-format"),
    # Switched off by --no-data-sharding.
    ("data_sharding", "data_sharding"),
)
_GRAPHS = "a graph replays the groups and buffers of its capture; train without CUDA graphs"
_MAMBA = "layers of Mamba need kernels that nobody has run with the plugin; use a Transformer"
_LATER = "nobody has run it with the plugin; leave it out"


# Name, values that are carried, and why any other is refused and what to do.
_REFUSED = (
    ("use_torch_fsdp2", (False,), "its shards are in no snapshot; use Megatron-LM's DDP"),
    ("use_tp_pp_dp_mapping", (False,), "ranks are laid out tp-dp-pp; unset it"),
    ("optimizer", ("adam",), "the state of other optimizers has another shape; use adam"),
    ("optimizer_cpu_offload", (False,), "keep the optimizer on the device"),
    ("ckpt_format", ("torch_dist", "torch"), "its shards are in no snapshot; use torch_dist"),
    (
        "non_persistent_ckpt_type",
        (None, "global"),
        "local checkpoints are lost with their node, and the plugin has copies itself; use global",
    ),
    ("hybrid_context_parallel", (False,), _LATER),
    ("perform_rl_step", (False,), "rollouts are no samples of a dataset; train by pretraining"),
    (
        "sft",
        (False,),
        "Megatron-LM itself sends the lengths of packed sequences to no other worker of a TP group;"
        " use data and pipeline parallelism",
    ),
    ("skip_train", (False,), "nothing is trained; start it without --elaswave"),
    ("inprocess_restart", (False,), "it restarts the processes that the plugin keeps; unset it"),
    ("adlr_autoresume", (False,), _LATER),
    (
        "qk_clip",
        (False,),
        "maxima over replicas change weights, and a free worker has none; unset it",
    ),
    ("enable_ft_package", (False,), "the plugin watches for hung workers itself; unset it"),
    ("save_dgrads_interval", (None,), "gradients are saved by who has them natively; unset it"),
    ("save_wgrads_interval", (None,), "gradients are saved by who has them natively; unset it"),
    ("moe_use_upcycling", (False,), "a second model makes the weights; upcycle first, then train"),
    ("cuda_graph_impl", ("none",), _GRAPHS),
    ("enable_cuda_graph", (False,), _GRAPHS),
    ("external_cuda_graph", (False,), _GRAPHS),
    ("reuse_grad_buf_for_mxfp8_param_ag", (False,), "it is for fp8; train in bf16"),
    ("data_parallel_random_init", (False,), "replicas begin with the same weights; unset it"),
    ("hybrid_override_pattern", (None,), _MAMBA),
    ("is_hybrid_model", (False,), _MAMBA),
    ("use_legacy_models", (False,), "its layers are not Megatron-Core's; unset it"),
)
# Name, values that are carried, the value where nobody sets it, the one that the job assigns, the
# answer to any other value, and what is made of it.
_CHANGED = (
    (
        "use_distributed_optimizer",
        (True,),
        False,
        True,
        Answer.ADJUSTED,
        "switched on; same numbers, and checkpoints as the script without it writes and reads",
    ),
    (
        "dist_ckpt_optim_fully_reshardable",
        (True,),
        False,
        True,
        Answer.ADJUSTED,
        "switched on, so that checkpoints are not bound to one data-parallel width",
    ),
    (
        "async_save",
        (False,),
        False,
        False,
        Answer.ADJUSTED,
        "saves are waited for, so that no loss tears one",
    ),
    (
        "data_sharding",
        (True,),
        True,
        UNSET,
        Answer.ADJUSTED,
        "a pass over the data ends for all replicas together, and no longer later for some",
    ),
    (
        "nccl_ub",
        (False,),
        False,
        False,
        Answer.ADJUSTED,
        "buffers are not registered with NCCL, since their width changes",
    ),
    (
        "tp_comm_overlap",
        (False,),
        False,
        False,
        Answer.ADJUSTED,
        "messages of TP are not overlapped, since their buffers belong to one group",
    ),
    (
        "defer_embedding_wgrad_compute",
        (False,),
        False,
        False,
        Answer.ADJUSTED,
        "gradients are complete when a backward pass is",
    ),
    (
        "delay_wgrad_compute",
        (False,),
        False,
        False,
        Answer.ADJUSTED,
        "gradients are complete when a backward pass is",
    ),
    (
        "moe_shared_expert_overlap",
        (False,),
        False,
        False,
        Answer.ADJUSTED,
        "shared experts run in the stream of the others",
    ),
    (
        "overlap_param_gather_with_optimizer_step",
        (False,),
        False,
        False,
        Answer.ADJUSTED,
        "weights are gathered after the optimizer's step",
    ),
    (
        "ckpt_format",
        ("torch_dist",),
        "torch_dist",
        UNSET,
        Answer.LESS,
        "layers stay at their stage, whose files the format has; lost stages end the job",
    ),
    (
        "dataloader_type",
        ("single", "cyclic", None),
        None,
        UNSET,
        Answer.LESS,
        "after a loss other samples are read for the lost replica; lost workers stay away",
    ),
    (
        "log_straggler",
        (False,),
        False,
        False,
        Answer.LESS,
        "its report is left out; slow workers are found by the plugin",
    ),
    (
        "log_max_attention_logit",
        (False,),
        False,
        False,
        Answer.LESS,
        "it is left out; its maxima would leave lost replicas out",
    ),
    (
        "check_weight_hash_across_dp_replicas_interval",
        (None,),
        None,
        None,
        Answer.LESS,
        "it is left out; replicas are compared after every recovery",
    ),
    ("log_energy", (False,), False, UNSET, Answer.LESS, "the energy of a lost worker ends with it"),
    (
        "use_pytorch_profiler",
        (False,),
        False,
        UNSET,
        Answer.LESS,
        "a worker that is profiled when training begins goes on, others are never",
    ),
)
# Scripts that are carried without pipeline stages.
_ONE_STAGE = ("pretrain_t5",)
# Scripts of Megatron-LM that are not carried, by the beginning of their names.
_SCRIPTS = (
    ("pretrain_mamba", _MAMBA),
    ("pretrain_retro", "nobody has run it with the plugin"),
    ("pretrain_vision", "its model is not of Megatron-Core's Transformer layers alone"),
    ("pretrain_ict", "nobody has run it with the plugin"),
    ("train_rl", "rollouts are no samples of a dataset"),
)


def settings() -> tuple[Setting, ...]:
    """Return the table: what is refused last, Megatron-Core's own settings among it."""
    options = dict(_OPTIONS)
    changed = [
        Setting(
            name=name,
            carried=carried,
            default=default,
            becomes=becomes,
            answer=answer,
            says=says,
            flag=options.get(name, ""),
            where=_where(name),
        )
        for name, carried, default, becomes, answer, says in _CHANGED
    ]
    refused = [
        Setting(
            name=name,
            carried=carried,
            says=says,
            # Carried with less, and refused where it is neither.
            where=None if name == "ckpt_format" else _where(name),
        )
        for name, carried, says in _REFUSED
    ]
    named = {one.name for one in (*changed, *refused)}
    return (*changed, *refused, *(one for one in _of_core() if one.name not in named))


def _of_core() -> Iterator[Setting]:
    """The settings of Megatron-Core as arguments."""
    arguments, options = dict(_ARGUMENTS), dict(_OPTIONS)
    for one in megatron_settings.settings():
        name = arguments.get(one.name, one.name)
        yield Setting(
            name=name,
            # Layers that are offloaded are counted.
            carried=(0,) if name == "cpu_offloading_num_layers" else one.carried,
            says=one.says,
            flag=options.get(name, ""),
            where=partial(_among_experts, one.where) if one.of == EXPERTS else one.where,
            of=one.of,
            since=one.since,
        )


def _where(name: str) -> Callable[[Values], bool] | None:
    """Return among which arguments this one matters; None where it always does."""
    return {
        "dist_ckpt_optim_fully_reshardable": _saves_shards,
        "ckpt_format": _saves_stages,
        "data_sharding": lambda values: values.get("dataloader_type") == "cyclic",
        "use_pytorch_profiler": lambda values: bool(values.get("profile")),
        "sft": lambda values: bool(values.get("tensor_model_parallel_size", 1) != 1),
    }.get(name)


def _saves_shards(values: Values) -> bool:
    """Return whether checkpoints hold shards of a distributed optimizer that the script named."""
    return bool(values.get("save") and values.get("use_distributed_optimizer"))


def _saves_stages(values: Values) -> bool:
    """Return whether each stage has files of its own in a checkpoint."""
    is_torch = values.get("ckpt_format") == "torch"
    return bool(values.get("save")) and has_stages(values) and is_torch


def _among_experts(where: Callable[[Values], bool] | None, values: Values) -> bool:
    return bool(values.get("num_experts")) and (where is None or where(values))


def why_not(script: str, values: Values) -> str | None:
    """Return the sentence that refuses a script by its name; None where it is carried."""
    says = next((says for begins, says in _SCRIPTS if script.startswith(begins)), None)
    if says is None and script.startswith(_ONE_STAGE) and has_stages(values):
        says = "Megatron-LM has no stages of T5 itself; use data and tensor parallelism"
    if says is None:
        return None
    return f"the script is {script}, and elaswave_plugin does not carry it so: {says}"
