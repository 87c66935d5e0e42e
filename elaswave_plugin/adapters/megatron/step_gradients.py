"""Gradients of one attempt at a step: zero when a call begins that trains, and reduced once."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from megatron.core.distributed import DistributedDataParallel

from elaswave_plugin.errors import ConfigurationError


class StepGradients:
    """Watches what the script and its schedule do to the gradient buffers of its model."""

    def __init__(
        self,
        chunks: Sequence[DistributedDataParallel],
        *,
        has_place: Callable[[], bool] = lambda: True,
    ) -> None:
        """``has_place()``: whether this worker has gradients at all."""
        self._chunks = chunks
        self._has_place = has_place
        self._zeroed: set[int] = set()
        self._reduced: set[int] = set()
        for number, chunk in enumerate(chunks):
            chunk.zero_grad_buffer = self._zeroing(number, chunk.zero_grad_buffer)
            chunk.finish_grad_sync = self._reducing(number, chunk.finish_grad_sync)

    def begin(self) -> None:
        """An attempt begins."""
        self._zeroed, self._reduced = set(), set()

    def zero(self) -> None:
        """Zero what the script has not zeroed since; an interrupted attempt leaves some behind.

        Raises ConfigurationError where those of an earlier call are there, reduced already.
        """
        for number, chunk in enumerate(self._chunks):
            if number in self._reduced:
                raise ConfigurationError(
                    "forward_backward is called twice in one training step without zeroing the "
                    "gradients between, and the second call would reduce those of the first once "
                    "more: one call runs all micro-batches; else call optimizer.step(), then "
                    "chunk.zero_grad_buffer() and optimizer.zero_grad(), before the second one"
                )
            if number not in self._zeroed:
                chunk.zero_grad_buffer()

    def _zeroing(self, number: int, native: Callable[..., None]) -> Callable[..., None]:
        @wraps(native)
        def zero_grad_buffer(*args: Any, **kwargs: Any) -> None:
            self._zeroed.add(number)
            self._reduced.discard(number)
            native(*args, **kwargs)

        return zero_grad_buffer

    def _reducing(self, number: int, native: Callable[..., None]) -> Callable[..., None]:
        @wraps(native)
        def finish_grad_sync(*args: Any, **kwargs: Any) -> None:
            if number in self._reduced:
                raise ConfigurationError(
                    "finalize_model_grads is called in train_step, and forward_backward has called"
                    " it already, which would add gradients up twice: delete that line"
                )
            self._reduced.add(number)
            if self._has_place():
                native(*args, **kwargs)

        return finish_grad_sync
