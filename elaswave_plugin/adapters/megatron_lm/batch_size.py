"""The sizes of a run's global batches, and Megatron-LM's calculator of the present one."""

from typing import Any

from megatron.core import num_microbatches_calculator

# What the calculator sets as samples are consumed; the rest of it is as the arguments are.
_PRESENT = ("num_micro_batches", "current_global_batch_size", "current_running_global_batch_size")


def global_batch_sizes(args: Any) -> tuple[int, ...]:
    """Samples of every global batch, rising to the whole one."""
    whole: int = args.global_batch_size
    if not args.rampup_batch_size:
        return (whole,)
    start, increment, _ = map(int, args.rampup_batch_size)
    return tuple(range(start, whole + 1, increment))


def present_batch() -> dict[str, Any]:
    """Return the fields of the calculator that describe the present batch."""
    calculator = vars(num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR)
    return {name: calculator[name] for name in _PRESENT}


def go_back_to(batch: dict[str, Any]) -> None:
    """Have the calculator say what ``present_batch`` returned."""
    vars(num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR).update(batch)
