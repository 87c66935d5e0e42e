"""Arguments of Megatron-LM that are not carried, refused by name before the job is joined."""

import argparse

from elaswave_plugin.errors import ConfigurationError

# Each must be as named here; what they would need is said where they are refused.
CARRIED: tuple[tuple[str, object], ...] = (
    ("use_distributed_optimizer", True),
    ("context_parallel_size", 1),
    ("expert_model_parallel_size", 1),
    ("use_megatron_fsdp", False),
    ("use_torch_fsdp2", False),
    ("use_tp_pp_dp_mapping", False),
    ("ckpt_format", "torch_dist"),
    ("async_save", False),
    ("non_persistent_save_interval", None),
    ("iterations_to_skip", None),
    ("phase_transition_iterations", None),
    ("dataloader_type", ("single", "cyclic")),
    ("hybrid_context_parallel", False),
    ("perform_rl_step", False),
    ("sft", False),
    ("skip_train", False),
    ("inprocess_restart", False),
    ("adlr_autoresume", False),
    ("log_straggler", False),
    ("log_params_norm", False),
    # It sums over all workers where training ends, when nobody recovers any more.
    ("log_energy", False),
    # A worker whose rank comes to be profiled has made no profiler.
    ("use_pytorch_profiler", False),
    # Weights are changed beside the optimizer, by maxima over replicas that a free worker has not.
    ("qk_clip", False),
    ("log_max_attention_logit", False),
    ("enable_ft_package", False),
    ("save_dgrads_interval", None),
    ("save_wgrads_interval", None),
    ("check_weight_hash_across_dp_replicas_interval", None),
    # A dense checkpoint is made one of experts by a second model, before training.
    ("moe_use_upcycling", False),
    ("cuda_graph_impl", "none"),
    ("overlap_param_gather_with_optimizer_step", False),
    ("reuse_grad_buf_for_mxfp8_param_ag", False),
    ("data_parallel_random_init", False),
)


def check_arguments(args: argparse.Namespace) -> None:
    """Raise ConfigurationError for the first argument that a job with --elaswave cannot carry."""
    for name, wanted in CARRIED:
        if not hasattr(args, name):
            continue
        seen = getattr(args, name)
        allowed = wanted if isinstance(wanted, tuple) else (wanted,)
        if seen not in allowed and seen != []:
            raise ConfigurationError(
                f"--{name.replace('_', '-')} is {seen}, and elaswave_plugin carries "
                f"{' and '.join(map(str, allowed))}; change it to use --elaswave"
            )
