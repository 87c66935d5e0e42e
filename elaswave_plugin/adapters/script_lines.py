"""Finds the line of a script whose numbers follow the number of workers."""

import sys
from pathlib import Path
from types import FrameType

# What a script asks through: the width, or a sum or list of what the workers have.
_ASKED = (
    *("get_world_size", "num_processes", "world_size", "size"),
    *("get_data_parallel_world_size", "_get_data_parallel_world_size"),
    *("all_reduce", "all_reduce_coalesced", "inference_all_reduce", "reduce", "allreduce"),
    *("reduce_scatter", "reduce_scatter_tensor", "all_gather", "all_gather_into_tensor"),
    *("all_gather_object", "gather", "gather_object", "gather_for_metrics"),
    # Of micro-batches, as forward_backward of Megatron-Core returns them.
    "losses",
)
_THROUGH = (
    *("torch.", "deepspeed.comm.", "deepspeed.utils.", "accelerate."),
    *("transformers.training_args.", "typing_extensions.", "megatron.core.parallel_state."),
)
# Decorators of these.
_WRAPPERS = ("wrapper", "log_wrapper", "decorate_context")
_OWN = ("elaswave_plugin.",)
# Of these, whatever else asks does so for its own work.
_FRAMEWORKS = (
    *(*_OWN, "torch.", "deepspeed.", "accelerate.", "transformers.", "trl.", "peft."),
    "megatron.core.",
)


def asking_line(call: str | None = None) -> str | None:
    """Return "file:line (call)" of the script that has led here; None where a framework has.

    ``call``: the name of what it called, where a function of ours stands in its place.
    """
    frame: FrameType | None = sys._getframe()
    named = ""
    while frame is not None and _module_of(frame).startswith(_OWN):
        named, frame = frame.f_code.co_name, frame.f_back
    while frame is not None and _module_of(frame).startswith(_THROUGH):
        if frame.f_code.co_name not in _WRAPPERS:
            named = frame.f_code.co_name
        frame = frame.f_back
    named = call or named
    if frame is None or named not in _ASKED:
        return None
    module = _module_of(frame)
    if module.startswith(_FRAMEWORKS) or module.partition(".")[0] in sys.stdlib_module_names:
        return None
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} ({named})"


def _module_of(frame: FrameType) -> str:
    """Return the name of its module, with a dot behind it: of each call of a framework too."""
    return f"{frame.f_globals.get('__name__', '')}."
