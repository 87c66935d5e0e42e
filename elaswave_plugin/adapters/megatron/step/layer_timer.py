"""Times the passes through the layers of a model chunk and what is around them, and what they hold.

Marks are set where the hidden states enter and leave Megatron-Core's transformer block, forward by
module hooks, backward by hooks of these tensors. No message is awaited between two marks of a pass:
those of the pipeline travel before and after a chunk's forward or backward.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.transformer_block import TransformerBlock

from elaswave_plugin.adapters.megatron.step.weight_gradients import fuses
from elaswave_plugin.core.planner.layer_times import BACKWARD, FORWARD, FRONT, LAYER, TAIL
from elaswave_plugin.recovery.stopwatch import Mark, Stopwatch


class LayerTimer:
    """Times one chunk; passes of its micro-batches do not overlap, so that a mark of each do."""

    def __init__(self, block: TransformerBlock, stopwatch: Stopwatch) -> None:
        self._block = block
        self._stopwatch = stopwatch
        self._forward: Mark | None = None
        self._backward: Mark | None = None
        # Samples of the pass forward, and of the one backward.
        self._rows = {FORWARD: 1, BACKWARD: 1}

    def _pass(self, part: str, which: str, first: Mark | None, *, tokens: int = 0) -> Mark:
        """A pass that began at ``first`` ends here; where it began is not known after a change.

        ``tokens`` of a sample, if known.
        """
        if first is None:
            return self._stopwatch.mark()
        count = self._rows[which] * (len(self._block.layers) if part == LAYER else 1)
        return self._stopwatch.lap(part, which, first, count=count, tokens=tokens)

    def _parts(self) -> list[str]:
        """List the kinds of parts that the chunk has."""
        front, tail = self._block.pre_process, self._block.post_process
        return [*([FRONT] if front else []), LAYER, *([TAIL] if tail else [])]

    # ---- forward --------------------------------------------------------------------------------

    def enter_model(self, model: torch.nn.Module, inputs: Any) -> None:
        """A forward pass begins."""
        counts = model.training and torch.is_grad_enabled()
        self._forward = self._stopwatch.mark() if counts else None
        if counts:
            self._stopwatch.operations.enter()
            # Counted on a CPU, saved weights come back as other tensors, without ``main_grad``.
            if self._stopwatch.on_gpu or not fuses(self._block.config):
                self._stopwatch.begin_holding(model, self._parts())

    def enter_layers(self, block: torch.nn.Module, inputs: Any, keywords: Any) -> None:
        """The hidden states are there."""
        if self._forward is None:
            return
        hidden = self._block.input_tensor
        if self._block.pre_process:
            hidden = keywords.get("hidden_states", inputs[0] if inputs else None)
        if isinstance(hidden, torch.Tensor):
            self._rows[FORWARD] = hidden.shape[1]
            self._stopwatch.times.sample_bytes = hidden.nbytes / hidden.shape[1]
        if self._block.pre_process:
            self._stopwatch.holds(FRONT, count=self._rows[FORWARD])
            self._forward = self._pass(FRONT, FORWARD, self._forward)
        else:
            self._forward = self._stopwatch.mark()
        if isinstance(hidden, torch.Tensor) and hidden.requires_grad:
            hidden.register_hook(self._leave_layers_backward)

    def leave_layers(self, block: torch.nn.Module, inputs: Any, output: Any) -> None:
        """The last layer is done."""
        if self._forward is None:
            return
        hidden = output[0] if isinstance(output, tuple) else output
        self._stopwatch.holds(LAYER, count=self._rows[FORWARD] * len(self._block.layers))
        self._forward = self._pass(LAYER, FORWARD, self._forward, tokens=hidden.shape[0])
        if hidden.requires_grad:
            hidden.register_hook(self._enter_layers_backward)

    def leave_model(self, model: torch.nn.Module, inputs: Any, output: Any) -> None:
        """A forward pass is over."""
        if self._forward is None:
            return
        self._stopwatch.operations.leave()
        if self._block.post_process:
            self._stopwatch.holds(TAIL, count=self._rows[FORWARD])
        self._stopwatch.end_holding()
        if not self._block.post_process:
            return
        self._pass(TAIL, FORWARD, self._forward)
        result = output[0] if isinstance(output, tuple) else output
        if isinstance(result, torch.Tensor) and result.requires_grad:
            result.register_hook(self._enter_model_backward)

    # ---- backward: the same way back ------------------------------------------------------------

    def _enter_model_backward(self, gradient: torch.Tensor) -> None:
        self._stopwatch.operations.enter()
        self._backward = self._stopwatch.mark()

    def _enter_layers_backward(self, gradient: torch.Tensor) -> None:
        self._rows[BACKWARD] = gradient.shape[1]
        if self._block.post_process:
            self._backward = self._pass(TAIL, BACKWARD, self._backward)
        else:
            self._stopwatch.operations.enter()
            self._backward = self._stopwatch.mark()

    def _leave_layers_backward(self, gradient: torch.Tensor) -> None:
        self._backward = self._pass(LAYER, BACKWARD, self._backward)
        if self._block.pre_process:
            _when_backward_ends(self._leave_model_backward)
        else:
            self._stopwatch.operations.leave()

    def _leave_model_backward(self) -> None:
        self._pass(FRONT, BACKWARD, self._backward)
        self._stopwatch.operations.leave()


def watch_passes(chunks: Sequence[DistributedDataParallel], stopwatch: Stopwatch) -> list[Any]:
    """Time the chunks that have one transformer block; returns the handles of the module hooks."""
    handles: list[Any] = []
    for chunk in chunks:
        blocks = [module for module in chunk.modules() if isinstance(module, TransformerBlock)]
        if len(blocks) != 1:
            continue
        timer = LayerTimer(blocks[0], stopwatch)
        handles += [
            chunk.module.register_forward_pre_hook(timer.enter_model),
            blocks[0].register_forward_pre_hook(timer.enter_layers, with_kwargs=True),
            blocks[0].register_forward_hook(timer.leave_layers),
            chunk.module.register_forward_hook(timer.leave_model),
        ]
    return handles


def _when_backward_ends(call: Callable[[], None]) -> None:
    """Call when the running backward pass is over, as FSDP does; in a hook of that pass only."""
    engine = cast(Any, torch.autograd.Variable)._execution_engine
    engine.queue_callback(call)
