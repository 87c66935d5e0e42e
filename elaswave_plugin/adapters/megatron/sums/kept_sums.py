"""The gradient sums of a struck step that a survivor has, from which its redo goes on.

A loss takes what the lost worker had added up, and nothing of the others' sums. A survivor
completes the backward pass that it is in, and then runs only what is missing. A reduction writes
over its own shard of each bucket, which is copied before, and what is added up over stages or TP
positions behind it is copied, too. Each worker decides by itself whether it goes on: the order of
sums is the same either way. With stages all tell each other, as one runs again what another lacks.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeVar

import torch
from megatron.core.distributed import DistributedDataParallel
from torch.autograd import Variable

from elaswave_plugin.adapters.megatron.sums.tied_embeddings import tied_parameter
from elaswave_plugin.around import around
from elaswave_plugin.core.planner.pipeline_flow import PipelineFlow
from elaswave_plugin.core.step.dataflow import Dataflow
from elaswave_plugin.core.step.sum_order import Contribution
from elaswave_plugin.recovery.relief import words_of
from elaswave_plugin.recovery.worker import Worker

Result = TypeVar("Result")


class _Copy(NamedTuple):
    """Gradients as they were before they were added up with others'; ``factor``: still due."""

    place: torch.Tensor
    copy: torch.Tensor
    factor: float


