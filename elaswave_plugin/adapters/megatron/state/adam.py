"""The Adams that are carried: torch's own, and FusedAdam of Transformer Engine and of Apex.

Megatron-Core makes the first of them that it can import (megatron/core/optimizer/__init__.py). All
keep exp_avg and exp_avg_sq by these names. Torch counts steps beside each tensor, the others once a
parameter group, from the group's first step on.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from megatron.core.optimizer import distrib_optimizer

_TORCH = (torch.optim.Adam, torch.optim.AdamW)
# With `capturable` steps are counted on the GPU, which nobody has tried here.
_TORCH_WITHOUT = ("fused", "amsgrad", "capturable")
# What FusedAdam can do and is not carried, by its attribute, with the value that is; a version that
# lacks the attribute cannot do it. `store_param_remainders` asks for `master_weights`.
_FUSED = (
    ("capturable", False),
    ("master_weights", False),
    ("use_decoupled_grad", False),
    ("exp_avg_dtype", torch.float32),
    ("exp_avg_sq_dtype", torch.float32),
)


def problems(inner: torch.optim.Optimizer) -> Iterator[tuple[str, object, object]]:
    """Yield what is not carried of an optimizer: setting, value seen, value carried."""
    if isinstance(inner, _TORCH):
        for name in _TORCH_WITHOUT:
            if any(group.get(name) for group in inner.param_groups):
                yield f"{name} of {type(inner).__name__}", True, False
    elif isinstance(inner, distrib_optimizer.Adam):
        for name, carried in _FUSED:
            seen = getattr(inner, name, carried)
            # Some versions say None for False.
            if (seen or False) != carried:
                yield f"{name} of {type(inner).__name__}", seen, carried
    else:
        wanted = "torch Adam and AdamW, and FusedAdam of Transformer Engine and Apex"
        yield "the inner optimizer", type(inner).__name__, wanted


def fresh_state(
    inner: torch.optim.Optimizer, moments: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The state of a parameter with these moments before the first step."""
    return {"step": torch.tensor(0.0), **moments} if isinstance(inner, _TORCH) else dict(moments)


def fit_groups(inner: torch.optim.Optimizer) -> None:
    """Parameters of the groups have come or gone.

    Apex walks a list of masters beside each group's parameters, None where it keeps no master, and
    would leave out the parameters beyond its end.
    """
    for beside, group in zip(
        getattr(inner, "param_groups_master", ()), inner.param_groups, strict=False
    ):
        beside["params"] = [None] * len(group["params"])


def applied_steps(inner: torch.optim.Optimizer) -> int:
    """The step count of whatever was updated most often; 0 where nothing was."""
    counting = inner.state.values() if isinstance(inner, _TORCH) else inner.param_groups
    return max((int(one["step"]) for one in counting if "step" in one), default=0)


def settings_of(inner: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the settings of each group, beside its parameters.

    The count that a load leaves in the groups of torch's Adam, which counts by parameter, is none.
    """
    beside = {"params", "step"} if isinstance(inner, _TORCH) else {"params"}
    return [
        {name: value for name, value in group.items() if name not in beside}
        for group in inner.param_groups
    ]


def set_applied_steps(inner: torch.optim.Optimizer, count: int) -> None:
    """Count on from here, everywhere: also in groups of which this worker owns nothing yet."""
    if isinstance(inner, _TORCH):
        for state in inner.state.values():
            state["step"].fill_(float(count))
    else:
        for group in inner.param_groups:
            group["step"] = count
