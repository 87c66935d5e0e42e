"""The c10d calls of a group with a device engine: tensors of its device go to the native group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from elaswave_plugin.communicator.device.blank_ids import blank_ids
from elaswave_plugin.communicator.device.engine import DeviceEngine
from elaswave_plugin.communicator.groups.group_calls import ElasticProcessGroup
from elaswave_plugin.communicator.links.body_calls import MADE_AGAIN, made_again, noted

if TYPE_CHECKING:
    from torch.distributed import P2POp, Work


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

    def run(self: DeviceProcessGroup, *args: Any, **kwargs: Any) -> Any:
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
