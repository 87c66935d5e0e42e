"""A native group on streams that run later: NcclGroup's own code over a backend without NCCL."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from elaswave_plugin.communicator.device.communicator import Inner, LinkStore
from elaswave_plugin.communicator.device.nccl import NcclGroup
from elaswave_plugin.communicator.device.ordered_sums import combine_in_a_loop
from elaswave_plugin.communicator.links.link_table import LinkTable
from elaswave_plugin.communicator.process_group import GroupTable
from tests.gpu import streams
from tests.job_secret import SECRET

MEMBERS = (0, 1, 2)
# Longer than the kernels beside it: who does not wait for it comes first every time.
CALL_S = 5 * streams.PAUSE_S


class Backend:
    """NCCL for one member: kernels that wait for the others, and end when aborted."""

    def __init__(self, others: threading.Event) -> None:
        self.stream = streams.Stream()
        self.aborted = threading.Event()
        self.others = others
        """Set once the others take part, who hold the same as we do."""
        self.may_end = threading.Event()
        self.may_end.set()
        """Clear while a kernel that is aborted has not ended yet."""

    def meet(self) -> bool:
        """Wait on the device for the others; false where an abort came first."""
        while not self.others.wait(0.001):
            if self.aborted.is_set():
                streams.wait_for(self.may_end)
                return False
        return not self.aborted.is_set()

    def abort(self) -> None:
        self.aborted.set()

    def get_error(self) -> Any:
        return self

    name = "SUCCESS"


class LaterWork:
    """A work on NCCL's own stream."""

    def __init__(self, event: streams.Event) -> None:
        self._event = event

    def is_completed(self) -> bool:
        return self._event.query()

    is_success = is_completed

    def wait(self) -> bool:
        """The current stream goes on behind it, the host does not wait."""
        self._event.wait()
        return True

    def exception(self) -> None:
        return None

    def result(self) -> list[torch.Tensor]:
        return []


class Calls:
    """The c10d calls that these tests make, for a group of three who all hold the same."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def allreduce(self, tensors: Sequence[Any], options: Any = None) -> LaterWork | None:
        (tensor,) = tensors
        host = tensor.host
        return self._run(lambda: host.mul_(len(MEMBERS)), options)

    def broadcast(self, tensors: Sequence[Any], options: Any) -> LaterWork | None:
        (tensor,) = tensors
        host = tensor.host
        return self._run(lambda: host.fill_(1), options)

    def alltoall(self, outs: Any, ins: Any, options: Any) -> LaterWork | None:
        pairs = [(out.host, one.host) for out, one in zip(outs, ins, strict=True)]

        def exchange() -> None:
            for out, one in pairs:
                if out.numel() == one.numel():
                    out.copy_(one)

        return self._run(exchange, options)

    def _run(self, kernel: Any, options: Any) -> LaterWork | None:
        """As torch: what is not asynchronous runs on the current stream, and answers None."""

        def late() -> None:
            if self._backend.meet():
                kernel()

        if not getattr(options, "asyncOp", True):
            streams.current_stream().put(late, pause_s=CALL_S)
            return None
        self._backend.stream.wait_stream(streams.current_stream())
        self._backend.stream.put(late, pause_s=CALL_S)
        return LaterWork(self._backend.stream.record_event())


class LaterGroup(NcclGroup):
    """NcclGroup itself, but for who makes the calls."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._store = None
        self._apart: Any = None
        self.calls = Calls(backend)


class LaterMaker:
    """Makes such groups; their members are there at once, unless a test says otherwise."""

    device_type = "cuda"
    combine = staticmethod(combine_in_a_loop)
    shrinks = False

    def __init__(self) -> None:
        self.others = threading.Event()
        self.others.set()
        self.backends: list[Backend] = []

    def make(self, store: LinkStore, name: str, rank: int, size: int) -> Inner:
        self.backends.append(Backend(self.others))
        return LaterGroup(self.backends[-1])


class Worker:
    """Slot 0 of three, whose other members are only made up."""

    def __init__(self, cuda: streams.Cuda, *, exact: bool) -> None:
        self.cuda = cuda
        self.links = LinkTable(0, secret=SECRET)
        self.maker = LaterMaker()
        self.table = GroupTable(self.links, maker=self.maker, exact=exact)
        self.open(1, MEMBERS)
        self.group: Any = self.table.create("dp", MEMBERS)

    def open(self, epoch: int, slots: Sequence[int]) -> None:
        self.links.open_epoch(epoch, dict.fromkeys(slots, self.links.address))

    def lose_one(self) -> None:
        """Slot 2 is lost: the doorbell, the facts, the new epoch, and all aborts are over."""
        self.links.interrupt(2, "test")
        facts = self.table.device_facts()
        self.open(2, (0, 1))
        self.table.edit_all((0, 1), {2})
        self.table.settle(dict.fromkeys((0, 1), facts))


@contextmanager
def worker(monkeypatch: pytest.MonkeyPatch, *, exact: bool = False) -> Iterator[Worker]:
    """A worker whose device is not there; all of its streams have ended at the end."""
    with streams.installed(monkeypatch) as cuda:
        one = Worker(cuda, exact=exact)
        try:
            yield one
        finally:
            for backend in one.maker.backends:
                backend.abort()
                backend.stream.end()
            one.links.close()
