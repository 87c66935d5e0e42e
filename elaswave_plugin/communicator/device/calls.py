"""The c10d calls of a group with a device engine: tensors of its device go to the native group.

Sums that have to be the same in every membership are made in rank order.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed import AllToAllOptions, P2POp, ReduceOp, Work

from elaswave_plugin.communicator.device.engine import DeviceEngine
from elaswave_plugin.communicator.device.ordered_sums import OrderedSums
from elaswave_plugin.communicator.groups.group_calls import ElasticProcessGroup
from elaswave_plugin.communicator.links.body_calls import MADE_AGAIN, made_again, noted
from elaswave_plugin.communicator.links.buffers import Fold

# How token and position ids come to a worker: from a tensor-parallel group's first, or a stage.
FROM_A_ROOT = ("broadcast", "scatter")
RECEIVING_CALLS = (*FROM_A_ROOT, "recv", "recv_anysource")


def blank_ids(call: str, rank: int, operands: Sequence[Any]) -> None:
    """Zero the integers that a call is about to receive, on the current stream.

    What is queued behind a collective that is aborted runs on what the buffer holds. Where that is
    no id, a look-up by it is an error of the device, of which no worker of CUDA recovers. A zero
    is an id, at the cost of one small kernel, and nobody waits for the host.
    """
    if call not in RECEIVING_CALLS or (call in FROM_A_ROOT and rank == _root(operands)):
        return
    tensors = operands[0]
    for tensor in [tensors] if isinstance(tensors, torch.Tensor) else tensors:
        if not tensor.is_floating_point() and not tensor.is_complex():
            # As the call itself, which overwrites it all the same: not a change for autograd.
            tensor.data.zero_()


def _root(operands: Sequence[Any]) -> int:
    """The rank from which it comes: an argument, or a field of the options; 0 by default."""
    for one in operands[1:]:
        root = getattr(one, "rootRank", one)
        if isinstance(root, int):
            return root
    return 0


def device_of(values: Any) -> str:
    """The device type of the first tensor in nested sequences; "" when there is none."""
    for value in values:
        if isinstance(value, torch.Tensor):
            return value.device.type
        if isinstance(value, (list, tuple)) and value:
            found = device_of(value)
            if found:
                return found
    return ""


def _routed(call: str) -> Callable[..., Any]:
    """The c10d call under its own name: native for tensors of the device, else over the links."""

    def run(self: "DeviceProcessGroup", *args: Any, **kwargs: Any) -> Any:
        if not self._is_native(device_of((*args, *kwargs.values()))):
            return getattr(super(DeviceProcessGroup, self), call)(*args, **kwargs)
        self._require_member(call)
        blank_ids(call, self.rank(), (*args, *kwargs.values()))
        return self.engine.launch(self, call, args, kwargs)

    run.__name__ = call
    run.__doc__ = f"{call}: native for tensors of the device, else over the links."
    return (made_again if call in MADE_AGAIN else noted)(run)


class DeviceProcessGroup(ElasticProcessGroup):
    """One whose tensors of a device go to a native group; all others go over the links.

    Barriers carry no tensor and stay on the links, where the doorbell leaves them.
    A worker that builds beside the job answers all calls locally, whatever device they are for.
    """

    def __init__(self, engine: DeviceEngine, *args: Any, **kwargs: Any) -> None:
        """`engine` makes the native groups; the rest is that of ElasticProcessGroup."""
        super().__init__(*args, **kwargs)
        self.engine = engine

    def _is_native(self, device_type: str) -> bool:
        return device_type == self.engine.device_type and not self._links.detached

    allreduce = _routed("allreduce")
    allreduce_coalesced = _routed("allreduce_coalesced")
    reduce = _routed("reduce")
    reduce_scatter = _routed("reduce_scatter")
    reduce_scatter_single = _routed("reduce_scatter_single")
    reduce_scatter_single_coalesced = _routed("reduce_scatter_single_coalesced")
    reduce_scatter_tensor_coalesced = _routed("reduce_scatter_tensor_coalesced")
    _reduce_scatter_base = _routed("_reduce_scatter_base")
    broadcast = _routed("broadcast")
    allgather = _routed("allgather")
    allgather_coalesced = _routed("allgather_coalesced")
    all_gather_single = _routed("all_gather_single")
    all_gather_single_coalesced = _routed("all_gather_single_coalesced")
    allgather_into_tensor_coalesced = _routed("allgather_into_tensor_coalesced")
    _allgather_base = _routed("_allgather_base")
    alltoall = _routed("alltoall")
    all_to_all_single = _routed("all_to_all_single")
    alltoall_base = _routed("alltoall_base")
    gather = _routed("gather")
    scatter = _routed("scatter")
    recv_anysource = _routed("recv_anysource")

    def send(self, tensors: Any, dstRank: int, tag: int = 0) -> Any:
        """Send one tensor."""
        return self._point("send", tensors, dstRank, tag)

    def recv(self, tensors: Any, srcRank: int, tag: int = 0) -> Any:
        """Receive one tensor."""
        return self._point("recv", tensors, srcRank, tag)

    def _point(self, call: str, tensors: Any, rank: int, tag: int) -> Any:
        if not self._is_native(device_of([tensors])) or rank < 0:
            return getattr(super(), call)(tensors, rank, tag)
        self._require_member(call)
        blank_ids(call, self.rank(), (tensors, rank, tag))
        return self.engine.launch(self, call, (tensors, rank, tag), {}, peer=rank)

    def takes_batches_on(self, device: torch.device) -> bool:
        """Return whether batch() is for tensors of this device now."""
        return self._is_native(device.type)

    def batch(self, operations: Sequence[P2POp]) -> list[Work]:
        """batch_isend_irecv on tensors of the device: one native group call, one Work."""
        device = operations[0].tensor.device
        self._require_member("batch_isend_irecv")
        self._start_coalescing(device)
        for one in operations:
            call = self.send if one.op is torch.distributed.isend else self.recv
            call([one.tensor], one.group_peer, one.tag)
        return [self._end_coalescing(device)]

    def _start_coalescing(self, device: torch.device) -> None:
        if self._is_native(device.type):
            self._require_member("coalescing")
            self.engine.start_coalescing(self, device)
        else:
            super()._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> Any:
        if self._is_native(device.type):
            return self.engine.end_coalescing(self, device)
        return super()._end_coalescing(device)

    def _require_member(self, call: str) -> None:
        if self.rank() < 0:
            raise self._refuse(call, f"is called by slot {self._links.slot}, which is no member")

    def shutdown(self) -> None:
        """Leave the group table and let go of the communicator."""
        self.engine.release(self.group_name)
        super().shutdown()

    abort = shutdown


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

    def run(self: "OrderedProcessGroup", *args: Any, **kwargs: Any) -> Any:
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
