"""Runs the ordered operations of one worker of a pipeline whose stages are unequally wide.

Rectangular layouts run Megatron-Core's own schedule. After a loss the list of
``core/step/schedule.py`` is run instead, with Megatron-Core's own forward and backward steps
(megatron/core/ pipeline_parallel/schedules.py); the activations of each piece and their gradients
go to the worker of its samples at the next stage, point to point, row by row where the stages cut
the samples differently, and tagged by the first sample.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import schedules
from megatron.core.process_groups_config import ProcessGroupCollection

from elaswave_plugin.adapters.megatron.compat.versions import backward_step
from elaswave_plugin.adapters.megatron.state.buffers import layer_numbers
from elaswave_plugin.adapters.megatron.step.weight_gradients import WeightGradients, fuses
from elaswave_plugin.adapters.megatron.sums.accumulators import ASIDE, GradAccumulators
from elaswave_plugin.adapters.megatron.sums.reduction import GradientReduction
from elaswave_plugin.adapters.megatron.sums.tied_embeddings import TiedWeight, add_other_stage
from elaswave_plugin.communicator.groups import group_calls
from elaswave_plugin.core.planner.layer_times import LAYER
from elaswave_plugin.core.planner.layer_times import WEIGHTS as WEIGHT_PASS
from elaswave_plugin.core.planner.pipeline_flow import PipelineFlow
from elaswave_plugin.core.step.dataflow import Crossing
from elaswave_plugin.core.step.schedule import BACKWARD, FORWARD, WEIGHTS, Op
from elaswave_plugin.core.step.sum_order import Contribution
from elaswave_plugin.recovery.stopwatch import Stopwatch


class RaggedPipeline:
    """One worker's part of a step under a ragged layout; it must have a place in it."""

    def __init__(
        self,
        *,
        flow: PipelineFlow,
        slot: int,
        chunks: Sequence[DistributedDataParallel],
        reduction: GradientReduction,
        tied: dict[int, TiedWeight],
        weight_gradients: WeightGradients,
        stopwatch: Stopwatch,
        seq_length: int,
        micro_batch_size: int,
    ) -> None:
        """``tied``: where the stages keep the embedding that they share, by stage, if they do."""
        coordinate = flow.coordinate(slot)
        assert coordinate is not None
        self._flow, self._slot, self._coordinate = flow, slot, coordinate
        self._chunks, self._config = chunks, chunks[0].config
        self._reduction = reduction
        self._tied = tied
        self._weight_gradients, self._stopwatch = weight_gradients, stopwatch
        self._num_stages = len(flow.layout.stages)
        self._last = self._num_stages * len(chunks) - 1
        # All workers that have a place: the group over which Megatron-Core sums the grad norm.
        self._group = parallel_state.get_intra_distributed_optimizer_instance_group()
        self._ranks = self._group.members
        self._shape = schedules.get_tensor_shapes(
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
            decoder_seq_length=None,
            config=self._config,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            cp_group=parallel_state.get_context_parallel_group(),
        )[0]
        self._ops = flow.ops(slot)
        self._last_kind = WEIGHTS if flow.is_split else BACKWARD
        before, after = flow.crossings(coordinate.stage - 1), flow.crossings(coordinate.stage)
        self._above: list[Crossing] = [one for one in before if one.receiver == coordinate.order]
        self._below: list[Crossing] = [one for one in after if one.sender == coordinate.order]
        # What this worker contributes to the reduction, where contributions are kept apart.
        self._parts: tuple[Contribution, ...] = ()
        self._in_place: Contribution | None = None
        if reduction.keeps_contributions_apart:
            deal = flow.shard_group(coordinate.stage, coordinate.tp)
            self._parts, self._in_place = deal.contributions(slot), deal.in_place(slot)
        # Those in the sums that are gone on from; passes that others need add to other memory.
        self._earlier = reduction.kept.earlier
        self._held: dict[tuple[int, int], tuple[torch.Tensor | None, torch.Tensor]] = {}
        self._left = {
            part.microbatches[0]: len(part.microbatches) * len(chunks) for part in self._parts
        }
        self._sends: list[tuple[Any, torch.Tensor]] = []
        self._tokens = torch.zeros([], dtype=torch.int, device=torch.cuda.current_device())
        if self._earlier:
            self._tokens += sum(reduction.kept.tokens)

    def run(
        self, forward_step_func: Callable[..., Any], data_iterator: Any, *, forward_only: bool
    ) -> list[Any]:
        """Run all operations, and finalize the gradients where the schedule is to do that.

        Returns the losses in the order of forwards.

        Only the last stage reports losses.
        """
        losses: list[Any] = []
        self._gather_weights()
        iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
        with ExitStack() as stack:
            for chunk in self._chunks:
                stack.enter_context(chunk.no_sync())
            stack.enter_context(self._weight_gradients.step(self._chunks))
            accumulators = stack.enter_context(self._accumulators())
            if self._reduction.keeps_contributions_apart and not forward_only:
                self._reduction.begin()
                if not self._earlier:
                    self._reduction.kept.begin(None if self._flow.is_split else self._in_place)
            for op in self._ops:
                if len(self._chunks) > 1:
                    parallel_state.set_virtual_pipeline_model_parallel_rank(op.chunk)
                if op.kind == FORWARD:
                    if fuses(self._config) and not forward_only:
                        # What is added to in the backward is found in the forward.
                        self._select(op, accumulators)
                    self._forward(op, forward_step_func, iterators[op.chunk], losses, forward_only)
                elif not forward_only:
                    self._accumulate(op, accumulators)
        for work, _ in self._sends:
            work.wait()
        if not forward_only and self._config.finalize_model_grads_func is not None:
            self._finalize()
        return losses

    def _gather_weights(self) -> None:
        """Have the weights whole that forward passes would gather.

        Workers of a stage come to their first passes in turn, and one that waits for another in a
        gather would hold up the stage that has to feed that one.
        """
        gathering = (chunk for chunk in self._chunks if chunk.remove_forward_pre_hook_handles)
        groups = [group for chunk in gathering for group in chunk.bucket_groups]
        for group in groups:
            if not group.param_gather_dispatched:
                group.start_param_sync()
        for group in groups:
            if group.param_gather_handle is not None:
                group.param_gather_handle.wait()
                group.param_gather_handle = None

    def _accumulators(self) -> GradAccumulators:
        own = None if self._in_place is None else self._in_place.microbatches[0]
        return GradAccumulators(
            self._chunks,
            in_place=own,
            await_sent=self._reduction.await_sent,
            kept=own if self._earlier else None,
            spare=self._reduction.kept.room,
        )

    # ---- one operation --------------------------------------------------------------------------

    def _forward(
        self,
        op: Op,
        forward_step_func: Callable[..., Any],
        data_iterator: Any,
        losses: list[Any],
        forward_only: bool,
    ) -> None:
        part = self._part_of(op)
        arrived = None
        if part > 0:
            arrived = self._receive(op, part - 1)
            arrived.requires_grad_()
        output, tokens = schedules.forward_step(
            forward_step_func,
            data_iterator,
            self._chunks[op.chunk],
            self._flow.num_microbatches // self._flow.layout.dp,
            arrived,
            losses,
            self._config,
            parallel_state.get_context_parallel_world_size(),
            is_first_microbatch=op == self._ops[0],
            current_microbatch=op.start // self._flow.micro_batch_size,
            vp_stage=op.chunk if len(self._chunks) > 1 else None,
            is_last_stage=part == self._last,
        )
        if not self._reduction.keeps_contributions_apart or self._contribution_of(op):
            self._tokens += tokens
        if part < self._last:
            self._send(output.detach(), op, part + 1)
        if not forward_only:
            self._held[op.chunk, op.start] = arrived, output
            if part < self._last:
                # What is sent shares the storage, and keeps it until it has left.
                schedules.deallocate_output_tensor(output, self._config.deallocate_pipeline_outputs)

    def _accumulate(self, op: Op, accumulators: GradAccumulators) -> None:
        """Run a backward, or the weight gradients that it put off."""
        contribution = self._select(op, accumulators)
        piece = op.chunk, op.start
        with self._departing(contribution, op, accumulators):
            if op.kind == WEIGHTS:
                self._stopwatch.operations.enter()
                begun = self._stopwatch.mark()
                self._weight_gradients.compute(piece)
                count = (op.stop - op.start) * len(layer_numbers([self._chunks[op.chunk]]))
                self._stopwatch.lap(LAYER, WEIGHT_PASS, begun, count=max(1, count))
                self._stopwatch.operations.leave()
            elif self._flow.is_split:
                with self._weight_gradients.put_off(piece):
                    self._backward(op)
            else:
                self._backward(op)

    @contextmanager
    def _departing(
        self, one: Contribution | None, op: Op, accumulators: GradAccumulators
    ) -> Iterator[None]:
        """Send a contribution off with the last of its operations.

        Each chunk runs its micro-batches in rising order, as its sum is defined.
        """
        if one is None or op.kind != self._last_kind:
            yield
            return
        first = one.microbatches[0]
        self._left[first] -= 1
        if self._left[first] or one == self._in_place:
            yield
            return
        with self._reduction.shipping(one):
            yield
        accumulators.release(first)

    def _select(self, op: Op, accumulators: GradAccumulators) -> Contribution | None:
        """Have gradients added to the contribution that an operation is part of, if to one."""
        if not self._reduction.keeps_contributions_apart:
            return None
        contribution = self._contribution_of(op)
        accumulators.select(ASIDE if contribution is None else contribution.microbatches[0])
        return contribution

    def _contribution_of(self, op: Op) -> Contribution | None:
        """Return what an operation adds to; None where only other stages need its pass."""
        microbatch = op.start // self._flow.micro_batch_size
        if microbatch in self._earlier:
            return None
        return next((one for one in self._parts if microbatch in one.microbatches), None)

    def _backward(self, op: Op) -> None:
        part = self._part_of(op)
        gradient = self._receive(op, part + 1) if part < self._last else None
        arrived, output = self._held.pop((op.chunk, op.start))
        input_gradient = backward_step(arrived, output, gradient, self._config)
        if input_gradient is not None:
            self._send(input_gradient, op, part - 1)

    def _part_of(self, op: Op) -> int:
        """The place of an operation's layers in the model: its virtual stage."""
        return op.chunk * self._num_stages + self._coordinate.stage

    # ---- the end of the step --------------------------------------------------------------------

    def _finalize(self) -> None:
        """Finalize as ``finalize_model_grads`` does, without what assumes stages of one width."""
        groups = ProcessGroupCollection()
        groups.tp = parallel_state.get_tensor_model_parallel_group()
        groups.pp = parallel_state.get_pipeline_model_parallel_group()
        groups.dp_cp = parallel_state.get_data_parallel_group(with_context_parallel=True)
        groups.tp_dp_cp = parallel_state.get_tensor_and_data_parallel_group(
            with_context_parallel=True
        )
        # A group of one: nothing is added here between stages; that follows below.
        groups.embd = groups.pos_embd = parallel_state.get_context_parallel_group()
        self._config.finalize_model_grads_func(list(self._chunks), None, pg_collection=groups)
        if self._tied:
            add_other_stage(
                self._chunks,
                flow=self._flow,
                slot=self._slot,
                tied=self._tied,
                group=self._group,
                ranks=self._ranks,
                tag=self._tag(0, taking_in=self._last + 1, backward=False),
            )
        if self._config.calculate_per_token_loss:
            # Counted once: where the losses are, and there by one worker of each TP group.
            counts = self._coordinate.stage == self._num_stages - 1 and self._coordinate.tp == 0
            total = self._tokens if counts else torch.zeros_like(self._tokens)
            dist.all_reduce(total, group=self._group)
            for chunk in self._chunks if total > 0 else ():
                chunk.scale_gradients(1.0 / total)

    # ---- point to point -------------------------------------------------------------------------

    def _tag(self, sample: int, *, taking_in: int, backward: bool) -> int:
        """The tag of what a virtual stage takes in: activations, or gradients of its own."""
        num_samples = self._flow.num_microbatches * self._flow.micro_batch_size
        return 2 * (taking_in * num_samples + sample) + backward

    def _shares(self, op: Op, part: int) -> Iterator[tuple[int, int, int]]:
        """List (rank, first row, last row + 1) of a piece's workers at a neighbouring stage."""
        goes_on = part > self._part_of(op)
        groups = self._flow.layout.stages[part % self._num_stages]
        for one in self._below if goes_on else self._above:
            if op.start <= one.start < op.stop:
                peer = groups[one.receiver if goes_on else one.sender]
                rank = self._ranks.index(peer.slots[self._coordinate.tp])
                yield rank, one.start - op.start, one.stop - op.start

    def _send(self, rows: torch.Tensor, op: Op, part: int) -> None:
        """Send activations, or gradients, [sequence, samples, hidden] of a piece to ``part``."""
        backward = op.kind != FORWARD
        for rank, low, high in self._shares(op, part):
            tag = self._tag(op.start + low, taking_in=part, backward=backward)
            dense = rows[:, low:high].contiguous()
            work = group_calls.send(dense, self._group, rank=rank, tag=tag)
            self._sends.append((work, dense))

    def _receive(self, op: Op, part: int) -> torch.Tensor:
        """Activations, or gradients, [sequence, samples, hidden] of a piece from ``part``."""
        backward = op.kind != FORWARD
        sequence, _, hidden = self._shape
        arriving = []
        for rank, low, high in self._shares(op, part):
            space = torch.empty(
                (sequence, high - low, hidden),
                dtype=self._config.pipeline_dtype,
                device=torch.cuda.current_device(),
            )
            tag = self._tag(op.start + low, taking_in=self._part_of(op), backward=backward)
            arriving.append(group_calls.receive(space, self._group, rank=rank, tag=tag))
        rows = [one.wait() for one in arriving]
        return rows[0] if len(rows) == 1 else torch.cat(rows, 1)
