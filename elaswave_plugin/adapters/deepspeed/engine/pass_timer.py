"""Times the forward passes of an engine's module, by which workers are compared.

In ZeRO 0 to 2 a forward pass waits for nobody. In ZeRO-3 it gathers weights, so that a slow worker
makes all passes slow: there nothing is timed.
"""

from typing import Any

import torch

from elaswave_plugin.adapters.pass_hooks import PassHooks
from elaswave_plugin.recovery.stopwatch import Mark, Stopwatch


class PassTimer:
    """Stands around the passes of one module in training: the first one after each batch."""

    def __init__(self, module: torch.nn.Module, stopwatch: Stopwatch, hooks: PassHooks) -> None:
        self._stopwatch = stopwatch
        stopwatch.on_gpu = next(module.parameters()).is_cuda
        # Samples of the batch that was served last, and tokens of all of them.
        self._served: tuple[int, int] | None = None
        self._began: Mark | None = None
        hooks.add(module, self._begin, self._end)

    def serve(self, samples: int, tokens: int) -> None:
        """A batch of the own share comes next."""
        self._served = samples, tokens

    def _begin(self, module: torch.nn.Module) -> None:
        counts = module.training and torch.is_grad_enabled() and self._served is not None
        self._began = self._stopwatch.mark() if counts else None

    def _end(self, output: Any) -> None:
        if self._began is None or self._served is None:
            return
        (samples, tokens), self._served = self._served, None
        each = max(1, tokens // samples)
        self._stopwatch.lap_whole(self._began, samples=samples, tokens=each)
        self._began = None
