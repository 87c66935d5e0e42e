"""Weight gradients apart from the rest of a backward pass, so that a worker computes them later.

The linear layers of Megatron-Core's transformer layers keep what they need for it (megatron/core/
tensor_parallel/layers.py, ``LinearWithGradAccumulationAndAsyncCommunication``), and add the same
product to ``main_grad`` when its turn comes. Biases, norms, embedding and head are never put off.
"""

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.layers import (
    LinearWithGradAccumulationAndAsyncCommunication,
    custom_bwd,
)
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import (
    get_tensor_model_parallel_group_if_none,
    prepare_input_tensors_for_wgrad_compute,
)

from elaswave_plugin.adapters.megatron.compat.versions import VALID
from elaswave_plugin.adapters.patching import Hook, PatchRecord, PatchSet
from elaswave_plugin.values.set_within import set_within

# A model chunk and the first sample of what it runs.
Piece = tuple[int, int]


class WeightGradients:
    """One worker's delayed weight gradients, by piece; ``patches``: for split backwards."""

    def __init__(self) -> None:
        self.patches = PatchSet([_record(self._late_or_whole, self._late)])
        self._weights: set[torch.nn.Parameter] = set()
        self._open: Piece | None = None
        self._put_off: dict[Piece, list[Callable[[], None]]] = {}

    @contextmanager
    def step(self, chunks: Sequence[DistributedDataParallel]) -> Iterator[None]:
        """In a step of these chunks; what an interrupted one has put off is dropped."""
        found = Counter(layer.weight for layer in _linear_layers(chunks))
        # Autograd sums the gradients of a shared weight before it adds them.
        self._weights = {weight for weight, count in found.items() if count == 1}
        try:
            yield
        finally:
            self._weights.clear()
            self._put_off.clear()

    def put_off(self, piece: Piece) -> AbstractContextManager[None]:
        """In the backward pass of a piece: keep the weight gradients for `compute`."""
        self._put_off[piece] = []
        return set_within(self, "_open", piece)

    def compute(self, piece: Piece) -> None:
        """Add the weight gradients of a piece to ``main_grad``, in the order of its backward."""
        for add in self._put_off.pop(piece):
            add()

    def _late(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The output of a layer whose weight gradient is put off; None of every other one."""
        apart = _apart(self._add_later)

        def late(
            input: torch.Tensor, weight: torch.nn.Parameter, bias: torch.Tensor | None, *how: Any
        ) -> Any:
            if weight not in self._weights or not input.requires_grad:
                return None
            return apart.apply([weight], input, weight.detach(), bias, *how)

        return late

    def _late_or_whole(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the replacement of the function that a linear layer calls."""
        late = self._late(original)
        known = inspect.signature(LinearWithGradAccumulationAndAsyncCommunication.forward)
        # From 0.19 on a weight may be cut over yet another group, which is refused.
        whole = (1,) if "gtp_remat_size" in known.parameters else ()

        @functools.wraps(original)
        def linear(
            input: torch.Tensor,
            weight: torch.nn.Parameter,
            bias: torch.Tensor | None,
            gradient_accumulation_fusion: bool,
            allreduce_dgrad: bool,
            sequence_parallel: bool,
            *more: Any,
            tp_group: Any = None,
            **named: Any,
        ) -> Any:
            how = gradient_accumulation_fusion, allreduce_dgrad, sequence_parallel
            group = get_tensor_model_parallel_group_if_none(tp_group)
            output = late(input, weight, bias, *how, None, 0, group, *whole)
            if output is not None:
                return output
            return original(input, weight, bias, *how, *more, tp_group=tp_group, **named)

        return linear

    def _add_later(self, add: Callable[[], None]) -> None:
        if self._open is None:
            add()
        else:
            self._put_off[self._open].append(add)


def _apart(add_later: Callable[[Callable[[], None]], None]) -> Any:
    """The autograd function of a linear layer whose weight gradient is added later."""

    class Apart(LinearWithGradAccumulationAndAsyncCommunication):
        """The weight comes in a list as well: autograd is not to follow it."""

        @staticmethod
        def forward(ctx: Any, parameter: list[torch.nn.Parameter], *inputs: Any) -> Any:
            ctx.parameter = parameter[0]
            return LinearWithGradAccumulationAndAsyncCommunication.forward(ctx, *inputs)

        @staticmethod
        @custom_bwd
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            add_later(_product(ctx, gradient))
            bias = gradient.flatten(0, -2).sum(dim=0) if ctx.use_bias else None
            none = (None,) * (len(ctx.needs_input_grad) - 4)
            return None, _input_gradient(ctx, gradient), None, bias, *none

    return Apart


def why_whole_backward(chunks: Sequence[DistributedDataParallel]) -> str | None:
    """The reason why weight gradients cannot be computed apart; None where they can."""
    if chunks[0].config.gradient_accumulation_fusion:
        return "gradient_accumulation_fusion adds weight gradients within the backward pass"
    if chunks[0].config.recompute_granularity == "full":
        return "with full recomputation, what is put off would hold what that saves"
    if next(_linear_layers(chunks), None) is None:
        return "the layers' linear layers are not Megatron-Core's own"
    return None


def _linear_layers(
    chunks: Sequence[DistributedDataParallel],
) -> Iterator[ColumnParallelLinear | RowParallelLinear]:
    """Those with a trained weight in the transformer layers of the chunks."""
    for chunk in chunks:
        for layer in chunk.modules():
            for module in layer.modules() if isinstance(layer, TransformerLayer) else ():
                is_linear = isinstance(module, ColumnParallelLinear | RowParallelLinear)
                if is_linear and module.weight.requires_grad:
                    yield module


def _input_gradient(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
    """As in a whole backward pass, summed over the tensor-parallel group where that is split."""
    shape = ctx.saved_tensors[0].shape
    result: torch.Tensor = gradient.matmul(ctx.saved_tensors[1])
    if ctx.sequence_parallel:
        part = torch.empty(shape, dtype=result.dtype, device=result.device)
        dist.reduce_scatter_tensor(part, result, group=ctx.tp_group)
        return part
    if ctx.allreduce_dgrad:
        dist.all_reduce(result, group=ctx.tp_group)
    return result


def _product(ctx: Any, gradient: torch.Tensor) -> Callable[[], None]:
    """Return a function that adds a weight gradient to the ``main_grad`` of its time of call."""
    parameter, group, is_part = ctx.parameter, ctx.tp_group, ctx.sequence_parallel
    # What came before them is not needed any more.
    activations = ctx.saved_tensors[0].detach()

    @torch.no_grad()
    def add() -> None:
        whole = activations
        if is_part:
            length, *rest = activations.shape
            whole = activations.new_empty((length * group.size(), *rest))
            dist.all_gather_into_tensor(whole, activations, group=group)
        flat_gradient, flat = prepare_input_tensors_for_wgrad_compute(gradient, whole)
        parameter.main_grad.add_(flat_gradient.t().matmul(flat))

    return add


def _record(make: Callable[[Any], Any], hook: Callable[[Any], Any]) -> PatchRecord:
    taken = (
        *("input", "weight", "bias", "gradient_accumulation_fusion", "allreduce_dgrad"),
        *("sequence_parallel", "grad_output_buffer", "wgrad_deferral_limit"),
    )
    return PatchRecord(
        target="megatron.core.tensor_parallel.layers:linear_with_grad_accumulation_and_async_allreduce",
        reason="weight gradients fill the time in which a worker of a ragged pipeline would wait",
        distribution="megatron-core",
        valid=VALID,
        parameters=(*taken, "async_grad_allreduce", "tp_group"),
        elsewhere=(
            (">=0.17,<0.19", (*taken, "tp_group")),
            (">=0.19", (*taken, "tp_group", "gtp_remat_size")),
        ),
        make=make,
        hook=Hook("megatron.core.tensor_parallel.layers:linear_hook", hook),
    )


def fuses(config: object) -> bool:
    """Return whether weight gradients go to ``main_grad`` without autograd.

    Megatron-Core's linear layers, and Transformer Engine's of some versions, keep in the forward
    pass where the gradient is to be added (core/tensor_parallel/layers.py, ``ctx.main_grad``).
    """
    return bool(getattr(config, "gradient_accumulation_fusion", False))


def add_in_one_sum(model: torch.nn.Module) -> None:
    """Have what a micro-batch adds to ``main_grad`` be one sum, and in nothing's place.

    A head that is given the embedding's weight has a gradient for it, too. Where the head's is not
    fused, autograd adds the two up first: sums over micro-batches are then the same,
    whichever worker runs them. Layers of Transformer Engine put the gradient of the first
    micro-batch since they were built in the place of what is there, which may be another one's by
    then.
    """
    module: Any
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear) and module.weight is None:
            module.gradient_accumulation_fusion = False
        if getattr(module, "is_first_microbatch", False):
            module.is_first_microbatch = False
