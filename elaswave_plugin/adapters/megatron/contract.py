"""Functions and losses that a training script gives to the verbs of a job."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from elaswave_plugin.errors import ConfigurationError

Result = TypeVar("Result")
ForwardBackward = Callable[..., list[Any]]
# One a micro-batch: (sum, tokens), a tensor of the two, one mean, or a dict with one of these.
Losses = Sequence[Any]
# The norm is None where a loss scaler skipped the step.
TrainStep = Callable[[], tuple[Losses, float | None]]


def num_microbatches_of(*, global_batch_size: int, micro_batch_size: int, width: int) -> int:
    """Micro-batches of a step; raises ConfigurationError unless they divide evenly."""
    if global_batch_size % micro_batch_size:
        raise ConfigurationError(
            f"global batch size {global_batch_size} is not a multiple of the micro-batch size "
            f"{micro_batch_size}; change one of them"
        )
    count = global_batch_size // micro_batch_size
    if width > count:
        raise ConfigurationError(
            f"{width} workers for {count} micro-batches a step; use at most {count} workers or a "
            "larger global batch"
        )
    if count % width:
        raise ConfigurationError(
            f"{count} micro-batches a step cannot be dealt evenly to {width} workers at launch; "
            f"make the global batch a multiple of {width * micro_batch_size}"
        )
    return count
