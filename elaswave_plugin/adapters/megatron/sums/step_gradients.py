"""Gradients of one attempt at a step: zero when a call trains its model, and reduced once."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from megatron.core.distributed import DistributedDataParallel

from elaswave_plugin.adapters.megatron.state.optimizer_of import chunks_of
from elaswave_plugin.around import around
from elaswave_plugin.errors import ConfigurationError


class StepGradients:
    """Watches what the script and its schedule do to the gradient buffers of its models."""

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
        # Reduced, and then added to by passes that trained another model.
        self._mixed: set[int] = set()
        # Those that a call of this attempt has trained.
        self._trained: set[int] = set()
        self._versions = self._present_versions()
        for number, chunk in enumerate(chunks):
            zero, reduce = partial(self._zero, number), partial(self._reduce, number)
            chunk.zero_grad_buffer = around(zero)(chunk.zero_grad_buffer)
            chunk.finish_grad_sync = around(reduce)(chunk.finish_grad_sync)

    def begin(self) -> None:
        """An attempt begins."""
        self._zeroed, self._reduced, self._mixed, self._trained = set(), set(), set(), set()

    def are_trained(self, model: Any) -> bool:
        """Return whether a call of this attempt has trained this model already."""
        return bool(self._trained & self._numbers(model))

    def are_reduced(self, model: Any) -> bool:
        """Return whether a call's gradients of this model stand there, which nobody has zeroed."""
        return bool(self._reduced & self._numbers(model))

    def zero(self, model: Any) -> None:
        """A call begins that trains this model: zero what the script has not zeroed since.

        An interrupted attempt, and passes that train another model, leave gradients behind.
        Raises ConfigurationError where those of an earlier call are there, reduced already.
        """
        self._versions = self._present_versions()
        for number in self._numbers(model):
            if number in self._reduced:
                raise ConfigurationError(
                    "forward_backward is called twice in one training step without zeroing the "
                    "gradients between, and the second call would reduce those of the first once "
                    "more: one call runs all micro-batches; else call optimizer.step(), then "
                    "chunk.zero_grad_buffer() and optimizer.zero_grad(), before the second one"
                )
            if number not in self._zeroed:
                self._chunks[number].zero_grad_buffer()

    def trained(self, model: Any) -> None:
        """The call is done: what its passes have added to gradients of other models is no one's."""
        own = self._numbers(model)
        self._trained |= own
        for number, version in enumerate(self._present_versions()):
            if number not in own and version != self._versions[number]:
                self._zeroed.discard(number)
                self._mixed |= {number} & self._reduced

    def check_update(self, model: Any) -> None:
        """An optimizer steps; raises ConfigurationError for gradients that another call added to.

        These are of the micro-batches that a worker has run, and others after a loss.
        """
        if self._mixed & self._numbers(model):
            raise ConfigurationError(
                "a model is updated whose gradients were reduced before forward_backward trained "
                "another one, which has added to them: call its optimizer.step() before that call, "
                "or requires_grad_(False) on its parameters around it"
            )

    def _numbers(self, model: Any) -> set[int]:
        own = chunks_of(model)
        return {number for number, chunk in enumerate(self._chunks) if chunk in own}

    def _present_versions(self) -> list[int]:
        """Count how often the gradients of each chunk have been written."""
        return [sum(one.grad_data._version for one in chunk.buffers) for chunk in self._chunks]

    def _zero(self, number: int, native: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        self._zeroed.add(number)
        self._reduced.discard(number)
        self._mixed.discard(number)
        native(*args, **kwargs)

    def _reduce(self, number: int, native: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if number in self._reduced:
            raise ConfigurationError(
                "finalize_model_grads is called in train_step, and forward_backward has called"
                " it already, which would add gradients up twice: delete that line"
            )
        self._reduced.add(number)
        if self._has_place():
            native(*args, **kwargs)
