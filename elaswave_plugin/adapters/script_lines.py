"""Finds the line of a script whose numbers follow the number of workers."""

import re
import sys
from collections.abc import Iterator
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
# Names by which a script calls other workers; who only asks for the width calls nobody.
_CALLED = re.compile(
    r"(all_?)?(gather|reduce)(_scatter)?(_(tensor|into_tensor|object|coalesced|base))*"
    r"|(monitored_)?barrier|broadcast(_object_list)?|scatter(_object_list)?|all_to_all(_single)?"
)
# Decorators of these.
_WRAPPERS = ("wrapper", "log_wrapper", "decorate_context")
_OURS, _AROUND = "elaswave_plugin.", "elaswave_plugin.around."
# Of these, whatever else asks does so for its own work.
_FRAMEWORKS = (
    *(_OURS, "torch.", "deepspeed.", "accelerate.", "transformers.", "trl.", "peft."),
    *("megatron.", "typing_extensions."),
)


def asking_line(call: str | None = None) -> str | None:
    """Return "file:line (call)" of the script that has led here; None where a framework has.

    ``call``: the name of what it called, where a function of ours stands in its place.
    """
    frame, named = _calling_frame(call)
    return _line(frame, named) if _ASKED.fullmatch(named) else None


def bare_collective() -> str | None:
    """Return the line as `asking_line` does, if it calls other workers outside of DeepSpeed."""
    frame, named = _calling_frame(None)
    above = frame
    while above is not None:
        if _module_of(above).startswith("deepspeed."):
            return None
        above = above.f_back
    return _line(frame, named) if _CALLED.fullmatch(named) else None


def script_frames() -> Iterator[FrameType]:
    """Yield the frames of the script and of libraries without an adapter, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not (_module_of(frame).startswith(_FRAMEWORKS) or _is_standard(frame)):
            yield frame
        frame = frame.f_back


def _calling_frame(call: str | None) -> tuple[FrameType | None, str]:
    """Find the innermost frame that is no framework's, and the name of what it called."""
    frame: FrameType | None = sys._getframe()
    named = ""
    while frame is not None and (module := _module_of(frame)).startswith(_FRAMEWORKS):
        if not module.startswith(_OURS):
            call = None
        name = frame.f_code.co_name
        if module == _AROUND:
            # It is called by the name of the function that it stands for.
            name = getattr(frame.f_locals["function"], "__name__", name)
        if name not in _WRAPPERS:
            named = call or name
        frame = frame.f_back
    return frame, named


def _line(frame: FrameType | None, named: str) -> str | None:
    if frame is None or _is_standard(frame):
        return None
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} ({named})"


def _is_standard(frame: FrameType) -> bool:
    """Return whether it is of Python's own library."""
    return _module_of(frame).partition(".")[0] in sys.stdlib_module_names


def _module_of(frame: FrameType) -> str:
    """Return the name of its module, with a dot behind it: of each call of a framework too."""
    return f"{frame.f_globals.get('__name__', '')}."
