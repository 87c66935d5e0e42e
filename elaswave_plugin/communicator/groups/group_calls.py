"""The c10d calls of a process group, each under every name that torch 2.11 to 2.15 use."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroup

from elaswave_plugin.communicator.groups.group_core import ElasticWork, GroupCore, Tensors
from elaswave_plugin.communicator.links.body_calls import made_again, noted
from elaswave_plugin.communicator.links.buffers import flat_bytes
from elaswave_plugin.communicator.links.link_table import LinkTable
from elaswave_plugin.communicator.links.operation import ANY_SOURCE, Operation, Steps


class GroupCalls(GroupCore):
    """Collectives and point-to-point calls on dense tensors of any dtype.

    The links carry host memory: tensors of a GPU go through a copy in it.
    """

    # ---- reductions --------------------------------------------------------------------------

    def _all_reduce(self, tensor: torch.Tensor, opts: Any, timeout: Any = None) -> Operation:
        fold = self._fold("all_reduce", opts, tensor.dtype)
        self._dense("all_reduce", tensor)
        flat = _host(tensor)

        def body(op: Operation) -> Steps:
            yield from self._run.all_reduce(op, flat_bytes(flat), fold)
            _store(tensor, flat)

        return self._start("all_reduce", body, [tensor], opts, dtype=tensor.dtype, timeout=timeout)

    @made_again
    def allreduce(self, tensors: Any, opts: Any = "SUM", timeout: Any = None) -> ElasticWork:
        """All-reduce of one tensor in place."""
        tensor = self._single("all_reduce", tensors)
        return self._work([self._all_reduce(tensor, opts, timeout)])

    @noted
    def allreduce_coalesced(self, tensors: Tensors, opts: Any = "SUM") -> ElasticWork:
        """All-reduce of several tensors in place."""
        return self._work([self._all_reduce(tensor, opts) for tensor in tensors])

    @noted
    def reduce(self, tensors: Any, root: Any, op: Any = "SUM", timeout: Any = None) -> ElasticWork:
        """Reduce one tensor to the root; `root` is a rank or ReduceOptions."""
        tensor = self._single("reduce", tensors)
        opts = op if isinstance(root, int) else root
        rank = root if isinstance(root, int) else root.rootRank
        fold = self._fold("reduce", opts, tensor.dtype)
        flat = _host(tensor)

        def body(operation: Operation) -> Steps:
            yield from self._run.reduce(operation, flat_bytes(flat), rank, fold)
            if operation.rank == rank:
                _store(tensor, flat)

        started = self._start("reduce", body, [tensor], opts, dtype=tensor.dtype, timeout=timeout)
        return self._work([started])

    def _reduce_scatter(
        self, output: torch.Tensor, inputs: Tensors, opts: Any, timeout: Any = None
    ) -> Operation:
        what = "reduce_scatter"
        self._dense(what, output, *inputs)
        fold = self._fold(what, opts, output.dtype)
        flats = [_host(tensor) for tensor in inputs]
        views = _cut(flats[0], self.size()) if len(flats) == 1 else [flat_bytes(f) for f in flats]
        out = _host_space(output)
        if len(views) != self.size() or len(views[self.rank()]) != out.nbytes:
            raise self._refuse(
                what, f"got {[len(v) for v in views]} bytes in and {out.nbytes} bytes out"
            )

        def body(op: Operation) -> Steps:
            yield from self._run.reduce_scatter(op, flat_bytes(out), views, fold)
            _store(output, out)

        return self._start(what, body, [output], opts, dtype=output.dtype, timeout=timeout)

    @noted
    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = "SUM", timeout: Any = None
    ) -> ElasticWork:
        """Reduce-scatter of a list of tensors, one a rank."""
        output = self._single("reduce_scatter", outputs)
        parts = inputs if isinstance(inputs[0], torch.Tensor) else inputs[0]
        if len(parts) != self.size():
            raise self._refuse("reduce_scatter", f"got {len(parts)} input tensors")
        if self.size() == 1:
            return self._work([self._reduce_scatter(output, [parts[0]], opts, timeout)])
        return self._work([self._reduce_scatter(output, parts, opts, timeout)])

    @noted
    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = "SUM"
    ) -> ElasticWork:
        """Reduce-scatter of one tensor, cut evenly over the ranks."""
        return self._work([self._reduce_scatter(output, [input], opts)])

    @noted
    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = "SUM"
    ) -> ElasticWork:
        """Several reduce_scatter_single at once."""
        pairs = zip(outputs, inputs, strict=True)
        return self._work([self._reduce_scatter(out, [data], opts) for out, data in pairs])

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # ---- copies ------------------------------------------------------------------------------

    @made_again
    def broadcast(self, tensors: Any, root: Any = 0, timeout: Any = None) -> ElasticWork:
        """Broadcast one tensor; `root` is a rank or BroadcastOptions."""
        tensor = self._single("broadcast", tensors)
        rank = root if isinstance(root, int) else root.rootRank
        flat = _host(tensor)

        def body(op: Operation) -> Steps:
            yield from self._run.broadcast(op, flat_bytes(flat), rank)
            if op.rank != rank:
                _store(tensor, flat)

        started = self._start(
            "broadcast", body, [tensor], root, dtype=tensor.dtype, timeout=timeout
        )
        return self._work([started])

    def _all_gather(
        self, outputs: Tensors, data: torch.Tensor, opts: Any, timeout: Any = None
    ) -> Operation:
        """`outputs` is one tensor a rank, or a single one that is cut evenly."""
        what = "all_gather"
        self._dense(what, data, *outputs)
        outs = [_host_space(o) for o in outputs]
        whole = len(outs) == 1 and self.size() > 1
        views = _cut(outs[0], self.size()) if whole else [flat_bytes(o) for o in outs]
        flat = _host(data)
        if len(views) != self.size() or len(views[self.rank()]) != flat.nbytes:
            raise self._refuse(
                what, f"got {flat.nbytes} bytes in and {[len(v) for v in views]} bytes out"
            )

        def body(op: Operation) -> Steps:
            yield from self._run.all_gather(op, views, flat_bytes(flat))
            for output, out in zip(outputs, outs, strict=True):
                _store(output, out)

        return self._start(what, body, outputs, opts, dtype=data.dtype, timeout=timeout)

    @noted
    def allgather(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: Any = None
    ) -> ElasticWork:
        """Gather all members' tensors everywhere; the tensors may differ in size."""
        data = self._single("all_gather", input_tensors)
        flat = isinstance(output_tensors[0], torch.Tensor)
        outputs = output_tensors if flat else output_tensors[0]
        if len(outputs) != self.size():
            raise self._refuse("all_gather", f"got {len(outputs)} output tensors")
        return self._work([self._all_gather(outputs, data, opts, timeout)])

    @noted
    def allgather_coalesced(
        self, output_lists: Sequence[Tensors], input_list: Tensors, opts: Any = None
    ) -> ElasticWork:
        """Several all-gathers; output_lists[j][i] is tensor i of rank j."""
        started = []
        for i, data in enumerate(input_list):
            outputs = [outputs[i] for outputs in output_lists]
            started.append(self._all_gather(outputs, data, opts))
        return self._work(started)

    @noted
    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> ElasticWork:
        """Gather all members' tensors into one."""
        return self._work([self._all_gather([output], input, opts)])

    @noted
    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> ElasticWork:
        """Several all_gather_single at once."""
        pairs = zip(outputs, inputs, strict=True)
        return self._work([self._all_gather([out], data, opts) for out, data in pairs])

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _all_to_all(
        self,
        outputs: Tensors,
        inputs: Tensors,
        split: tuple[list[int], list[int]] | None,
        opts: Any,
        timeout: Any = None,
    ) -> Operation:
        what = "all_to_all"
        self._dense(what, *outputs, *inputs)
        outs = [_host_space(o) for o in outputs]
        flats = [_host(tensor) for tensor in inputs]
        if split is None:
            into, views = [flat_bytes(o) for o in outs], [flat_bytes(f) for f in flats]
        else:
            into = _cut_rows(outs[0], split[0], self.size())
            views = _cut_rows(flats[0], split[1], self.size())
        if len(into) != self.size() or len(views) != self.size():
            raise self._refuse(what, f"got {len(into)} outputs and {len(views)} inputs")
        if len(into[self.rank()]) != len(views[self.rank()]):
            raise self._refuse(what, "got unequal sizes for our own part")

        def body(op: Operation) -> Steps:
            yield from self._run.all_to_all(op, into, views)
            for output, out in zip(outputs, outs, strict=True):
                _store(output, out)

        return self._start(what, body, outputs, opts, dtype=inputs[0].dtype, timeout=timeout)

    @noted
    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> ElasticWork:
        """outputs[j] becomes inputs[our rank] of rank j."""
        return self._work([self._all_to_all(outputs, inputs, None, opts)])

    @noted
    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
        timeout: Any = None,
    ) -> ElasticWork:
        """All-to-all of rows; without split sizes the rows are cut evenly."""
        split = (list(output_split_sizes), list(input_split_sizes))
        return self._work([self._all_to_all([output], [input], split, opts, timeout)])

    alltoall_base = all_to_all_single

    @noted
    def gather(
        self, output_tensors: Any, input_tensors: Any, root: Any = 0, timeout: Any = None
    ) -> ElasticWork:
        """Gather to the root; `root` is a rank or GatherOptions."""
        data = self._single("gather", input_tensors)
        rank = root if isinstance(root, int) else root.rootRank
        outputs: Tensors = []
        if rank == self.rank():
            flat = isinstance(output_tensors[0], torch.Tensor)
            outputs = output_tensors if flat else output_tensors[0]
            if len(outputs) != self.size():
                raise self._refuse("gather", f"got {len(outputs)} output tensors")
        self._dense("gather", *outputs)
        outs = [_host_space(o) for o in outputs]
        source = _host(data)

        def body(op: Operation) -> Steps:
            yield from self._run.gather(op, [flat_bytes(o) for o in outs], flat_bytes(source), rank)
            for output, out in zip(outputs, outs, strict=True):
                _store(output, out)

        started = self._start("gather", body, outputs, root, dtype=data.dtype, timeout=timeout)
        return self._work([started])

    def gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> ElasticWork:
        """Gather to the root, into one tensor; that of the others is not used."""
        outputs: Tensors = []
        if opts.rootRank == self.rank():
            if output.numel() != self.size() * input.numel():
                raise self._refuse(
                    "gather_single", f"got {input.numel()} elements in and {output.numel()} out"
                )
            outputs = output.view(self.size(), *input.shape).unbind()
        work: ElasticWork = self.gather([outputs], [input], opts)
        return work

    gather_into_tensor = gather_single

    @noted
    def scatter(
        self, output_tensors: Any, input_tensors: Any, root: Any = 0, timeout: Any = None
    ) -> ElasticWork:
        """Scatter from the root; `root` is a rank or ScatterOptions."""
        output = self._single("scatter", output_tensors)
        rank = root if isinstance(root, int) else root.rootRank
        inputs: Tensors = []
        if rank == self.rank():
            flat = isinstance(input_tensors[0], torch.Tensor)
            inputs = input_tensors if flat else input_tensors[0]
            if len(inputs) != self.size():
                raise self._refuse("scatter", f"got {len(inputs)} input tensors")
        self._dense("scatter", *inputs)
        flats = [_host(tensor) for tensor in inputs]
        out = _host_space(output)

        def body(op: Operation) -> Steps:
            yield from self._run.scatter(op, flat_bytes(out), [flat_bytes(f) for f in flats], rank)
            _store(output, out)

        started = self._start("scatter", body, [output], root, dtype=output.dtype, timeout=timeout)
        return self._work([started])

    @made_again
    def barrier(self, opts: Any = None, timeout: Any = None) -> ElasticWork:
        """Wait for all members."""
        return self._work([self._start("barrier", self._run.barrier, [], opts, timeout=timeout)])

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """A barrier; a late member is named by the LinkError of the timeout.

        Raises ConfigurationError for ``wait_all_ranks``, which would name all of them.
        """
        if wait_all_ranks:
            raise self._refuse(
                "monitored_barrier", "names the first late member: no wait_all_ranks"
            )
        self.barrier().wait(timeout or timedelta(0))

    # ---- point to point ----------------------------------------------------------------------

    def send(self, tensors: Any, dstRank: int, tag: int = 0) -> ElasticWork:
        """Send one tensor; done when its bytes have left or been copied."""
        tensor = self._single("send", tensors)
        flat = _host(tensor)

        def body(op: Operation) -> Steps:
            yield from self._run.send(op, flat_bytes(flat), dstRank)

        return self._work([self._start("send", body, [tensor], tag=tag)])

    def recv(self, tensors: Any, srcRank: int, tag: int = 0) -> ElasticWork:
        """Receive one tensor of exactly the sent size."""
        tensor = self._single("recv", tensors)
        flat = _host_space(tensor)

        def body(op: Operation) -> Steps:
            yield from self._run.receive(op, flat_bytes(flat), srcRank)
            _store(tensor, flat)

        return self._work([self._start("recv", body, [tensor], tag=tag)])

    def recv_anysource(self, tensors: Any, tag: int = 0) -> ElasticWork:
        """Receive one tensor from the first sender."""
        return self.recv(tensors, ANY_SOURCE, tag)

    # ---- coalescing --------------------------------------------------------------------------

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> ElasticWork:
        operations, self._coalesced = self._coalesced or [], None
        return ElasticWork(self._links, operations)


