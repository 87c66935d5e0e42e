"""The verbs of a script without the plugin: plain data parallelism on the launched workers."""

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from elaswave_plugin.adapters.megatron.contract import (
    ForwardBackward,
    Losses,
    Result,
    TrainStep,
    num_microbatches_of,
)
from elaswave_plugin.adapters.megatron.data import KeyedBatches, in_order
from elaswave_plugin.adapters.patching import PatchSet
from elaswave_plugin.core.dataflow import Samples
from elaswave_plugin.core.exact import replica_microbatches
from elaswave_plugin.core.layout import sizes_of
from elaswave_plugin.runtime.loop import StepReport


class PlainJob:
    """The verbs without the plugin: plain data parallelism on the launched workers."""

    def __init__(
        self,
        *,
        patches: PatchSet,
        global_batch_size: int,
        micro_batch_size: int,
        model_parallel: tuple[int, int],
    ) -> None:
        """``model_parallel``: the sizes of tp and pp; raises ConfigurationError for bad sizes."""
        self._patches = patches
        tp, pp = model_parallel
        self._width = sizes_of(int(os.environ.get("WORLD_SIZE", "1")), tp=tp, pp=pp)
        self._micro_batch_size = micro_batch_size
        self._num_microbatches = num_microbatches_of(
            global_batch_size=global_batch_size,
            micro_batch_size=micro_batch_size,
            width=self._width,
        )
        self._step = 0
        self._evaluations = 0
        self._train_iters = 0

    def process_group(self) -> dict[str, Any]:
        """gloo, or NCCL where there is a GPU."""
        return {"backend": "nccl" if torch.cuda.is_available() else "gloo"}

    def bind(self, model: Any, optimizer: Any, scheduler: Any, *, train_iters: int) -> None:
        """Remember how long to train, and where the learning rate is."""
        self._optimizer = optimizer
        self._train_iters = train_iters

    def batches(self, dataset: Any) -> KeyedBatches:
        """Sequential sampling, as MegatronPretrainingSampler does."""
        return KeyedBatches(
            dataset,
            micro_batch_size=self._micro_batch_size,
            num_microbatches=self._num_microbatches,
            on_batch=lambda step, microbatch, ids: None,
        )

    def forward_backward(self, function: ForwardBackward) -> ForwardBackward:
        """The function itself, with this rank's micro-batches."""

        def run(**kwargs: Any) -> list[Any]:
            mine = replica_microbatches(
                parallel_state.get_data_parallel_rank(),
                num_replicas=self._width,
                num_microbatches=self._num_microbatches,
            )
            step = self._step
            if kwargs.get("forward_only"):
                step = self._evaluations
                self._evaluations += 1
            kwargs["forward_step_func"] = in_order(
                kwargs["forward_step_func"],
                [Samples.of(k, size=self._micro_batch_size) for k in mine],
                lambda batches, chunk, samples: batches.deliver(step, samples),
            )
            return function(num_microbatches=len(mine), **kwargs)

        return run

    def train(
        self, train_step: TrainStep, *, last_checkpoint: Callable[[], object] | None = None
    ) -> Iterator[tuple[int, StepReport]]:
        """Call it for every step, then leave together.

        ``last_checkpoint`` is for workers that are told to leave, which nobody is here.
        """
        while self._step < self._train_iters:
            losses, grad_norm = train_step()
            total, tokens = self._totals(losses)
            lr = self._optimizer.param_groups[0]["lr"]
            self._step += 1
            yield (
                self._step - 1,
                StepReport(
                    loss=total / tokens,
                    grad_norm=float(grad_norm or 0.0),
                    lr=lr,
                    tokens=int(tokens),
                ),
            )
        self.finish()

    def finish(self) -> None:
        """Leave together."""
        dist.barrier()
        dist.destroy_process_group()
        self._patches.undo()

    def _totals(self, losses: Losses) -> tuple[float, float]:
        sums = torch.zeros(2, dtype=torch.float64)
        # Where they are: at the last stage, and there once for each TP group.
        if losses and parallel_state.get_tensor_model_parallel_rank() == 0:
            sums = torch.tensor(losses, dtype=torch.float64).sum(dim=0)
        dist.all_reduce(sums)
        return float(sums[0]), float(sums[1])

    def evaluate(self, evaluate: Callable[[], Sequence[Losses]]) -> float:
        """Sum over sums, batch by batch."""
        self._evaluations = 0
        totals = [self._totals(losses) for losses in evaluate()]
        return sum(total / tokens for total, tokens in totals) / len(totals)

    def run(self, work: Callable[[], Result], *, phase: str) -> Result | None:
        """Call it."""
        return work()
