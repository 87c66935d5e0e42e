"""The numbers of workers that a script can begin with, as far as its options tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from elaswave_plugin.launch.options import deepspeed_config, peek

_PARALLEL = (
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--context-parallel-size",
)
_BATCH, _MICRO = "--global-batch-size", "--micro-batch-size"
# DeepSpeed's names: samples of a step are micro-batch x accumulation x workers.
_SAMPLES, _EACH, _TIMES = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)


def fits(args: Sequence[str], workers: int) -> bool:
    """Return whether layout and batch allow a start on this number of workers.

    That is Megatron's: whole model-parallel groups, and a global batch of whole micro-batches for
    each replica; and DeepSpeed's, of the file of --deepspeed_config. True where nothing says so.
    """
    replica = 1
    for option in _PARALLEL:
        replica *= _number(peek(args, option)) or 1
    if workers % replica:
        return False
    batch, micro = _number(peek(args, _BATCH)), _number(peek(args, _MICRO)) or 1
    if batch is not None and batch % (micro * (workers // replica)):
        return False
    return _fits_deepspeed(deepspeed_config(args), workers // replica)


def _fits_deepspeed(config: Mapping[str, Any], replicas: int) -> bool:
    samples, each, times = (_number(config.get(name)) for name in (_SAMPLES, _EACH, _TIMES))
    if samples is None:
        return True
    if each is not None and times is not None:
        return samples == each * times * replicas
    return samples % ((each or times or 1) * replicas) == 0


def _number(value: object) -> int | None:
    """Return a positive whole number; None for everything else, such as "auto"."""
    text = str(value)
    return int(text) if text.isdecimal() and int(text) > 0 else None