class KeptSums:
    """The sum in the gradient buffers of a model, by the micro-batches of a step."""

    def __init__(self, worker: Worker, chunks: Sequence[DistributedDataParallel]) -> None:
        self._worker, self._chunks = worker, chunks
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
        # Reports and tokens of the micro-batches that are complete.
        self._complete: dict[int, tuple[Any, Any]] = {}
        self.room: list[torch.Tensor] | None = None
        """Other gradient buffers, for what is added up beside what is kept."""
        self.earlier: tuple[int, ...] = ()
        """The micro-batches that the call that runs does not add up again."""
        self._step = self._epoch = -1
        # What this worker has of the model, where workers have parts of it.
        self._part: Any = None
        # Own passes that are not complete, since when, and how long it took to make what is kept.
        self._open = 0
        self._began_s = self._made_s = 0.0
        # Why nothing is kept, if so.
        self._why_not: str | None = None
        self._in_backward = self._counts = False
        self._copies: dict[int, _Copy] = {}
        # Buckets that were multiplied by their factor.
        self._scaled: set[int] = set()
        self._versions: list[int] | None = None

    @property
    def done(self) -> tuple[int, ...]:
        """The micro-batches that are complete."""
        kept = () if self.contribution is None else self.contribution.microbatches
        return tuple(microbatch for microbatch in kept if microbatch in self._complete)

    @property
    def tokens(self) -> list[Any]:
        """Those of the micro-batches that are complete."""
        return [tokens for _, tokens in self._complete.values()]

    # ---- while a step runs ----------------------------------------------------------------------

    def begin(self, contribution: Contribution | None) -> None:
        """Passes begin that add up a contribution in the buffers, which is to stay there.

        None: they add up several, of which none stays.
        """
        if self.is_as_begun is None:
            return
        step, epoch = self._worker.completed, self._worker.view.epoch
        if (self._step, self._epoch) == (step, epoch):
            self._why_not = "forward_backward trains the model more than once in a step"
            return
        self.forget()
        self.contribution, self._part = contribution, self._part_of(self._worker.dataflow)
        self._step, self._epoch, self._counts = step, epoch, True
        if contribution is None:
            self._why_not = "no replica was run here as a whole"

    def noted(
        self,
        forward_step: Callable[..., Any],
        microbatches: Sequence[int],
        report_of: Callable[[int], Any] | None,
    ) -> Callable[..., Any]:
        """Return the forward step of passes, of which those that are complete are counted.

        ``microbatches``: in the order of its calls; ``report_of(number)``: the report of one of
        these calls, once its backward pass is over; None: this stage has no loss.
        """
        calls = enumerate(microbatches)

        def step(*args: Any, **kwargs: Any) -> Any:
            number, microbatch = next(calls)
            if not self._adds(microbatch):
                return forward_step(*args, **kwargs)
            if not self._open:
                self._began_s = time.monotonic()
            self._open += 1
            output, loss_function = forward_step(*args, **kwargs)
            if report_of is None:
                self._watch(output, microbatch, lambda: (None, 0))
            if report_of is None or loss_function is None:
                return output, loss_function

            def watched(*values: Any, **named: Any) -> Any:
                outputs = loss_function(*values, **named)
                tokens = outputs[1] if len(outputs) == 3 else 0
                self._watch(outputs[0], microbatch, lambda: (report_of(number), tokens))
                return outputs

            return output, watched

        return step

    def _adds(self, microbatch: int) -> bool:
        """Return whether a pass that begins adds to what is kept."""
        own = self.contribution if self._counts else None
        return own is not None and microbatch in own.microbatches and microbatch not in self.done

    def _watch(
        self, output: torch.Tensor, microbatch: int, told: Callable[[], tuple[Any, Any]]
    ) -> None:
        def end() -> None:
            self._complete[microbatch] = told()
            self._open -= 1
            self._made_s += time.monotonic() - self._began_s
            self._began_s = time.monotonic()
            self._complete_first(False)

        def begin(gradient: torch.Tensor) -> None:
            self._complete_first(True)
            # Called when the whole backward pass is over.
            engine: Any = Variable._execution_engine
            engine.queue_callback(end)

        if output.requires_grad:
            output.register_hook(begin)

    def _complete_first(self, wanted: bool) -> None:
        self._in_backward = wanted
        self._worker.member.go_on(wanted)

    def completing(self) -> AbstractContextManager[None]:
        """Inside, an interruption is passed over while a backward pass is completed."""
        return self._worker.member.going_on()

    def before_reduction(self, bucket: Any, shard: torch.Tensor) -> None:
        """Copy this worker's shard of a bucket, over which the reduced one is written."""
        factor = 1.0 if id(bucket) in self._scaled else bucket.gradient_scaling_factor
        self._copy(id(bucket), shard, factor)

    def before_finalize(self) -> None:
        """Copy what is added up over stages and TP positions once gradients are reduced."""
        config = self._chunks[0].config
        over_tp = config.tensor_model_parallel_size > 1
        tied = tied_parameter(self._chunks) if config.pipeline_model_parallel_size > 1 else None
        for param in (param for buffer in self._buffers for param in buffer.params):
            is_whole = over_tp and not getattr(param, "tensor_model_parallel", False)
            if param is tied or is_whole:
                self._copy(id(param), param.main_grad, 1.0)

    def _copy(self, key: int, place: torch.Tensor, factor: float) -> None:
        if self.contribution is None or key in self._copies:
            return
        copy = _if_there_is_memory(place.clone)
        if copy is None:
            self._why_not = "there was no memory for a copy of gradients that others are added to"
        else:
            self._copies[key] = _Copy(place, copy, factor)

    def scales(self, bucket: Any) -> bool:
        """Return whether a bucket is now to be multiplied by its factor, which is done once."""
        is_due = bucket.gradient_scaling_factor != 1.0 and id(bucket) not in self._scaled
        self._scaled.add(id(bucket))
        return is_due

    def reported(
        self, reports: list[Any], executed: Sequence[int], microbatches: Sequence[int]
    ) -> list[Any]:
        """End a call; returns the reports of ``microbatches``, of those ``executed`` or kept.

        What changes gradients from now on is the script's own.
        """
        kept = {microbatch: self._complete[microbatch][0] for microbatch in self.earlier}
        self.earlier, self._counts = (), False
        self._versions = self._present_versions()
        if (*executed,) == (*microbatches,):
            return reports
        told = {**dict(zip(executed, reports, strict=False)), **kept}
        return [told[microbatch] for microbatch in microbatches]

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

    def _part_of(self, flow: object) -> Any:
        return flow.part(self._worker.slot) if isinstance(flow, PipelineFlow) else None

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
            self._why_not = "a backward pass was not completed"
        elif not self._complete:
            self._why_not = "no micro-batch was complete"
        elif self._why_not is None and not self.is_as_begun(self._step):
            self._why_not = "passes have changed other state of the step"
        self.earlier, self._counts, self._open = (), False, 0
        # Of what was copied twice, the first copy is the one before all sums.
        for place, copy, factor in reversed(self._copies.values()):
            place.copy_(copy)
            if factor != 1.0:
                place *= factor
        self._copies.clear()

    def rebound(self, flow: object) -> None:
        """The model is that of a flow now; another recovery may bring back what it was."""
        if self._part_of(flow) != self._part:
            self._why_not = "this worker has had another part of the model since"

    @property
    def _is_asked(self) -> bool:
        """True in the redo of the step that the buffers are of."""
        worker = self._worker
        is_redo = worker.phases.replaying and self._step == worker.completed
        return is_redo and 0 <= self._epoch < worker.view.epoch

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
        assert isinstance(flow, Dataflow | PipelineFlow)
        if flow.is_healthy:
            return "all of the workers of the launch are there"
        if isinstance(flow, PipelineFlow):
            return None
        if kept not in flow.contributions(worker.slot):
            return "the work is dealt otherwise"
        # Those that a contribution is sent to multiply it.
        if self._scaled and kept != flow.in_place(worker.slot):
            return "the sum was divided, and is to be sent to others"
        return None

    def offered(self) -> tuple[int, ...]:
        """The micro-batches that this worker need not run again; memory is taken for the others."""
        if not self._is_asked:
            return ()
        self._why_not = self._why_it_falls() or self._no_room()
        return () if self._why_not else self.done

    def take_stand(self, why_not: str | None = None) -> tuple[int, ...]:
        """Return what is not run again of what was ``offered``, and say so, or why it is nothing.

        ``why_not``: why all of the step is run again everywhere, if so.
        """
        worker = self._worker
        if not self._is_asked:
            return ()
        if self._why_not is None and why_not is not None:
            self._why_not = why_not
            self._clear()
        why_not = self._why_not
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
        self._epoch, self._versions = worker.view.epoch, None
        self.earlier, self._counts = self.done, True
        return self.earlier

    def _no_room(self) -> str | None:
        """Take memory for other contributions, if there are any; return why there is none."""
        flow = self._worker.dataflow
        is_alone = isinstance(flow, Dataflow) and len(flow.contributions(self._worker.slot)) == 1
        if is_alone or self.room is not None:
            return None
        self.room = _if_there_is_memory(
            lambda: [torch.empty_like(buffer.grad_data) for buffer in self._buffers]
        )
        if self.room is not None:
            return None
        self._clear()
        return "there is no memory for other gradients beside it"

    def _clear(self) -> None:
        """Zero what stood: gradients were not, where the script had them zeroed."""
        for buffer in self._buffers:
            buffer.grad_data.zero_()

    def _zero(self, native: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Gradients are zeroed: what stands is not touched, and all else is forgotten.

        A call in which passes count zeroes what it has added up before them.
        """
        if not self.stands:
            if self._counts:
                self._scaled.clear()
                self._copies.clear()
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
