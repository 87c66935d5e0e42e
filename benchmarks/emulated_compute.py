"""Runs a Megatron-Core script whose layers take a given time, spent asleep; for measurements only.

    elaswave run ... benchmarks/emulated_compute.py MILLISECONDS SCRIPT ARGUMENTS...

Every transformer layer sleeps so long in its forward pass and twice as long in its backward pass,
as a device would be busy. Communication, schedule and recovery are real.
"""

import functools
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer


class SlowBackward(torch.autograd.Function):
    """The identity, whose backward pass takes ``seconds``."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, seconds: float) -> torch.Tensor:
        """Pass on."""
        ctx.seconds = seconds
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Sleep, and pass on."""
        time.sleep(ctx.seconds)
        return grads[0], None


def slow_down(forward_s: float) -> None:
    """Have all layers take their time from now on, also those that come to a stage later."""
    forward = TransformerLayer.forward

    @functools.wraps(forward)
    def slowly(layer: TransformerLayer, *args: Any, **kwargs: Any) -> Any:
        time.sleep(forward_s)
        hidden, *rest = forward(layer, *args, **kwargs)
        return SlowBackward.apply(hidden, 2 * forward_s), *rest

    replaced: Any = TransformerLayer
    replaced.forward = slowly


if __name__ == "__main__":
    milliseconds, script, *arguments = sys.argv[1:]
    slow_down(1e-3 * float(milliseconds))
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")
