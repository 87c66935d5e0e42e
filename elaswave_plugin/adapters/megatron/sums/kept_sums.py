"""The gradient sums of a struck step that a survivor has, from which its redo goes on.

A loss takes what the lost worker had added up, and nothing of the others' sums. A survivor
completes the backward pass that it is in, and then runs only what is missing. A reduction writes
over its own shard of each bucket, which is copied before. Each worker decides by itself whether it
goes on: the deal and the order of sums are the same either way.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from megatron.core.distributed import DistributedDataParallel
from torch.autograd import Variable

from elaswave_plugin.around import around
from elaswave_plugin.core.step.dataflow import Dataflow
from elaswave_plugin.core.step.sum_order import Contribution
from elaswave_plugin.recovery.relief import words_of
from elaswave_plugin.recovery.worker import Worker

Result = TypeVar("Result")


class _Shard(NamedTuple):
    """This worker's shard of a bucket, as it was before the reduction; ``factor``: still due."""

    place: torch.Tensor
    copy: torch.Tensor
    factor: float


class KeptSums:
    """The sum in the gradient buffers of a model, by the micro-batches of a step."""

    def __init__(self, worker: Worker, chunks: Sequence[DistributedDataParallel]) -> None:
        self._worker = worker
        self._buffers = [buffer for chunk in chunks for buffer in chunk.buffers]
        self.is_as_begun: Callable[[int], bool] | None = None
        """Whether passes of a step have changed nothing else that is carried; None: keep none."""
        self.forget()
        for chunk in chunks:
            chunk.zero_grad_buffer = around(self._zero)(chunk.zero_grad_buffer)
            chunk.scale_gradients = around(self._scale)(chunk.scale_gradients)

    def forget(self) -> None:
        """Nothing of what the buffers hold is kept."""
        self.contribution: Contribution | None = None
        self.reports: list[Any] = []
        """Those of the micro-batches that are complete."""
        self.tokens: list[Any] = []
        self.room: list[torch.Tensor] | None = None
        """Other gradient buffers, for what is added up beside what is kept."""
        # The micro-batches that the call that runs does not run again.
        self._earlier: tuple[int, ...] = ()
        self._step = self._epoch = -1
        # When passes began that go on, and how long it took to make what is kept.
        self._began_s = self._made_s = 0.0
        # Why nothing is kept, if so.
        self._why_not: str | None = None
        self._in_backward = self._counts = False
        self._shards: dict[int, _Shard] = {}
        # Buckets that were multiplied by their factor.
        self._scaled: set[int] = set()
        self._versions: list[int] | None = None

    @property
    def done(self) -> tuple[int, ...]:
        """The micro-batches that are complete."""
        kept = self.contribution
        return () if kept is None else kept.microbatches[: len(self.reports)]

    @property
    def goes_on(self) -> bool:
        """True while a call goes on from what is kept."""
        return bool(self._earlier)

    # ---- while a step runs ----------------------------------------------------------------------

    def begin(self, contribution: Contribution) -> None:
        """Passes begin that add up a contribution in the buffers, which is to stay there."""
        if self.is_as_begun is None:
            return
        step, epoch = self._worker.completed, self._worker.view.epoch
        if (self._step, self._epoch) == (step, epoch):
            self._why_not = "forward_backward trains the model more than once in a step"
            return
        self.forget()
        self.contribution = contribution
        self._step, self._epoch, self._counts = step, epoch, True
        self._began_s = time.monotonic()

    def noted(
        self, forward_step: Callable[..., Any], newest: Callable[[], Any]
    ) -> Callable[..., Any]:
        """Return the forward step of passes, of which those that are complete are counted.

        ``newest()``: the report of the last one, once its backward pass is over.
        """

        def step(*args: Any, **kwargs: Any) -> Any:
            output, loss_function = forward_step(*args, **kwargs)
            if loss_function is None or not self._counts:
                return output, loss_function

            def watched(*values: Any, **named: Any) -> Any:
                outputs = loss_function(*values, **named)
                self._watch(outputs[0], newest, tokens=outputs[1] if len(outputs) == 3 else 0)
                return outputs

            return output, watched

        return step

    def _watch(self, loss: torch.Tensor, newest: Callable[[], Any], *, tokens: Any) -> None:
        def end() -> None:
            self.reports.append(newest())
            self.tokens.append(tokens)
            self._made_s += time.monotonic() - self._began_s
            self._began_s = time.monotonic()
            self._complete_first(False)

        def begin(gradient: torch.Tensor) -> None:
            self._complete_first(True)
            # Called when the whole backward pass is over.
            engine: Any = Variable._execution_engine
            engine.queue_callback(end)

        if loss.requires_grad:
            loss.register_hook(begin)

    def _complete_first(self, wanted: bool) -> None:
        self._in_backward = wanted
        self._worker.member.go_on(wanted)

    @property
    def is_completing(self) -> bool:
        """True while a backward pass is completed although a view is proposed."""
        return self._in_backward and self._worker.member.goes_on

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Inside, passes add to other memory."""
        self._counts = False
        yield
        self._counts, self._began_s = True, time.monotonic()

    def before_reduction(self, bucket: Any, shard: torch.Tensor) -> None:
        """Copy this worker's shard of a bucket, over which the reduced one is written."""
        if self.contribution is None or id(bucket) in self._shards:
            return
        factor = 1.0 if id(bucket) in self._scaled else bucket.gradient_scaling_factor
        copy = _if_there_is_memory(shard.clone)
        if copy is None:
            self._why_not = "there was no memory for a copy of this worker's shard"
        else:
            self._shards[id(bucket)] = _Shard(shard, copy, factor)

    def scales(self, bucket: Any) -> bool:
        """Return whether a bucket is now to be multiplied by its factor, which is done once."""
        is_due = bucket.gradient_scaling_factor != 1.0 and id(bucket) not in self._scaled
        self._scaled.add(id(bucket))
        return is_due

    def reported(self, reports: list[Any], numbers: Sequence[int]) -> list[Any]:
        """End a call; returns the reports of its micro-batches ``numbers``, with those kept.

        What changes gradients from now on is the script's own.
        """
        earlier, self._earlier, self._counts = self._earlier, (), False
        self._versions = self._present_versions()
        place = numbers.index(earlier[0]) if earlier else 0
        return [*reports[:place], *self.reports[: len(earlier)], *reports[place:]]

    def before_update(self) -> None:
        """The optimizer begins its step."""
        if self._versions is not None and self._versions != self._present_versions():
            self._why_not = "gradients are changed between forward_backward and the update"
        self._versions = None

    def _scale(self, native: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """All gradients are multiplied."""
        self._why_not = "gradients were scaled by the number of tokens"
        native(*args, **kwargs)

    def check(self) -> None:
        """Raise EpochChanged where a view is proposed that a pass was completed before."""
        self._worker.member.check()

    def _present_versions(self) -> list[int]:
        return [buffer.grad_data._version for buffer in self._buffers]

    # ---- after a loss ---------------------------------------------------------------------------

    def interrupted(self) -> None:
        """A recovery begins: have the own sums whole again, if they can be."""
        if self.contribution is None or self.is_as_begun is None:
            return
        self.before_update()
        if self._in_backward:
            self._complete_first(False)
            self._why_not = "a backward pass took too long to be completed"
        elif not self.reports:
            self._why_not = "no micro-batch was complete"
        elif self._why_not is None and not self.is_as_begun(self._step):
            self._why_not = "passes have changed other state of the step"
        self._earlier, self._counts = (), False
        for place, copy, factor in self._shards.values():
            place.copy_(copy)
            if factor != 1.0:
                place *= factor
        self._shards.clear()

    @property
    def _is_asked(self) -> bool:
        """True in the redo of the step that the buffers are of."""
        worker = self._worker
        is_of_step = self._step == worker.completed
        return is_of_step and 0 <= self._epoch < worker.view.epoch

    @property
    def stands(self) -> bool:
        """True if the step that is redone goes on from what is kept."""
        return self._is_asked and self._why_it_falls() is None

    def _why_it_falls(self) -> str | None:
        """Return why all of the step is run again; None where it goes on from what is kept."""
        flow, worker, kept = self._worker.dataflow, self._worker, self.contribution
        if self._why_not is not None:
            return self._why_not
        if worker.untried:
            return "a worker has just come, and its first losses are compared"
        if not isinstance(flow, Dataflow) or flow.is_healthy:
            return "all of the workers of the launch are there"
        if kept not in flow.contributions(worker.slot):
            return "the work is dealt otherwise"
        # Those that a contribution is sent to multiply it.
        if self._scaled and kept != flow.in_place(worker.slot):
            return "the sum was divided, and is to be sent to others"
        return None

    def take_stand(self) -> tuple[int, ...]:
        """Return the micro-batches that are not run again, and say so, or why there are none."""
        worker = self._worker
        if not self._is_asked:
            return ()
        why_not = self._why_it_falls() or self._no_room()
        worker.events.emit(
            "sums_kept",
            slot=worker.slot,
            step=worker.completed,
            epoch=worker.view.epoch,
            microbatches=[] if why_not else list(self.done),
            why_not=why_not,
        )
        if why_not:
            self.forget()
            return ()
        worker.keep_work(self._made_s)
        self._began_s = time.monotonic()
        self._epoch, self._versions = worker.view.epoch, None
        self._earlier, self._counts = self.done, True
        return self._earlier

    def _no_room(self) -> str | None:
        """Take memory for other contributions, if there are any; return why there is none."""
        flow = self._worker.dataflow
        assert isinstance(flow, Dataflow)
        if len(flow.contributions(self._worker.slot)) == 1 or self.room is not None:
            return None
        self.room = _if_there_is_memory(
            lambda: [torch.empty_like(buffer.grad_data) for buffer in self._buffers]
        )
        if self.room is not None:
            return None
        for buffer in self._buffers:
            buffer.grad_data.zero_()
        return "there is no memory for other gradients beside it"

    def _zero(self, native: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Gradients are zeroed: what stands is not touched, and all else is forgotten.

        A call in which passes count zeroes what it has added up before them.
        """
        if not self.stands:
            if self._counts:
                self._scaled.clear()
                self._shards.clear()
            else:
                self._let_go()
            native(*args, **kwargs)
            return
        whole = [buffer.grad_data for buffer in self._buffers]
        for buffer in self._buffers:
            buffer.grad_data = buffer.grad_data[:0]
        native(*args, **kwargs)
        for buffer, one in zip(self._buffers, whole, strict=True):
            buffer.grad_data = one

    def _let_go(self) -> None:
        """Forget all except the reason in a redo, which is still to be said."""
        step, epoch = self._step, self._epoch
        why_not = self._why_it_falls() if self._is_asked else None
        self.forget()
        if why_not is not None:
            self._step, self._epoch, self._why_not = step, epoch, why_not


def _if_there_is_memory(make: Callable[[], Result]) -> Result | None:
    """Return what ``make()`` makes; None where there is no memory for it."""
    try:
        return make()
    except (MemoryError, RuntimeError) as error:
        if words_of(error) is None:
            raise
    return None