class ElasticProcessGroup(GroupCalls, ProcessGroup):  # type: ignore[misc]
    """A torch process group over a link table whose member list is edited in place.

    Every handle that a framework has captured stays valid.  Ours come first in the method order,
    so that C++ and Python find them before those of the base class.
    """

    def __init__(
        self,
        links: LinkTable,
        name: str,
        members: Sequence[int],
        *,
        timeout_s: float = 1800.0,
        on_shutdown: Callable[[str], None] = lambda name: None,
    ) -> None:
        """A group of slots in rank order; `on_shutdown(name)` is called when torch destroys it."""
        slots = tuple(members)
        rank = slots.index(links.slot) if links.slot in slots else -1
        init: Any = ProcessGroup.__init__
        init(self, rank, len(slots))
        GroupCalls.__init__(self, links, name, slots, timeout_s=timeout_s, on_shutdown=on_shutdown)


def _host(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's values, contiguous in host memory: itself where it is that already."""
    return tensor.detach().to("cpu").contiguous()


def _host_space(tensor: torch.Tensor) -> torch.Tensor:
    """Contiguous host memory for the tensor's values: itself where it is that already."""
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def _store(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a contiguous stand-in in host memory back into the caller's tensor."""
    if target.device.type != "cpu" or target.data_ptr() != source.data_ptr():
        target.detach().copy_(source)


def _cut(flat: torch.Tensor, count: int) -> list[memoryview]:
    view = flat_bytes(flat)
    size, rest = divmod(len(view), count)
    return [view] if rest else [view[i * size : (i + 1) * size] for i in range(count)]


def _cut_rows(flat: torch.Tensor, sizes: list[int], count: int) -> list[memoryview]:
    if not sizes:
        return _cut(flat, count)
    view = flat_bytes(flat)
    rows = flat.shape[0] if flat.dim() else 0
    row_bytes = len(view) // rows if rows else 0
    if sum(sizes) != rows:
        return []
    views, at = [], 0
    for size in sizes:
        views.append(view[at : at + size * row_bytes])
        at += size * row_bytes
    return views


# Messages by tag between two members: over the links, whatever carries the group's collectives. A
# pipeline with unequal stages, and contributions to gradients, are sent as they become ready and
# taken as they are needed, in orders that differ at the two ends. NCCL knows no tags: it pairs what
# two workers send and take by order alone, and a receive that comes first holds up what follows it.


class Arriving:
    """A message on its way to ``target``, which has it once ``wait`` returns."""

    def __init__(self, work: ElasticWork, space: torch.Tensor, target: torch.Tensor) -> None:
        self._work, self._space, self._target = work, space, target

    def wait(self) -> torch.Tensor:
        """The target. Raises EpochChanged, LinkError."""
        self._work.wait()
        if self._space is not self._target:
            self._target.copy_(self._space)
        return self._target


def send(tensor: torch.Tensor, group: Any, *, rank: int, tag: int) -> ElasticWork:
    """Send to a rank of an elastic group; done when the bytes have left or been copied."""
    return ElasticProcessGroup.send(group, [tensor], rank, tag)


def receive(target: torch.Tensor, group: Any, *, rank: int, tag: int) -> Arriving:
    """Have a rank's tensor of the same shape and dtype in ``target``.

    What is for a device waits in host memory: the links' one thread may not wait for a stream,
    which itself may wait for workers that wait for these links.
    """
    space = target if target.device.type == "cpu" else torch.empty_like(target, device="cpu")
    return Arriving(ElasticProcessGroup.recv(group, [space], rank, tag), space, target)
