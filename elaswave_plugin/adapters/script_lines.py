"""Finds the line of a script whose numbers follow the number of workers."""

import re
import sys
from pathlib import Path
from types import FrameType

# Names by which a script asks for the width, or for a sum or list of what the workers have; the
# last one is of micro-batches, as forward_backward of Megatron-Core returns them.
_ASKED = re.compile(
    r"_?(nested_|inference_)?(all_?)?(gather|reduce)(_scatter)?"
    r"(_(tensor|into_tensor|object|coalesced|for_metrics|autograd|base|fn))*"
    r"|_?(get_)?(\w*data_parallel_|(seq_)?dp_)?world_size|num_processes|size|get_pg_size"
    r"|__len__|get_process_group_ranks|get_total_train_batch_size|distributed_concat|losses"
)
# Decorators of these.
_WRAPPERS = ("wrapper", "log_wrapper", "decorate_context")
_OURS = "elaswave_plugin."
# Of these, whatever else asks does so for its own work.
_FRAMEWORKS = (
    *(_OURS, "torch.", "deepspeed.", "accelerate.", "transformers.", "trl.", "peft."),
    *("megatron.", "typing_extensions."),
)


def asking_line(call: str | None = None) -> str | None:
    """Return "file:line (call)" of the script that has led here; None where a framework has.

    ``call``: the name of what it called, where a function of ours stands in its place.
    """
    frame: FrameType | None = sys._getframe()
    named = ""
    while frame is not None and (module := _module_of(frame)).startswith(_FRAMEWORKS):
        if not module.startswith(_OURS):
            call = None
        if (name := frame.f_code.co_name) not in _WRAPPERS:
            named = call or name
        frame = frame.f_back
    if frame is None or not _ASKED.fullmatch(named):
        return None
    if _module_of(frame).partition(".")[0] in sys.stdlib_module_names:
        return None
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} ({named})"


def _module_of(frame: FrameType) -> str:
    """Return the name of its module, with a dot behind it: of each call of a framework too."""
    return f"{frame.f_globals.get('__name__', '')}."
