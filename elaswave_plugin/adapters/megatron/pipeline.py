"""Runs the ordered operations of one worker of a pipeline whose stages are unequally wide.

Rectangular layouts run Megatron-Core's own schedule. After a loss the list of ``core/schedule.py``
is run instead, with Megatron-Core's own forward and backward steps (megatron/core/
pipeline_parallel/schedules.py); each micro-batch's activations and their gradients go to whoever
runs it at the next stage, point to point and tagged by micro-batch.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import schedules
from megatron.core.process_groups_config import ProcessGroupCollection

from elaswave_plugin.adapters.megatron.accumulators import GradAccumulators
from elaswave_plugin.adapters.megatron.reduction import GradientReduction
from elaswave_plugin.adapters.megatron.tied_embeddings import TiedWeight, add_other_stage
from elaswave_plugin.core.exact import Contribution
from elaswave_plugin.core.pipeline_flow import PipelineFlow
from elaswave_plugin.core.schedule import FORWARD, Op


class RaggedPipeline:
    """One worker's part of a step under a ragged layout; it must have a place in it."""

    def __init__(
        self,
        *,
        flow: PipelineFlow,
        slot: int,
        model: DistributedDataParallel,
        reduction: GradientReduction,
        tied: dict[int, TiedWeight],
        seq_length: int,
        micro_batch_size: int,
    ) -> None:
        """``tied``: where the stages keep the embedding that they share, by stage, if they do."""
        seat = flow.seat(slot)
        assert seat is not None
        self._flow, self._slot, self._seat = flow, slot, seat
        self._model, self._config = model, model.config
        self._reduction = reduction
        self._tied = tied
        self._last = len(flow.layout.stages) - 1
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
        self._inputs: dict[int, torch.Tensor | None] = {}
        self._outputs: dict[int, torch.Tensor] = {}
        self._sends: list[tuple[Any, torch.Tensor]] = []
        self._tokens = torch.zeros([], dtype=torch.int, device=torch.cuda.current_device())

    def run(
        self, forward_step_func: Callable[..., Any], data_iterator: Any, *, forward_only: bool
    ) -> list[Any]:
        """Run all operations and finalize the gradients; the losses in the order of forwards.

        Only the last stage reports losses.
        """
        losses: list[Any] = []
        with self._model.no_sync(), GradAccumulators(self._model) as accumulators:
            for op in self._flow.ops(self._slot):
                if op.kind == FORWARD:
                    self._forward(op, forward_step_func, data_iterator, losses, forward_only)
                elif not forward_only:
                    self._backward(op, accumulators)
        for work, _ in self._sends:
            work.wait()
        if not forward_only:
            self._finalize()
        return losses

    # ---- one operation --------------------------------------------------------------------------

    def _forward(
        self,
        op: Op,
        forward_step_func: Callable[..., Any],
        data_iterator: Any,
        losses: list[Any],
        forward_only: bool,
    ) -> None:
        microbatch, stage = op.start, self._seat.stage
        arrived = None if stage == 0 else self._receive(stage - 1, microbatch, self._forward_tag)
        if arrived is not None:
            arrived.requires_grad_()
        output, tokens = schedules.forward_step(
            forward_step_func,
            data_iterator,
            self._model,
            self._flow.num_microbatches // self._flow.layout.dp,
            arrived,
            losses,
            self._config,
            parallel_state.get_context_parallel_world_size(),
            is_first_microbatch=op == self._flow.ops(self._slot)[0],
            current_microbatch=microbatch,
            is_last_stage=stage == self._last,
        )
        self._tokens += tokens
        if stage < self._last:
            self._send(output.detach(), stage + 1, microbatch, self._forward_tag)
        if not forward_only:
            self._inputs[microbatch], self._outputs[microbatch] = arrived, output
            if stage < self._last:
                # What is sent shares the storage, and keeps it until it has left.
                schedules.deallocate_output_tensor(output, self._config.deallocate_pipeline_outputs)

    def _backward(self, op: Op, accumulators: GradAccumulators) -> None:
        microbatch, stage = op.start, self._seat.stage
        gradient = None
        if stage < self._last:
            gradient = self._receive(stage + 1, microbatch, self._backward_tag)
        part = self._contribution_of(microbatch)
        if self._reduction.keeps_contributions_apart:
            accumulators.select(part.microbatches[0])
        arrived = self._inputs.pop(microbatch)
        input_gradient = schedules.backward_step(
            arrived,
            self._outputs.pop(microbatch),
            gradient,
            ModelType.encoder_or_decoder,
            self._config,
        )
        if input_gradient is not None:
            self._send(input_gradient, stage - 1, microbatch, self._backward_tag)
        # Micro-batches of a contribution run in rising order, as its sum is defined.
        if self._reduction.keeps_contributions_apart and microbatch == part.microbatches[-1]:
            self._reduction.ship(part)
            accumulators.release(part.microbatches[0])

    def _contribution_of(self, microbatch: int) -> Contribution:
        dataflow = self._flow.cell(self._seat.stage, self._seat.tp)
        parts = dataflow.contributions(self._slot)
        return next(part for part in parts if microbatch in part.microbatches)

    # ---- the end of the step --------------------------------------------------------------------

    def _finalize(self) -> None:
        """As ``finalize_model_grads``, but for what assumes stages of one width."""
        groups = ProcessGroupCollection()
        groups.tp = parallel_state.get_tensor_model_parallel_group()
        groups.pp = parallel_state.get_pipeline_model_parallel_group()
        groups.dp_cp = parallel_state.get_data_parallel_group(with_context_parallel=True)
        # A group of one: nothing is added here between stages; that follows below.
        groups.embd = groups.pos_embd = parallel_state.get_context_parallel_group()
        self._config.finalize_model_grads_func([self._model], None, pg_collection=groups)
        if self._tied:
            add_other_stage(
                self._model,
                flow=self._flow,
                slot=self._slot,
                tied=self._tied,
                group=self._group,
                ranks=self._ranks,
                tag=2 * self._flow.num_microbatches,
            )
        if self._config.calculate_per_token_loss:
            # Counted once: where the losses are, and there by one worker of each TP group.
            counts = self._seat.stage == self._last and self._seat.tp == 0
            total = self._tokens if counts else torch.zeros_like(self._tokens)
            dist.all_reduce(total, group=self._group)
            if total > 0:
                self._model.scale_gradients(1.0 / total)

    # ---- point to point -------------------------------------------------------------------------

    def _forward_tag(self, microbatch: int) -> int:
        return microbatch

    def _backward_tag(self, microbatch: int) -> int:
        return self._flow.num_microbatches + microbatch

    def _rank_of(self, stage: int, microbatch: int) -> int:
        return self._ranks.index(self._flow.peer(stage, microbatch, self._seat.tp))

    def _send(
        self, tensor: torch.Tensor, stage: int, microbatch: int, tag: Callable[[int], int]
    ) -> None:
        dense = tensor.contiguous()
        work = dist.isend(
            dense,
            group=self._group,
            group_dst=self._rank_of(stage, microbatch),
            tag=tag(microbatch),
        )
        self._sends.append((work, dense))

    def _receive(self, stage: int, microbatch: int, tag: Callable[[int], int]) -> torch.Tensor:
        tensor = torch.empty(
            self._shape, dtype=self._config.pipeline_dtype, device=torch.cuda.current_device()
        )
        dist.recv(
            tensor,
            group=self._group,
            group_src=self._rank_of(stage, microbatch),
            tag=tag(microbatch),
        )
        return tensor
