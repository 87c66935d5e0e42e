"""The verbs of a script without the plugin: plain data parallelism on the launched workers."""

import atexit
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from elaswave_plugin.adapters.megatron.arguments import Sizes
from elaswave_plugin.adapters.megatron.contract import (
    ForwardBackward,
    Losses,
    Result,
    TrainStep,
    num_microbatches_of,
)
from elaswave_plugin.adapters.megatron.schedule_calls import check_call, check_schedule, check_work
from elaswave_plugin.adapters.megatron.state.binds import chunks_of
from elaswave_plugin.adapters.megatron.step.data import (
    KeyedBatches,
    check_lengths,
    in_order,
    served,
)
from elaswave_plugin.adapters.megatron.step.positions import Positions, first_batch
from elaswave_plugin.adapters.megatron.step.reported_losses import (
    Reported,
    check_evaluation,
    check_result,
)
from elaswave_plugin.adapters.megatron.step.step_gradients import StepGradients
from elaswave_plugin.adapters.megatron.turns import EVALUATE, RUN, TRAIN, Turns
from elaswave_plugin.adapters.megatron.unsupported import check_loop
from elaswave_plugin.adapters.patching import PatchSet
from elaswave_plugin.core.layout.layout import sizes_of
from elaswave_plugin.core.step.dataflow import Samples
from elaswave_plugin.core.step.sum_order import replica_microbatches
from elaswave_plugin.framework import StepReport
from elaswave_plugin.trainer.fatal import ends_in_a_sentence


