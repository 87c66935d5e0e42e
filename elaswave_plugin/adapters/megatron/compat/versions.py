"""The versions of Megatron-Core that are carried, and their differences for us.

A difference is looked up in the function itself, not in a version: what is there is what is called.
"""

import inspect
from collections.abc import Callable
from typing import Any

from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucket
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import schedules

from elaswave_plugin.adapters.patching import Hook, PatchRecord

VALID = ">=0.16.1,<0.20"
# The records of what a script of Megatron-LM calls.
SCRIPTS = ">=0.16.1,<0.18"
TORCH = ">=2.11,<2.16"


def record(
    target: str,
    make: Callable[[Any], Any],
    reason: str,
    *parameters: str,
    valid: str = VALID,
    gone: str | None = None,
    hook: Hook | None = None,
) -> PatchRecord:
    """Replace ``target`` by what ``make`` makes of it; ``parameters``: those it has to have.

    ``valid``: versions of Megatron-Core, where the target is not torch's; ``gone``: those that have
    no such target; ``hook``: set where the source has it.
    """
    of_megatron = target.startswith("megatron")
    return PatchRecord(
        target=target,
        reason=reason,
        distribution="megatron-core" if of_megatron else "torch",
        valid=valid if of_megatron else TORCH,
        make=make,
        parameters=parameters or None,
        gone=gone,
        hook=hook,
    )


def new_bucket(buffer: Any, **named: Any) -> _ParamAndGradBucket:
    """A bucket of a buffer with these arguments of 0.16."""
    known = inspect.signature(_ParamAndGradBucket).parameters
    # 0.17: where a parameter lies, which 0.16 reckons itself without the alignment, and the
    # parameters with gradients of another precision than the buffer's, which are refused.
    more = {"param_index_map": buffer.param_index_map, "params_with_extra_main_grads": []}
    return _ParamAndGradBucket(
        **named, **{name: value for name, value in more.items() if name in known}
    )


def backward_step(arrived: Any, output: Any, gradient: Any, config: Any) -> Any:
    """Megatron-Core's backward pass of one piece; the gradient of what arrived."""
    kind = (ModelType.encoder_or_decoder,)
    # 0.17: without the type of the model.
    takes_kind = "model_type" in inspect.signature(schedules.backward_step).parameters
    return schedules.backward_step(arrived, output, gradient, *(kind if takes_kind else ()), config)


def ask_again(*optimizers: Any) -> None:
    """Have what an optimizer asks of all workers once be asked in the next step.

    From 0.19 on, for which parameters the norm is taken apart. A newcomer has not asked yet, and
    an interrupted worker may have no answer; all have to ask together.
    """
    for one in optimizers:
        if hasattr(one, "_has_grad_norm_group_cache"):
            one._has_grad_norm_group_cache = None
