"""Has Accelerate count the processes of a DeepSpeed job on CPUs, which it takes for one alone.

Without a GPU, Accelerate knows no backend for a DeepSpeed job and takes every worker for the only
one, while DeepSpeed has made a group of all of them over gloo.
"""

import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from elaswave_plugin.adapters.deepspeed.compat.patches import processor_patches

_BACKEND = "gloo"


def count_processes() -> None:
    """Tell Accelerate of gloo; called once DeepSpeed has initialized torch.distributed."""
    state = sys.modules.get("accelerate.state")
    if state is None or torch.cuda.is_available() or "LOCAL_RANK" not in os.environ:
        return
    # The present question has found no backend; later ones go through the patch.
    shared = state.PartialState._shared_state
    if "backend" in shared and shared["backend"] is None:
        shared["backend"] = _BACKEND
    processor_patches(_finding_gloo).apply()


def _finding_gloo(native: Callable[..., tuple[Any, Any]]) -> Callable[..., tuple[Any, Any]]:
    def _prepare_backend(
        self: Any, cpu: bool = False, sagemaker_dp: bool = False, backend: str | None = None
    ) -> tuple[Any, Any]:
        found, kind = native(self, cpu, sagemaker_dp, backend)
        return (found or _BACKEND if not cpu else found), kind

    return _prepare_backend