class PlainJob:
    """The verbs without the plugin: plain data parallelism on the launched workers."""

    def __init__(
        self,
        sizes: Sizes,
        *,
        patches: PatchSet,
    ) -> None:
        """Raises ConfigurationError for workers that do not factor, and for uneven batches."""
        self._patches = patches
        self._turns = Turns()
        self._seed = sizes.seed
        tp, pp = sizes.model_parallel
        self._width = sizes_of(int(os.environ.get("WORLD_SIZE", "1")), tp=tp, pp=pp)
        self._micro_batch_size = sizes.micro_batch_size
        self._num_microbatches = num_microbatches_of(
            global_batch_size=sizes.global_batch_size,
            micro_batch_size=sizes.micro_batch_size,
            width=self._width,
        )
        self._step = 0
        self._positions = Positions()
        self._train_iters = 0
        self._optimizers: list[Any] = []
        self._chunks: list[Any] = []
        self._finished = False

    @property
    def iteration(self) -> int:
        """The step that is made now."""
        return self._step

    def process_group(self) -> dict[str, Any]:
        """gloo, or NCCL where there is a GPU."""
        return {"backend": "nccl" if torch.cuda.is_available() else "gloo"}

    @ends_in_a_sentence
    def bind(
        self,
        model: Any,
        optimizer: Any,
        scheduler: Any = None,
        *,
        train_iters: int,
        start_step: int = 0,
        consumed_samples: int | None = None,
    ) -> None:
        """Remember from where and how long to train, and where the learning rate is."""
        chunks = chunks_of(model)
        run = {"train_iters": train_iters, "start_step": start_step}
        self._turns.bind(chunks, optimizer, **run, consumed_samples=consumed_samples)
        check_loop(scheduler, train_iters)
        first = first_batch(
            start_step,
            consumed_samples,
            train_iters=train_iters,
            global_batch_size=self._num_microbatches * self._micro_batch_size,
        )
        self._step = start_step
        self._positions.begin_at(first, steps=train_iters - start_step)
        self._optimizers.append(optimizer)
        self._chunks += chunks
        self._train_iters = train_iters

    @ends_in_a_sentence
    def batches(self, dataset: Any) -> KeyedBatches:
        """Sequential sampling, as MegatronPretrainingSampler does."""
        batches = KeyedBatches(
            dataset,
            micro_batch_size=self._micro_batch_size,
            num_microbatches=self._num_microbatches,
            on_batch=lambda microbatch, ids: None,
            seed=self._seed,
        )
        return self._positions.add(batches)

    @ends_in_a_sentence
    def forward_backward(self, function: ForwardBackward) -> ForwardBackward:
        """The function itself, with this rank's micro-batches."""
        check_schedule(function)

        @ends_in_a_sentence
        def run(*, forward_only: bool = False, **kwargs: Any) -> list[Any]:
            self._turns.forward_backward(forward_only=forward_only)
            check_call(
                kwargs,
                micro_batch_size=self._micro_batch_size,
                count=self._num_microbatches,
                widths=(self._width,),
            )
            mine = replica_microbatches(
                parallel_state.get_data_parallel_rank(),
                num_replicas=self._width,
                num_microbatches=self._num_microbatches,
            )
            numbers = self._positions.take(kwargs["data_iterator"])
            if not forward_only:
                check_lengths(kwargs["data_iterator"], self._positions.end)
                self._turns.check_trained(kwargs["model"])
                self._gradients.zero(kwargs["model"])
            kwargs |= {"num_microbatches": len(mine), "forward_only": forward_only}
            kwargs["forward_step_func"] = in_order(
                kwargs["forward_step_func"],
                [Samples.of(k, size=self._micro_batch_size) for k in mine],
                lambda batches, chunk, samples: served(batches).deliver(
                    numbers[id(batches)], samples
                ),
                lambda: None,
            )
            losses = function(**kwargs)
            if not forward_only:
                self._gradients.trained(kwargs["model"])
            self._turns.gave(losses)
            return losses

        return run

    @ends_in_a_sentence
    def train(
        self, train_step: TrainStep, *, last_checkpoint: Callable[[], object] | None = None
    ) -> Iterator[tuple[int, StepReport]]:
        """Call it for every step; the workers leave together when the script ends.

        ``last_checkpoint`` is for workers that are told to leave, which none is here.
        """
        self._begin(train_step, last_checkpoint)
        while self._step < self._train_iters:
            report = self._report(train_step)
            self._step += 1
            yield self._step - 1, report
        atexit.register(self._end)

    def _end(self) -> None:
        """The script ends; it may have destroyed the groups."""
        if dist.is_initialized():
            self.finish()
            dist.destroy_process_group()

    @ends_in_a_sentence
    def _begin(self, train_step: object, last_checkpoint: object) -> None:
        self._turns.begin_training()
        self._gradients = StepGradients(self._chunks)
        check_work(train_step, TRAIN)
        if last_checkpoint is not None:
            check_work(last_checkpoint, TRAIN, like="last_checkpoint=save")

    @ends_in_a_sentence
    def _report(self, train_step: TrainStep) -> StepReport:
        self._gradients.begin()
        with self._turns.of(TRAIN):
            result = train_step()
        losses, grad_norm = check_result(result, *self._turns.returned)
        total, weight, tokens = self._totals(losses)
        lr = self._optimizers[0].param_groups[0]["lr"]
        return StepReport(loss=total / weight, grad_norm=grad_norm, lr=lr, tokens=int(tokens))

    def finish(self) -> None:
        """Leave together, once; the groups go with the script, which may destroy them first."""
        if self._finished:
            return
        self._finished = True
        dist.barrier()
        self._patches.undo()

    def _totals(self, losses: Sequence[Reported]) -> list[float]:
        """Sums over all workers: losses, weights, tokens."""
        sums = torch.zeros(3, dtype=torch.float64)
        # Where they are: at the last stage, and there once for each TP group.
        if losses and parallel_state.get_tensor_model_parallel_rank() == 0:
            sums = torch.tensor(losses, dtype=torch.float64).sum(dim=0)
        dist.all_reduce(sums)
        total: list[float] = sums.tolist()
        return total

    @ends_in_a_sentence
    def evaluate(self, evaluate: Callable[[], Sequence[Losses]]) -> float:
        """Sum over sums, batch by batch."""
        with self._between(EVALUATE, evaluate, "evaluation"):
            batches = check_evaluation(evaluate(), self._turns.returned)
            totals = [self._totals(losses) for losses in batches]
        return sum(total / weight for total, weight, _ in totals) / len(totals)

    @ends_in_a_sentence
    def run(self, work: Callable[[], Result], *, phase: str) -> Result | None:
        """Call it."""
        with self._between(RUN, work, phase):
            return work()

    @ends_in_a_sentence
    def name_newest(self, tracker: str | Path, text: object) -> None:
        """Write it beside its place, and rename it; on rank 0."""
        self._turns.check_saves()
        if dist.get_rank() == 0:
            part = Path(f"{tracker}.part-plain")
            part.write_text(str(text))
            part.replace(tracker)

    @contextmanager
    def _between(self, verb: str, work: object, phase: object) -> Iterator[None]:
        self._turns.check_bound(verb)
        check_work(work, verb, phase)
        with self._turns.of(verb), self._positions.between_steps():
            yield
