"""Reduces a step's gradients: natively while healthy, in canonical order after a loss.

The reduce-scatter of our groups already adds the replicas in rank order, over NCCL too in exact
mode, which while healthy is the canonical order of ``core/step/sum_order.py``. After a loss, in
exact mode, each contribution is shipped to the shard owners bucket by bucket as a pass completes
it, and they fold them all.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core.distributed import DistributedDataParallel
from torch.distributed import AllToAllOptions, Work

from elaswave_plugin.adapters.megatron.sums.kept_sums import KeptSums
from elaswave_plugin.around import around
from elaswave_plugin.communicator.groups import term_sums
from elaswave_plugin.communicator.groups.group_core import ElasticWork
from elaswave_plugin.core.step.dataflow import Dataflow
from elaswave_plugin.core.step.sum_order import Contribution, FoldTerm
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.values.set_within import set_within

# Of a worker's shard of a bucket, exchanged and added at once: 4 MiB.
SLICE_ELEMENTS = 1 << 20


class _Slice(NamedTuple):
    """A part of a worker's shard of a bucket."""

    bucket: int
    cut: slice


class _Departure:
    """The buckets of a contribution that have left, and what the others wait for."""

    def __init__(self, contribution: Contribution, usual: Mapping[Any, int]) -> None:
        """``usual``: gradients that a pass makes, by parameter, as passes before have shown."""
        self.contribution = contribution
        self.left: set[Any] = set()
        self.made = Counter[Any]()
        self._usual = usual

    def completes(self, parameter: Any, bucket: Any) -> bool:
        """Note a gradient; true where it was the last one of the bucket.

        Raises ConfigurationError where the bucket has left.
        """
        if bucket in self.left:
            raise ConfigurationError(
                "a parameter got more gradients in a pass than in the one before, and those before"
                " were sent: run the script without --overlap-grad-reduce"
            )
        self.made[parameter] += 1
        return all(self.made[one] == self._usual.get(one) for one in bucket.params)


