"""The reducing c10d calls of a group whose native sums have to be alike in every membership."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed import AllToAllOptions, ReduceOp

from elaswave_plugin.communicator.device.calls import DeviceProcessGroup
from elaswave_plugin.communicator.device.ordered_sums import OrderedSums
from elaswave_plugin.communicator.links.buffers import Fold

_WITHOUT_ORDER = ("MIN", "MAX")
_TERMS_OF_ONE_ORDER = 2


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested sequences."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _options(values: Any) -> Any:
    """The options of a c10d call, or its operation in their place."""
    for value in values:
        if hasattr(value, "reduceOp") or isinstance(value, (ReduceOp, ReduceOp.RedOpType, str)):
            return value
    return "SUM"


def _in_order(call: str, sums: Callable[..., None]) -> Callable[..., Any]:
    """The c10d call: `sums` where the order of the terms makes the bits, else as without us."""

    def run(self: OrderedProcessGroup, *args: Any, **kwargs: Any) -> Any:
        operands = (*args, *kwargs.values())
        fold = self._ordered_fold(call, operands)
        if fold is None:
            return getattr(super(OrderedProcessGroup, self), call)(*args, **kwargs)
        ordered = self._ordered_sums(fold)
        return self.engine.run(
            self,
            call,
            lambda: sums(self, ordered, *args, **kwargs),
            list(_tensors(operands)),
            asynchronous=getattr(_options(operands), "asyncOp", True),
        )

    run.__name__ = call
    run.__doc__ = f"{call}: sums of more than two floats in rank order."
    return run


class OrderedProcessGroup(DeviceProcessGroup):
    """One whose native sums are those of the links, bit for bit.

    Sums and products of floats, of more than two members, are made in rank order.
    """

    def _ordered_fold(self, call: str, operands: tuple[Any, ...]) -> Fold | None:
        """Return the fold that is to be made in rank order, or None. Raises ConfigurationError."""
        tensor = next(_tensors(operands), None)
        if tensor is None or not self._is_native(tensor.device.type):
            return None
        if self.size() <= _TERMS_OF_ONE_ORDER or not tensor.is_floating_point():
            return None
        fold = self._fold(call, _options(operands), tensor.dtype)
        if fold.name in _WITHOUT_ORDER:
            return None
        self._require_member(call)
        if self.engine.is_coalescing(self):
            raise self._refuse(
                call,
                "sums floats within a coalescing block, which exact mode cannot keep in order: "
                "call it outside, or set consistency to fast",
            )
        return fold

    def _ordered_sums(self, fold: Fold) -> OrderedSums:
        # On the current stream: each step of a sum needs the one before it.
        options = AllToAllOptions()
        options.asyncOp = False

        def exchange(outs: list[torch.Tensor], ins: list[torch.Tensor]) -> None:
            self.engine.launch(self, "alltoall", (outs, ins, options), {}).wait()

        return OrderedSums(
            rank=self.rank(),
            size=self.size(),
            exchange=exchange,
            combine=self.engine.combine,
            multiply=fold.name == "PRODUCT",
            average=fold.name == "AVG",
        )

    def _sum_everywhere(self, sums: OrderedSums, tensors: Any, *_: Any, **__: Any) -> None:
        for tensor in _tensors([tensors]):
            sums.all_reduce(tensor)

    def _sum_at_the_root(
        self, sums: OrderedSums, tensors: Any, root: Any, *_: Any, **__: Any
    ) -> None:
        (tensor,) = _tensors([tensors])
        total = tensor.detach().clone()
        sums.all_reduce(total)
        if sums.rank == (root if isinstance(root, int) else root.rootRank):
            tensor.detach().copy_(total)

    def _sum_of_parts(
        self, sums: OrderedSums, output: Any, inputs: Any, *_: Any, **__: Any
    ) -> None:
        (out,), parts = _tensors([output]), list(_tensors([inputs]))
        if len(parts) != sums.size or parts[sums.rank].numel() != out.numel():
            sizes = [part.numel() for part in parts]
            raise self._refuse("reduce_scatter", f"got {sizes} elements in and {out.numel()} out")
        sums.reduce_scatter(out, parts)

    def _sum_of_cuts(self, sums: OrderedSums, output: Any, input: Any, *_: Any, **__: Any) -> None:
        flat = input.detach().contiguous().view(-1)
        self._sum_of_parts(sums, output, flat.tensor_split(sums.size))

    def _sums_of_cuts(
        self, sums: OrderedSums, outputs: Any, inputs: Any, *_: Any, **__: Any
    ) -> None:
        for output, data in zip(outputs, inputs, strict=True):
            self._sum_of_cuts(sums, output, data)

    allreduce = _in_order("allreduce", _sum_everywhere)
    allreduce_coalesced = _in_order("allreduce_coalesced", _sum_everywhere)
    reduce = _in_order("reduce", _sum_at_the_root)
    reduce_scatter = _in_order("reduce_scatter", _sum_of_parts)
    reduce_scatter_single = _in_order("reduce_scatter_single", _sum_of_cuts)
    _reduce_scatter_base = _in_order("_reduce_scatter_base", _sum_of_cuts)
    reduce_scatter_single_coalesced = _in_order("reduce_scatter_single_coalesced", _sums_of_cuts)
    reduce_scatter_tensor_coalesced = _in_order("reduce_scatter_tensor_coalesced", _sums_of_cuts)
