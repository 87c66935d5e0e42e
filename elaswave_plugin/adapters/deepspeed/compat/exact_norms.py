"""Norms of gradients that do not depend on how many workers there are, for exact mode."""

from collections.abc import Iterable
from math import isfinite
from typing import Any

import torch

from elaswave_plugin.adapters.deepspeed.compat.patches import DEEPSPEED, VALID
from elaswave_plugin.adapters.grad_norm import canonical_norm
from elaswave_plugin.adapters.patching import PatchRecord, PatchSet


def exact_patches() -> PatchSet:
    """Return the patches that exact mode adds; applied before the engine is built."""
    return PatchSet(
        [
            PatchRecord(
                target=(
                    "deepspeed.runtime.zero.stage_1_and_2:"
                    "DeepSpeedZeroOptimizer.get_grad_norm_direct"
                ),
                reason="a sum of norms of partitions depends on the cut, an integer sum does not",
                distribution=DEEPSPEED,
                valid=VALID,
                parameters=("self", "gradients", "params", "norm_type"),
                make=lambda native: _canonical,
            ),
            PatchRecord(
                # As bound in engine.py, for stage 0.
                target="deepspeed.runtime.engine:clip_grad_norm_",
                reason="the mean of equal norms over the workers depends on their number",
                distribution=DEEPSPEED,
                valid=VALID,
                parameters=("parameters", "max_norm", "norm_type", "mpu"),
                make=lambda native: _clipped,
            ),
        ]
    )


def _canonical(optimizer: Any, gradients: Any, params: Any, norm_type: float = 2) -> torch.Tensor:
    """Return the norm of all partitions' gradients; -1 for one that is not finite."""
    norm = canonical_norm(gradients, optimizer.dp_process_group)
    return torch.tensor(norm if isfinite(norm) else -1.0, device=optimizer.device)


def _clipped(
    parameters: Iterable[torch.nn.Parameter], max_norm: float, norm_type: float = 2, mpu: Any = None
) -> torch.Tensor:
    """Clip gradients that all workers have, each by itself."""
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
