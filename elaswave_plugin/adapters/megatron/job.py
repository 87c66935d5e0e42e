"""The verbs of a script with the plugin on."""

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from elaswave_plugin.adapters.megatron import executor, rng
from elaswave_plugin.adapters.megatron.contract import (
    ForwardBackward,
    Losses,
    Result,
    TrainStep,
    num_microbatches_of,
)
from elaswave_plugin.adapters.megatron.data import KeyedBatches
from elaswave_plugin.adapters.megatron.framework import MegatronFramework
from elaswave_plugin.adapters.megatron.refuse import check_supported
from elaswave_plugin.adapters.patching import PatchSet
from elaswave_plugin.adapters.recording import Recording
from elaswave_plugin.config import ElasticConfig
from elaswave_plugin.core.dataflow import Dataflow, deal
from elaswave_plugin.runtime.loop import ElasticLoop, GuardedSteps, StepReport
from elaswave_plugin.runtime.refusal import ends_in_a_sentence
from elaswave_plugin.runtime.worker import Worker
from elaswave_plugin.tracking.sinks import check_sinks
from elaswave_plugin.tracking.tracker import Tracker


class ElasticJob:
    """The verbs with the plugin on."""

    def __init__(
        self,
        config: ElasticConfig,
        *,
        patches: PatchSet,
        global_batch_size: int,
        micro_batch_size: int,
        seed: int,
    ) -> None:
        """Join the job; raises ConfigurationError outside a supervisor or for uneven batches."""
        width = int(os.environ.get("WORLD_SIZE", "1"))
        self._num_microbatches = num_microbatches_of(
            global_batch_size=global_batch_size,
            micro_batch_size=micro_batch_size,
            width=width,
        )
        config.check_slots(width)
        self._micro_batch_size = micro_batch_size
        self._seed = seed if config.seed is None else config.seed
        check_sinks(config)
        self._worker = Worker(config=config, environ=os.environ)
        self._tracker = Tracker(config, self._worker.run_id, self._worker.owns_rank_0)
        self._executed: tuple[int, ...] = ()
        self._train_iters = 0
        self._forward_only = False
        self._evaluations = 0
        self._patches = patches

    def process_group(self) -> dict[str, Any]:
        """Our communicator, which needs no store and no rendezvous."""
        return self._worker.groups.install(self._worker.view.ranks)

    @ends_in_a_sentence
    def bind(self, model: Any, optimizer: Any, scheduler: Any, *, train_iters: int) -> None:
        """Take model, optimizer and scheduler into care and seal the initial state.

        Raises ConfigurationError for anything that is not carried.
        """
        model = model[0] if isinstance(model, list) and len(model) == 1 else model
        distributed = check_supported(model, optimizer)
        self._train_iters = train_iters
        self._framework = MegatronFramework(
            self._worker,
            model=model,
            optimizer=optimizer,
            distributed_optimizer=distributed,
            scheduler=scheduler,
        )
        rng.install_keyed_draws(model, self._seed)
        self._worker.bind(
            self._framework, deal=partial(deal, num_microbatches=self._num_microbatches)
        )
        self._framework.reduction.set_dataflow(self._dataflow, self._worker.view.ranks)
        self._recording = Recording(
            self._worker, self._tracker, pieces=self._framework.named_pieces
        )
        steps = GuardedSteps(
            self._worker,
            self._framework,
            on_commit=self._record,
            on_recovered=self._recording.recovered,
        )
        self._loop = ElasticLoop(steps)
        self._loop.start()
        self._recording.attached(
            num_microbatches=self._num_microbatches, micro_batch_size=self._micro_batch_size
        )

    @property
    def _dataflow(self) -> Dataflow:
        """What the workers run now: whole micro-batches, as this adapter deals them."""
        assert isinstance(self._worker.dataflow, Dataflow)
        return self._worker.dataflow

    def batches(self, dataset: Any) -> KeyedBatches:
        """Batches keyed by micro-batch; every one is written to the ledger before it is used."""
        return KeyedBatches(
            dataset,
            micro_batch_size=self._micro_batch_size,
            num_microbatches=self._num_microbatches,
            on_batch=self._consume,
        )

    def _consume(self, step: int, microbatch: int, ids: tuple[int, ...]) -> None:
        if not self._forward_only:
            self._worker.phases.enter("data")
            self._worker.ledger.emit(
                "consumed",
                slot=self._worker.slot,
                epoch=self._worker.view.epoch,
                step=step,
                k=microbatch,
                samples=list(ids),
            )
        rng.set_key(step, microbatch)

    def forward_backward(self, function: ForwardBackward) -> ForwardBackward:
        """Healthy: the function itself. After a loss: the contributions of this worker."""

        def run(*, forward_only: bool = False, **kwargs: Any) -> list[Any]:
            worker = self._worker
            flow = self._dataflow
            parts = flow.contributions(worker.slot)
            self._executed = tuple(k for part in parts for k in part.microbatches)
            self._forward_only = forward_only
            executor.check_arguments(kwargs)
            step = self._evaluations if forward_only else worker.completed
            self._evaluations += int(forward_only)
            kwargs["data_iterator"].begin(step, self._executed)
            if flow.is_healthy or forward_only:
                count = len(self._executed)
                return function(num_microbatches=count, forward_only=forward_only, **kwargs)
            return executor.run_contributions(
                contributions=parts,
                reduction=self._framework.reduction,
                forward_step_func=kwargs["forward_step_func"],
                data_iterator=kwargs["data_iterator"],
                model=self._framework.model,
                replica_microbatches=self._num_microbatches // flow.num_replicas,
            )

        return run

    @ends_in_a_sentence
    def _step(self, attempt: Callable[[], StepReport]) -> StepReport:
        return self._loop.step(attempt)

    @ends_in_a_sentence
    def finish(self) -> None:
        """Leave with the others."""
        self._loop.finish(before_leaving=self._tracker.close)
        self._worker.groups.uninstall()
        self._patches.undo()

    def train(self, train_step: TrainStep) -> Iterator[tuple[int, StepReport]]:
        """Complete every step through any number of recoveries, then leave with the others.

        A step that a recovery rolled back is redone before the next one is reported.
        """

        def attempt() -> StepReport:
            losses, grad_norm = train_step()
            loss, tokens = self._mean_loss(losses)
            lr = self._framework.learning_rate()
            return StepReport(loss=loss, grad_norm=float(grad_norm), lr=lr, tokens=tokens)

        while self._worker.completed < self._train_iters:
            report = self._step(attempt)
            yield self._worker.completed - 1, report
        self.finish()

    def _mean_loss(self, losses: Losses) -> tuple[float, int]:
        """Sum in ascending order of micro-batch over the tokens; both alike on every worker."""
        table = torch.zeros(self._num_microbatches, 2, dtype=torch.float64)
        for microbatch, pair in zip(self._executed, losses, strict=True):
            table[microbatch] = torch.tensor(pair, dtype=torch.float64)
        # Every row has one contributor, so that the sum only adds zeros to it.
        dist.all_reduce(table)
        total, tokens = 0.0, 0.0
        for loss, count in table.tolist():
            total, tokens = total + loss, tokens + count
        return total / tokens, int(tokens)

    def evaluate(self, evaluate: Callable[[], Sequence[Losses]]) -> float:
        """Run an evaluation; it starts again after a recovery."""

        def from_the_start() -> float:
            self._evaluations = 0
            means = [self._mean_loss(losses)[0] for losses in evaluate()]
            return sum(means) / len(means)

        return self.run(from_the_start, phase="evaluation")

    @ends_in_a_sentence
    def run(self, work: Callable[[], Result], *, phase: str) -> Result:
        """Run work between steps; it starts again after a recovery."""
        return self._loop.run(work, phase=phase)

    def _record(self, step: int, report: StepReport, seconds: float) -> None:
        """Write a completed step to the files and trackers."""
        self._recording.step(
            step,
            report,
            seconds,
            num_microbatches=len(self._executed),
            last=step + 1 == self._train_iters,
        )
