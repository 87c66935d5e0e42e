"""Runs a Megatron-Core script whose layers take a given time, spent asleep; for measurements only.

    elaswave run ... emulated_compute.py MILLISECONDS SCRIPT ARGUMENTS...

Every transformer layer takes so long in its forward pass and twice as long in its backward pass:
it sleeps for what its own small tensors leave of that, as if a device were busy. Half of a backward
pass is weight gradients, and comes when they do. Communication, schedule and recovery are real.
"""

import functools
import runpy
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer

from elaswave_plugin.adapters.megatron.step.weight_gradients import Piece, WeightGradients


class Owed:
    """Seconds of weight gradients that are put off, by piece."""

    def __init__(self) -> None:
        self._open: Piece | None = None
        self._seconds: dict[Piece, float] = {}

    def put_off(self, seconds: float) -> float:
        """Return how much of these seconds is to be taken now; none where a piece puts them off."""
        if self._open is None:
            return seconds
        self._seconds[self._open] += seconds
        return 0.0

    def watch(self) -> None:
        """Know from now on in which pieces weight gradients are put off, and when they come."""
        put_off, compute = WeightGradients.put_off, WeightGradients.compute

        @contextmanager
        def putting_off(gradients: WeightGradients, piece: Piece) -> Iterator[None]:
            self._open, self._seconds[piece] = piece, 0.0
            try:
                with put_off(gradients, piece):
                    yield
            finally:
                self._open = None

        def computing(gradients: WeightGradients, piece: Piece) -> None:
            began_s = time.perf_counter()
            compute(gradients, piece)
            sleep_until(began_s + self._seconds.pop(piece))

        replaced: Any = WeightGradients
        replaced.put_off, replaced.compute = putting_off, computing


class _Pass:
    """The backward pass of one layer for one micro-batch: from its output to its input."""

    def __init__(self, seconds: float, owed: Owed) -> None:
        self._seconds, self._owed = seconds, owed
        self._began_s = 0.0

    def begin(self) -> None:
        """Note the time."""
        self._began_s = time.perf_counter()

    def end(self) -> None:
        """Sleep for what is left, without the weight gradients where they are put off."""
        seconds = self._seconds / 2 + self._owed.put_off(self._seconds / 2)
        sleep_until(self._began_s + seconds)


class _Then(torch.autograd.Function):
    """The identity, whose backward pass does something else as well."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, call: Callable[[], None]) -> torch.Tensor:
        """Pass on."""
        ctx.call = call
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Do it, and pass on."""
        ctx.call()
        return grads[0], None


def _then(hidden: torch.Tensor, call: Callable[[], None]) -> torch.Tensor:
    function: Any = _Then
    passed: torch.Tensor = function.apply(hidden, call)
    return passed


def sleep_until(end_s: float) -> None:
    """Return when the performance counter is there."""
    time.sleep(max(0.0, end_s - time.perf_counter()))


def take(seconds: float, owed: Owed, forward: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a layer's ``forward`` so that it takes so long, and its backward twice as long."""
    began_s = time.perf_counter()
    one = _Pass(2 * seconds, owed)
    if args:
        args = _then(args[0], one.end), *args[1:]
    else:
        kwargs["hidden_states"] = _then(kwargs["hidden_states"], one.end)
    hidden, *rest = forward(layer, *args, **kwargs)
    sleep_until(began_s + seconds)
    return _then(hidden, one.begin), *rest


def slow_down(forward_s: float) -> None:
    """Have all layers take their time from now on, also those that come to a stage later."""
    forward, owed = TransformerLayer.forward, Owed()
    owed.watch()

    @functools.wraps(forward)
    def slowly(layer: TransformerLayer, *args: Any, **kwargs: Any) -> Any:
        return take(forward_s, owed, forward, layer, *args, **kwargs)

    replaced: Any = TransformerLayer
    replaced.forward = slowly


if __name__ == "__main__":
    milliseconds, script, *arguments = sys.argv[1:]
    slow_down(1e-3 * float(milliseconds))
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")
