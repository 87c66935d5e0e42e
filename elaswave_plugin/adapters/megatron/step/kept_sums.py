"""The gradient sums of a struck step that a survivor has, kept for its redo.

A loss takes what the lost worker had added up, and no other worker's sums: whoever is interrupted
completes the backward pass that it is in, and its redo goes on behind the micro-batches that are
complete. What a reduction overwrites of its own sums, its shard of each bucket, is copied first.
Each worker decides this by itself: the deal, and the order of sums, are the same either way.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from torch.autograd import Variable

from elaswave_plugin.core.step.dataflow import Dataflow
from elaswave_plugin.core.step.sum_order import Contribution
from elaswave_plugin.recovery.worker import Worker


class KeptSums:
    """What the gradient buffers of a model hold of its last step, micro-batch by micro-batch."""

    def __init__(self, worker: Worker, chunks: Sequence[DistributedDataParallel]) -> None:
        self._worker = worker
        self._buffers = [buffer for chunk in chunks for buffer in chunk.buffers]
        self.is_as_begun: Callable[[int], bool] = lambda step: False
        """Whether passes of a step have changed nothing else that is carried; set by who knows."""
        self.forget()

    def forget(self) -> None:
        """Nothing is kept of what the buffers hold."""
        self.contribution: Contribution | None = None
        self.reports: list[Any] = []
        self.tokens: list[Any] = []
        self._step = self._epoch = -1
        self._is_whole = True
        self._in_backward = self._counts = False
        # By bucket: its shard of this worker, and a copy from before its reduction.
        self._own: dict[int, tuple[torch.Tensor, torch.Tensor, float]] = {}
        self._scaled: set[int] = set()
        self._versions: list[int] | None = None

    @property
    def done(self) -> int:
        """Micro-batches of the contribution that are complete."""
        return len(self.reports)

    # ---- while a step runs ----------------------------------------------------------------------

    def begin(self, contribution: Contribution) -> None:
        """Passes of a contribution begin, whose sum is to stay in the buffers."""
        step, epoch = self._worker.completed, self._worker.view.epoch
        if (self._step, self._epoch) == (step, epoch):
            # A second call of the step, behind which the sums of the first are gone.
            self._is_whole = False
            return
        self.forget()
        self.contribution = contribution
        self._step, self._epoch, self._counts = step, epoch, True

    def go_on(self) -> None:
        """Passes go on from what is kept."""
        assert self.stands
        self._epoch, self._counts, self._versions = self._worker.view.epoch, True, None

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Inside, passes add to other memory."""
        before, self._counts = self._counts, False
        yield
        self._counts = before

    def noted(
        self, forward_step: Callable[..., Any], newest: Callable[[], Any]
    ) -> Callable[..., Any]:
        """Return the forward step of passes, whose backward passes are counted.

        ``newest()``: the report of the last one, once its backward pass is complete.
        """

        def step(*args: Any, **kwargs: Any) -> Any:
            output, loss_function = forward_step(*args, **kwargs)
            if loss_function is None or not self._counts:
                return output, loss_function

            def watched(*values: Any, **named: Any) -> Any:
                outputs = loss_function(*values, **named)
                tokens = outputs[1] if len(outputs) == 3 else 0
                self._watch(outputs[0], lambda: (newest(), tokens))
                return outputs

            return output, watched

        return step

    def _watch(self, loss: torch.Tensor, complete: Callable[[], tuple[Any, Any]]) -> None:
        def end() -> None:
            report, tokens = complete()
            self.reports.append(report)
            self.tokens.append(tokens)
            self._in_backward = False
            self._worker.member.go_on(False)

        def begin(gradient: torch.Tensor) -> None:
            self._in_backward = True
            self._worker.member.go_on(True)
            engine: Any = Variable._execution_engine
            engine.queue_callback(end)

        if loss.requires_grad:
            loss.register_hook(begin)

    @property
    def is_completing(self) -> bool:
        """True while a backward pass is completed although a view is proposed."""
        return self._in_backward and self._worker.member.goes_on

    def before_reduction(self, bucket: Any, shard: torch.Tensor) -> None:
        """Keep this worker's shard of a bucket, over which its reduced one is written."""
        if self.contribution is not None and id(bucket) not in self._own:
            factor = 1.0 if id(bucket) in self._scaled else bucket.gradient_scaling_factor
            self._own[id(bucket)] = shard, shard.clone(), factor

    def scales(self, bucket: Any) -> bool:
        """Return whether a bucket is still to be multiplied by its factor, which comes now."""
        is_due = bucket.gradient_scaling_factor != 1.0 and id(bucket) not in self._scaled
        self._scaled.add(id(bucket))
        return is_due

    def reduced(self) -> None:
        """The call is over: what changes gradients until the update is the script's own."""
        self._counts = False
        self._versions = self._present_versions()

    def before_update(self) -> None:
        """The optimizer begins its step."""
        if self._versions is not None and self._versions != self._present_versions():
            self._is_whole = False
        self._versions = None

    def spoil(self) -> None:
        """All sums are changed by hand."""
        self._is_whole = False

    def _present_versions(self) -> list[int]:
        return [buffer.grad_data._version for buffer in self._buffers]

    # ---- after a loss ---------------------------------------------------------------------------

    def interrupted(self) -> None:
        """A recovery begins: have the own sums whole again, if they can be."""
        self._worker.member.go_on(False)
        if self.contribution is None:
            return
        self.before_update()
        self._is_whole &= not self._in_backward and self.is_as_begun(self._step)
        self._in_backward = self._counts = False
        for number, (shard, copy, factor) in self._own.items():
            shard.copy_(copy)
            if number in self._scaled and factor != 1.0:
                shard *= factor
        self._own.clear()

    @property
    def stands(self) -> bool:
        """True if this step goes on from what is kept, as the present deal has it."""
        flow, worker = self._worker.dataflow, self._worker
        return (
            self._is_whole
            and self.done > 0
            and self._step == worker.completed
            and self._epoch < worker.view.epoch
            and isinstance(flow, Dataflow)
            and not flow.is_healthy
            and not worker.untried
            and self.contribution in flow.contributions(worker.slot)
            # Others scale what is sent to them.
            and (not self._scaled or self.contribution == flow.in_place(worker.slot))
        )

    @contextmanager
    def sheltered(self) -> Iterator[None]:
        """Inside, gradients are zeroed: what stands is not touched, and all else is forgotten."""
        if not self.stands:
            self.forget()
            yield
            return
        whole = [buffer.grad_data for buffer in self._buffers]
        for buffer in self._buffers:
            buffer.grad_data = buffer.grad_data[:0]
        try:
            yield
        finally:
            for buffer, one in zip(self._buffers, whole, strict=True):
                buffer.grad_data = one
