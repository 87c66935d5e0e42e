"""Joins the job, and checks that the groups that a script has made are the job's."""

import os
import traceback
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from elaswave_plugin.adapters.megatron.unsupported import check_growth
from elaswave_plugin.communicator.process_group import GroupTable
from elaswave_plugin.config import ElasticConfig
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.ipc.environment import read_reserve
from elaswave_plugin.recovery.worker import Worker
from elaswave_plugin.tracking.sinks import check_sinks
from elaswave_plugin.trainer.fatal import explain_errors
from elaswave_plugin.words import NAME

_NEED_A_WORLD = ("parallel_state.py", "distributed_c10d.py")
INIT = "torch.distributed.init_process_group(**job.process_group())"


def leave_start_to_script() -> None:
    """Have ``init_process_group`` join no job by itself: the script's lines say whether it does."""
    leave = vars(vars(dist)["init_process_group"]).get("__elaswave__")
    if leave is not None:
        leave()


def check_no_world() -> None:
    """Raise ConfigurationError where torch.distributed has its groups before the job's."""
    if dist.is_initialized():
        joined = ", by which a script without a line of ours joins the job"
        raise ConfigurationError(
            f"torch.distributed is initialized already, on {dist.get_backend()!r}"
            f"{joined if dist.get_backend() == NAME else ''}: delete that line, and write {INIT}"
            " behind attach"
        )


def name_what_is_missing(groups: GroupTable) -> None:
    """Have an error that ends the script for want of torch.distributed's world say what to write.

    Megatron-Core asserts that there is one, without a message.
    """

    def explain(error: BaseException) -> ConfigurationError | None:
        frames = traceback.extract_tb(error.__traceback__)
        needs_one = bool(frames) and Path(frames[-1].filename).name in _NEED_A_WORLD
        if groups.world is not None or not needs_one:
            return None
        return ConfigurationError(f"torch.distributed is not initialized: write {INIT}")

    explain_errors(explain)


def join(
    config: ElasticConfig,
    *,
    width: int,
    model_parallel: tuple[int, int],
    num_microbatches: int,
    last_checkpoint: str,
) -> Worker:
    """Join the job; raises ConfigurationError outside an agent, and for settings that do not fit.

    ``width``: replicas at the launch; ``num_microbatches``: of the smallest batch;
    ``last_checkpoint``: how a script has one written.
    """
    if model_parallel == (1, 1):
        config.check_without_stages()
    config.check_last_checkpoint(last_checkpoint)
    reserve = read_reserve(os.environ)
    check_growth(
        config,
        reserve,
        width=width,
        model_parallel=model_parallel,
        num_microbatches=num_microbatches,
    )
    config.check_slots(int(os.environ.get("WORLD_SIZE", "1")) + reserve)
    check_sinks(config)
    return Worker(config=config, environ=os.environ, model_parallel=model_parallel)


def check_world(groups: GroupTable, *, model_parallel: tuple[int, int]) -> None:
    """Raise ConfigurationError where a group is not the job's, or of other sizes than its own.

    ``model_parallel``: the sizes of tp and pp that the arguments name.
    """
    if not dist.is_initialized():
        raise ConfigurationError(f"torch.distributed is not initialized: write {INIT}")
    if groups.world is None:
        raise ConfigurationError(
            f"torch.distributed runs on {dist.get_backend()!r}, whose groups cannot lose a member: "
            f"write {INIT}"
        )
    ours = groups.groups
    made: Any = parallel_state.get_data_parallel_group(with_context_parallel=True)
    if not any(made is one for one in ours):
        raise ConfigurationError(
            "Megatron-Core's groups were made before the job's: call "
            f"initialize_model_parallel(...) behind {INIT}"
        )
    seen = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
    )
    if seen != model_parallel:
        raise ConfigurationError(
            f"initialize_model_parallel made tensor and pipeline parallel sizes {seen}, and the "
            f"arguments name {model_parallel}: set args.tensor_model_parallel_size and "
            "args.pipeline_model_parallel_size before attach(args)"
        )
