"""Reduces a step's gradients: natively while healthy, in canonical order after a loss.

The reduce-scatter of our groups already adds the replicas in rank order, over NCCL too in exact
mode, which while healthy is the canonical order of ``core/step/sum_order.py``. After a loss, in
exact mode, each contribution is shipped to the shard owners as soon as it is complete, and they
fold them all.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel

from elaswave_plugin.communicator.groups import tagged
from elaswave_plugin.core.step.dataflow import Dataflow
from elaswave_plugin.core.step.sum_order import Contribution


class GradientReduction:
    """Stands before ``start_grad_sync`` / ``finish_grad_sync`` of every bucket group of a model."""

    def __init__(
        self,
        chunks: Sequence[DistributedDataParallel],
        *,
        slot: int,
        exact: bool,
        announce: Callable[[str], None],
    ) -> None:
        self._bucket_groups: list[Any] = []
        self._buffers = [buffer for chunk in chunks for buffer in chunk.buffers]
        self._slot = slot
        self._exact = exact
        self._announce = announce
        self._group = chunks[0].intra_dp_cp_group
        self._dataflow: Dataflow | None = None
        self._native = True
        self._ranks: tuple[int, ...] = ()
        self._pieces: dict[tuple[int, int], torch.Tensor] = {}
        self._sends: list[tuple[Any, torch.Tensor]] = []
        self.watch(chunks)

    def watch(self, chunks: Sequence[DistributedDataParallel]) -> None:
        """Stand before the bucket groups that the model has now."""
        known, self._bucket_groups = self._bucket_groups, []
        for group in (group for chunk in chunks for group in chunk.bucket_groups):
            self._bucket_groups.append(group)
            if group not in known:
                group.start_grad_sync = self._starting(group.start_grad_sync)
                group.finish_grad_sync = self._finishing(group, group.finish_grad_sync)

    def set_dataflow(
        self, dataflow: Dataflow | None, ranks: tuple[int, ...], *, native: bool
    ) -> None:
        """Reduce by ``dataflow`` from now on; ``ranks``: slots of the data-parallel group.

        None has no canonical order, and is for fast mode. ``native``: the framework's own schedule
        runs, and starts the reductions itself.
        """
        assert native or dataflow is not None or not self._exact
        self._dataflow, self._native = dataflow, native
        self._ranks = ranks
        self.drop()

    def drop(self) -> None:
        """Forget contributions of an interrupted step."""
        self._pieces.clear()
        self._sends.clear()

    def go_on_fast(self) -> None:
        """Reduce natively after a loss as well, whose order of sums changes with the width."""
        self._exact = False

    @property
    def keeps_contributions_apart(self) -> bool:
        """True if each contribution has to be shipped on its own."""
        return self._exact and not self._native

    def ship(self, contribution: Contribution) -> None:
        """Send the gradients now in the buffers to the shard owners, as one contribution."""
        me = self._group.rank()
        first = contribution.microbatches[0]
        for group in self._bucket_groups:
            nan, large = (
                group.ddp_config.check_for_nan_in_grad,
                group.ddp_config.check_for_large_grads,
            )
            if nan or large:
                group.check_grads(check_for_nan_or_inf=nan, check_for_large=large)
        for index, bucket in enumerate(self._buckets()):
            size = bucket.grad_data.numel() // len(self._ranks)
            # The buffers are zeroed for the next contribution while the bytes travel.
            copy = bucket.grad_data.clone()
            self._pieces[index, first] = copy[me * size : (me + 1) * size]
            for rank in range(len(self._ranks)):
                if rank != me:
                    piece = copy[rank * size : (rank + 1) * size]
                    work = tagged.send(piece, self._group, rank=rank, tag=self._tag(index, first))
                    self._sends.append((work, piece))

    def _buckets(self) -> list[Any]:
        return [bucket for buffer in self._buffers for bucket in buffer.buckets]

    def _tag(self, bucket: int, microbatch: int) -> int:
        assert self._dataflow is not None
        return bucket * self._dataflow.num_microbatches + microbatch

    def _starting(self, native: Callable[..., None]) -> Callable[..., None]:
        def start_grad_sync(force_all_reduce: bool | None = False) -> None:
            self._announce("reduce")
            native(force_all_reduce=force_all_reduce)

        return start_grad_sync

    def _finishing(self, group: Any, native: Callable[..., None]) -> Callable[..., None]:
        def finish_grad_sync(force_all_reduce: bool | None = False) -> None:
            if self._native:
                native(force_all_reduce=force_all_reduce)
            elif not self._exact:
                # The executor counted no gradients, so nothing was started during the backward.
                if group.ddp_config.overlap_grad_reduce:
                    group.start_grad_sync(force_all_reduce=force_all_reduce)
                native(force_all_reduce=force_all_reduce)
            else:
                self._announce("reduce")
                group.param_gather_dispatched = False
                for bucket in group.buckets:
                    self._fold(self._buckets().index(bucket), bucket)
                if group is self._bucket_groups[-1]:
                    for work, _ in self._sends:
                        work.wait()
                    self.drop()

        return finish_grad_sync

    def _fold(self, index: int, bucket: Any) -> None:
        """Add all contributions to this worker's shard of ``bucket`` in canonical order."""
        assert self._dataflow is not None
        me, size = self._group.rank(), bucket.grad_data.numel() // len(self._ranks)
        terms = self._dataflow.fold()
        arriving: dict[int, tagged.Arriving] = {}
        for term in terms:
            for slot, part in term.chain:
                if slot != self._slot:
                    space = torch.empty_like(bucket.grad_data[:size])
                    first = part.microbatches[0]
                    arriving[first] = tagged.receive(
                        space,
                        self._group,
                        rank=self._ranks.index(slot),
                        tag=self._tag(index, first),
                    )

        def piece(part: Contribution) -> torch.Tensor:
            first = part.microbatches[0]
            if first not in arriving:
                return self._pieces.pop((index, first))
            return arriving.pop(first).wait()

        total: torch.Tensor | None = None
        for term in terms:
            (_, head), *rest = term.chain
            replica = piece(head)
            for _, part in rest:
                replica.add_(piece(part))
            if bucket.gradient_scaling_factor != 1.0:
                replica *= bucket.gradient_scaling_factor
            total = replica if total is None else total.add_(replica)
        bucket.grad_data[me * size : (me + 1) * size].copy_(total)
