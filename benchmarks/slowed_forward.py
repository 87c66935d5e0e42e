"""Runs a Megatron-Core script in which a sleep makes the layers of one worker slower.

    elaswave run ... benchmarks/slowed_forward.py SLOT FACTOR STEP SCRIPT ARGUMENTS...

Each forward pass of a layer in worker SLOT takes FACTOR times as long as it did, from STEP on.
"""

import functools
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

from megatron.core.transformer.transformer_layer import TransformerLayer

from elaswave_plugin.loops.guarded_steps import GuardedSteps


def slow_down(factor: float, step: int) -> None:
    """Have every layer of this process sleep after its forward pass, from ``step`` on."""
    forward, begin = TransformerLayer.forward, GuardedSteps.begin
    now = [0]

    @functools.wraps(begin)
    def noting(steps: GuardedSteps) -> None:
        begin(steps)
        now[0] = steps.worker.completed

    @functools.wraps(forward)
    def slowly(layer: TransformerLayer, *args: Any, **kwargs: Any) -> Any:
        began_s = time.perf_counter()
        found = forward(layer, *args, **kwargs)
        if now[0] >= step:
            time.sleep((factor - 1) * (time.perf_counter() - began_s))
        return found

    replaced: Any = TransformerLayer
    replaced.forward = slowly
    steps: Any = GuardedSteps
    steps.begin = noting


if __name__ == "__main__":
    slot, factor, step, script, *arguments = sys.argv[1:]
    if os.environ["ELASWAVE_SLOT"] == slot:
        slow_down(float(factor), int(step))
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")