class GradientReduction:
    """Stands before ``start_grad_sync`` / ``finish_grad_sync`` of every bucket group of a model."""

    def __init__(
        self,
        chunks: Sequence[DistributedDataParallel],
        *,
        slot: int,
        exact: bool,
        kept: KeptSums,
        announce: Callable[[str], None],
        summing: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """``summing()``: a block in which the gradients of a step are summed as while healthy."""
        self._bucket_groups: list[Any] = []
        self._buffers = [buffer for chunk in chunks for buffer in chunk.buffers]
        self._slot = slot
        self._exact = exact
        self.kept = kept
        self._announce = announce
        self._summing = summing
        self._group = chunks[0].intra_dp_cp_group
        self._native = True
        self._ranks: tuple[int, ...] = ()
        self._num_microbatches = 0
        # The canonical order, and by slot the replica whose sum stays in its gradients.
        self._terms: tuple[FoldTerm, ...] = ()
        self._in_place: dict[int, int] = {}
        # By bucket and lost replica: the sum of what it contributes to the own shard.
        self._sums: dict[tuple[int, int], tuple[torch.Tensor, ElasticWork]] = {}
        # The slices of this step's sums, and by slice on their way: the replicas that are in the
        # gradients of others.
        self._slices: list[_Slice] = []
        self._arriving: dict[int, tuple[Work, dict[int, torch.Tensor]]] = {}
        self._sends: list[tuple[ElasticWork, torch.Tensor]] = []
        self._departure: _Departure | None = None
        self._usual: dict[Any, int] = {}
        self.watch(chunks)

    def watch(self, chunks: Sequence[DistributedDataParallel]) -> None:
        """Stand before the bucket groups that the model has now."""
        known, self._bucket_groups = self._bucket_groups, []
        # Layers that have moved away would stay in memory by it.
        self._usual.clear()
        for group in (group for chunk in chunks for group in chunk.bucket_groups):
            self._bucket_groups.append(group)
            if group not in known:
                start, finish = partial(self._start, group), partial(self._finish, group)
                group.start_grad_sync = around(start)(group.start_grad_sync)
                group.finish_grad_sync = around(finish)(group.finish_grad_sync)
                ready = partial(self._ready, group)
                group.register_grad_ready = around(ready)(group.register_grad_ready)

    def set_dataflow(
        self, dataflow: Dataflow | None, ranks: tuple[int, ...], *, native: bool
    ) -> None:
        """Reduce by ``dataflow`` from now on; ``ranks``: slots of the data-parallel group.

        None has no canonical order, and is for fast mode. ``native``: the framework's own schedule
        runs, and starts the reductions itself.
        """
        assert native or dataflow is not None or not self._exact
        self._native, self._ranks = native, ranks
        self._num_microbatches, self._terms, self._in_place = 0, (), {}
        if dataflow is not None:
            self._num_microbatches, self._terms = dataflow.num_microbatches, dataflow.fold()
            kept = ((slot, dataflow.in_place(slot)) for slot, _ in dataflow.placement)
            self._in_place = {slot: one.replica for slot, one in kept if one is not None}
        self.drop()

    def drop(self) -> None:
        """Forget contributions of an interrupted step."""
        self._sums.clear()
        self._slices.clear()
        self._arriving.clear()
        self._sends.clear()

    def go_on_fast(self) -> None:
        """Reduce natively after a loss as well, whose order of sums changes with the width."""
        self._exact = False

    @property
    def keeps_contributions_apart(self) -> bool:
        """True if each contribution has to be shipped on its own."""
        return self._exact and not self._native

    def begin(self) -> None:
        """Have contributions of lost replicas added up from now on, as they come."""
        shipped = [one for one in self._terms if one.replica not in self._in_place.values()]
        for index, bucket in enumerate(self._buckets()):
            for term in shipped:
                total = torch.empty(self._shard(bucket, 0).shape, dtype=bucket.grad_data.dtype)
                parts = [
                    (self._ranks.index(slot), self._tag(index, part.microbatches[0]))
                    for slot, part in term.chain
                ]
                work = term_sums.add_terms(total, self._group, terms=parts)
                self._sums[index, term.replica] = total, work

    @contextmanager
    def shipping(self, contribution: Contribution) -> Iterator[None]:
        """Send what the buffers hold after the pass inside to the shard owners: one contribution.

        A bucket leaves as soon as the pass has completed it, where the script has reductions
        overlap the passes, else behind it. They leave from where they are: see `await_sent`.
        """
        departure = _Departure(contribution, self._usual)
        with set_within(self, "_departure", departure):
            yield
        self._usual.update(departure.made)
        self._check_gradients()
        for bucket in self._buckets():
            if bucket not in departure.left:
                self._send_off(bucket, departure)

    def _send_off(self, bucket: Any, departure: "_Departure") -> None:
        departure.left.add(bucket)
        tag = self._tag(self._buckets().index(bucket), departure.contribution.microbatches[0])
        for rank in range(len(self._ranks)):
            piece = self._shard(bucket, rank)
            work = term_sums.send_term(piece, self._group, rank=rank, tag=tag)
            self._sends.append((work, piece))

    def await_sent(self) -> None:
        """Wait until all that was shipped has left, so that its memory may be written again."""
        for work, _ in self._sends:
            work.wait()
        self._sends.clear()

    def _check_gradients(self) -> None:
        for group in self._bucket_groups:
            nan, large = (
                group.ddp_config.check_for_nan_in_grad,
                group.ddp_config.check_for_large_grads,
            )
            if nan or large:
                group.check_grads(check_for_nan_or_inf=nan, check_for_large=large)

    def _buckets(self) -> list[Any]:
        return [bucket for buffer in self._buffers for bucket in buffer.buckets]

    def _shard(self, bucket: Any, rank: int) -> torch.Tensor:
        size = bucket.grad_data.numel() // len(self._ranks)
        piece: torch.Tensor = bucket.grad_data[rank * size : (rank + 1) * size]
        return piece

    def _tag(self, bucket: int, number: int) -> int:
        """A contribution's by its first micro-batch."""
        return bucket * self._num_microbatches + number

    def _ready(
        self, group: Any, native: Callable[..., None], param: Any, *args: Any, **kwargs: Any
    ) -> None:
        native(param, *args, **kwargs)
        departure = self._departure
        if departure is not None:
            bucket = group.param_to_bucket[param]
            if departure.completes(param, bucket):
                self._send_off(bucket, departure)

    def _start(
        self, group: Any, native: Callable[..., None], force_all_reduce: bool | None = False
    ) -> None:
        # Where the backward pass that it is a part of is completed, nothing is reduced.
        with self.kept.completing():
            self._announce("reduce")
            for bucket in group.buckets if self.kept.contribution is not None else ():
                self.kept.before_reduction(bucket, self._shard(bucket, self._group.rank()))
                self.kept.scales(bucket)
            native(force_all_reduce=force_all_reduce)

    def _finish(
        self, group: Any, native: Callable[..., None], force_all_reduce: bool | None = False
    ) -> None:
        if self._native:
            with self._summing():
                # Nothing is waited for that was left out.
                self.kept.check()
                native(force_all_reduce=force_all_reduce)
            if group is self._bucket_groups[-1]:
                self.kept.before_finalize()
        elif not self._exact:
            # The executor counted no gradients, so nothing was started during the backward.
            if group.ddp_config.overlap_grad_reduce:
                group.start_grad_sync(force_all_reduce=force_all_reduce)
            native(force_all_reduce=force_all_reduce)
        else:
            self._announce("reduce")
            group.param_gather_dispatched = False
            if group is self._bucket_groups[0]:
                # A sum is written where gradients may have been sent from.
                self.await_sent()
                self.kept.room = None
                self._check_gradients()
            for bucket in group.buckets:
                self._fold(self._buckets().index(bucket))
            if group is self._bucket_groups[-1]:
                self.await_sent()
                self.drop()
                self.kept.before_finalize()

    def _exchange(self, number: int) -> None:
        """Have a slice of the replicas that are in the gradients of others, who get ours.

        By the group's own all-to-all, so over NCCL where it uses that.
        """
        index, cut = self._slices[number]
        bucket = self._buckets()[index]
        me, mine = self._group.rank(), self._in_place.get(self._slot)
        if mine is not None and cut.start == 0:
            self.kept.before_reduction(bucket, self._shard(bucket, me))
            if self.kept.scales(bucket):
                bucket.grad_data *= bucket.gradient_scaling_factor
        own = self._shard(bucket, me)[cut]
        nothing, arriving = own[:0], {}
        outs, ins = [], []
        for rank, slot in enumerate(self._ranks):
            theirs = self._in_place.get(slot)
            comes = rank != me and theirs is not None
            outs.append(torch.empty_like(own) if comes else nothing)
            if theirs is not None and comes:
                arriving[theirs] = outs[-1]
            goes = rank != me and mine is not None
            ins.append(self._shard(bucket, rank)[cut] if goes else nothing)
        self._arriving[number] = self._group.alltoall(outs, ins, AllToAllOptions()), arriving

    def _fold(self, index: int) -> None:
        """Add all replicas' parts of this worker's shard of a bucket in canonical order.

        Slice by slice: little memory for what arrives, however large a bucket is.
        """
        if not self._slices:
            self._slices = [
                _Slice(one, slice(start, start + SLICE_ELEMENTS))
                for one, bucket in enumerate(self._buckets())
                for start in range(0, self._shard(bucket, 0).numel(), SLICE_ELEMENTS)
            ]
        for number, one in enumerate(self._slices):
            if one.bucket != index:
                continue
            # One ahead, so that bytes travel while others are added.
            for asked in range(number, min(number + 2, len(self._slices))):
                if asked not in self._arriving:
                    self._exchange(asked)
            self._fold_slice(number, one)
        for replica in [replica for one, replica in self._sums if one == index]:
            del self._sums[index, replica]

    def _fold_slice(self, number: int, one: _Slice) -> None:
        bucket = self._buckets()[one.bucket]
        own, mine = self._shard(bucket, self._group.rank())[one.cut], self._in_place.get(self._slot)
        work, arrived = self._arriving.pop(number)
        work.wait()
        total: torch.Tensor | None = None
        for term in self._terms:
            if term.replica == mine:
                replica = own
            elif term.replica in arrived:
                replica = arrived.pop(term.replica)
            else:
                summed, work = self._sums[one.bucket, term.replica]
                work.wait()
                replica = summed[one.cut].to(own.device)
                if bucket.gradient_scaling_factor != 1.0:
                    replica *= bucket.gradient_scaling_factor
            total = replica if total is None else total.add_(replica)
        assert total is not None
        own.copy_(total)
