"""The patch records that let Megatron-LM's scripts run without a GPU, on top of the core's.

megatron/training has no CPU path either: it asserts CUDA, makes its groups and seeds its generators
only where it counts a device, and builds and warms up CUDA kernels.
"""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from elaswave_plugin.adapters.megatron.compat.cpu_patches import cpu_patches
from elaswave_plugin.adapters.megatron_lm.records import record
from elaswave_plugin.adapters.patching import PatchRecord, PatchSet

_NO_OLD_GPU = 10


def _nothing(original: Any) -> Any:
    return lambda *args, **kwargs: None


def _without_cuda(original: Callable[..., Any]) -> Callable[..., Any]:
    return partial(original, allow_no_cuda=True)


def _as_with_a_device(original: Callable[..., Any]) -> Callable[..., Any]:
    one = PatchRecord(
        target="torch.cuda:device_count",
        reason="groups and generators are made only where a device is counted",
        distribution="torch",
        valid=">=2.13,<2.16",
        make=lambda count: lambda: 1,
    )

    @wraps(original)
    def counting_one(*args: Any, **kwargs: Any) -> Any:
        patches = PatchSet([one])
        patches.apply()
        try:
            return original(*args, **kwargs)
        finally:
            patches.undo()

    return counting_one


def lm_cpu_patches() -> PatchSet:
    """All records for a script on CPU, those of Megatron-Core included."""
    device = "groups and generators are made only where a device is counted"
    kernels = "it builds or warms up CUDA kernels"
    return PatchSet(
        [
            *cpu_patches().records,
            record(
                "megatron.training.training:initialize_megatron",
                _without_cuda,
                "it asserts that there is CUDA",
                "extra_args_provider",
                "args_defaults",
                "ignore_unknown_args",
                "allow_no_cuda",
                "skip_mpu_initialization",
                "get_embedding_ranks",
                "get_position_embedding_ranks",
                "parsed_args",
                "store",
            ),
            record(
                "megatron.training.initialize:_initialize_distributed",
                _as_with_a_device,
                device,
                "get_embedding_ranks",
                "get_position_embedding_ranks",
                "store",
            ),
            record(
                "megatron.training.initialize:_set_random_seed",
                _as_with_a_device,
                device,
                "seed_",
                "data_parallel_random_init",
                "te_rng_tracker",
                "inference_rng_tracker",
                "use_cudagraphable_rng",
            ),
            record(
                "megatron.training.arguments:get_device_arch_version",
                lambda original: lambda: _NO_OLD_GPU,
                "older GPUs need CUDA_DEVICE_MAX_CONNECTIONS",
            ),
            record("megatron.training.training:set_jit_fusion_options", _nothing, kernels),
            record("megatron.legacy.fused_kernels:load", _nothing, kernels, "args", gone=">=0.17"),
        ]
    )
