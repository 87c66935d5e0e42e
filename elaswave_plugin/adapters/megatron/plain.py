"""The verbs of a training script; by themselves plain data parallelism on the launched workers."""

import atexit
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
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
from elaswave_plugin.adapters.megatron.state.optimizer_of import chunks_of
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
from elaswave_plugin.adapters.megatron.sums.step_gradients import StepGradients
from elaswave_plugin.adapters.megatron.turns import EVALUATE, RUN, TRAIN, Turns
from elaswave_plugin.adapters.megatron.unsupported import check_loop
from elaswave_plugin.adapters.patching import PatchSet
from elaswave_plugin.core.layout.layout import sizes_of
from elaswave_plugin.core.step.dataflow import Samples
from elaswave_plugin.core.step.sum_order import replica_microbatches
from elaswave_plugin.framework import StepReport
from elaswave_plugin.trainer.fatal import ends_in_a_sentence


class PlainJob:
    """The plugin's side of a training script; with the plugin on, `ElasticJob` overrides it."""

    _gradients: StepGradients
    # The step behind which the job ends by itself, if so.
    _stop_after: int | None = None

    def __init__(self, sizes: Sizes, *, patches: PatchSet) -> None:
        """Raises ConfigurationError for workers that do not factor, and for uneven batches."""
        tp, pp = sizes.model_parallel
        self.width = sizes_of(int(os.environ.get("WORLD_SIZE", "1")), tp=tp, pp=pp)
        """Replicas at the launch."""
        # What a script may have read for it so far, in whatever view it did.
        self._widths = {self.width}
        self._num_microbatches = num_microbatches_of(
            global_batch_size=sizes.global_batch_size,
            micro_batch_size=sizes.micro_batch_size,
            width=self.width,
        )
        self._sizes, self._seed = sizes, sizes.seed
        self._micro_batch_size = sizes.micro_batch_size
        self._patches = patches
        self._turns, self._positions = Turns(), Positions()
        self._train_iters = self._completed = 0
        self._optimizers: list[Any] = []
        self._chunks: list[Any] = []
        self._finished = False

    @property
    def iteration(self) -> int:
        """The step that is made now, from 0 on; between two steps, the one that comes next.

        What a step does by its number asks this: a worker that comes later has run no earlier one.
        """
        return self._completed

    def process_group(self) -> dict[str, Any]:
        """Arguments of ``torch.distributed.init_process_group``, which has not been called yet.

        By themselves gloo, or NCCL where there is a GPU.
        """
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
        """Take a model with its optimizer and scheduler into care, before the first other verb.

        What is loaded before that verb is part of it. Called once for each model that the job
        trains, with the same run in every call. ``start_step``: the steps that a run which is
        resumed has behind it; ``consumed_samples``: what it has read in them, a multiple of the
        global batch, by default one batch a step. Raises ConfigurationError.
        """
        chunks = chunks_of(model)
        run = {"train_iters": train_iters, "start_step": start_step}
        self._turns.bind(chunks, optimizer, **run, consumed_samples=consumed_samples)
        check_loop(scheduler, train_iters)
        self._train_iters = min(train_iters, self._stop_after or train_iters)
        first = first_batch(
            start_step,
            consumed_samples,
            train_iters=train_iters,
            global_batch_size=self._num_microbatches * self._micro_batch_size,
        )
        done, first = self._begin_at(start_step, first)
        self._positions.begin_at(first, steps=self._train_iters - done)
        self._take(chunks, optimizer, scheduler)

    def _begin_at(self, step: int, batch: int) -> tuple[int, int]:
        """Begin at a step and a global batch; returns those at which the job began."""
        self._completed = step
        return step, batch

    def _take(self, chunks: Sequence[Any], optimizer: Any, scheduler: Any) -> None:
        """Take a model into care."""
        self._optimizers.append(optimizer)
        self._chunks += chunks

    @ends_in_a_sentence
    def batches(self, dataset: Any) -> KeyedBatches:
        """The data iterator over a map-style dataset with sequential sampling, or a DataLoader.

        A loader's workers are not used; shuffled, it has the order of a DistributedSampler's.
        """
        return self._positions.add(
            KeyedBatches(
                dataset,
                micro_batch_size=self._micro_batch_size,
                num_microbatches=self._num_microbatches,
                on_batch=self._consume,
                seed=self._seed,
            )
        )

    def _consume(self, batches: KeyedBatches, microbatch: int, ids: tuple[int, ...]) -> None:
        """Samples of a micro-batch are about to be used."""

    @ends_in_a_sentence
    def forward_backward(self, function: ForwardBackward) -> ForwardBackward:
        """Megatron-Core's forward-backward function, for whatever this worker runs now.

        Called by the functions of ``train``, ``evaluate`` and ``run`` only. ``num_microbatches``
        may be left out; else it is that of one replica, as in Megatron-LM. Only in ``train`` may
        ``forward_only`` be False, and then of a model that is bound. Neither ``forward_step`` nor
        its loss function calls a collective between replicas.
        """
        check_schedule(function)

        @ends_in_a_sentence
        def run(*, forward_only: bool = False, **kwargs: Any) -> list[Any]:
            self._turns.forward_backward(forward_only=forward_only)
            self._widths.add(parallel_state.get_data_parallel_world_size())
            check_call(
                kwargs,
                micro_batch_size=self._micro_batch_size,
                count=self._num_microbatches,
                widths=self._widths,
            )
            model = kwargs["model"]
            if not forward_only:
                check_lengths(kwargs["data_iterator"], self._positions.end)
                self._turns.check_trained(model)
                if self._gradients.are_trained(model):
                    self._check_replicas(model)
                self._gradients.zero(model)
            losses = self._run(function, forward_only=forward_only, **kwargs)
            if not forward_only:
                self._gradients.trained(model)
            self._turns.gave(losses)
            return self._given(losses)

        return run

    def _check_replicas(self, model: Any) -> None:
        """Raise ConfigurationError where the replicas of a model differ within a step."""

    def _run(
        self, function: ForwardBackward, *, forward_only: bool, data_iterator: Any, **kwargs: Any
    ) -> list[Any]:
        """One call of a forward-backward function, which reads the next batch of its iterator."""
        mine = replica_microbatches(
            parallel_state.get_data_parallel_rank(),
            num_replicas=self.width,
            num_microbatches=self._num_microbatches,
        )
        numbers = self._positions.take(data_iterator)
        kwargs["num_microbatches"] = len(mine)
        kwargs["forward_step_func"] = in_order(
            kwargs["forward_step_func"],
            [Samples.of(k, size=self._micro_batch_size) for k in mine],
            lambda batches, chunk, samples: served(batches).deliver(numbers[id(batches)], samples),
        )
        return function(forward_only=forward_only, data_iterator=data_iterator, **kwargs)

    def _given(self, losses: list[Any]) -> list[Any]:
        """The losses of a call as the script is given them."""
        return losses

    @ends_in_a_sentence
    def train(
        self, train_step: TrainStep, *, last_checkpoint: Callable[[], object] | None = None
    ) -> Iterator[tuple[int, StepReport]]:
        """Run the training steps; the job goes on until the script ends, as for a save after them.

        ``last_checkpoint()`` is called where every worker is told to leave, and the last thing.

        ``train_step()`` calls the wrapped ``forward_backward``, each time for the next batch of
        the iterator that it is given, and may call it with ``forward_only=True`` as well. It
        returns the losses that a call reported, in any form of ``Losses``, and the gradient norm:
        None, reported as 0, where a loss scaler skipped the step.
        """
        self._begin(train_step, last_checkpoint)
        while self.iteration < self._train_iters:
            report = self._step(train_step)
            with self._in_body():
                yield self.iteration - 1, report
            if self._is_told_to_leave and last_checkpoint is not None:
                self.run(last_checkpoint, phase="save")
                return self.finish()
        self._leave_at_exit()

    @ends_in_a_sentence
    def _begin(self, train_step: object, last_checkpoint: object) -> None:
        self._check_bound(TRAIN)
        self._turns.begin_training()
        check_work(train_step, TRAIN)
        if last_checkpoint is not None:
            check_work(last_checkpoint, TRAIN, like="last_checkpoint=save")

    @ends_in_a_sentence
    def _step(self, train_step: TrainStep) -> StepReport:
        """Complete the next step."""
        report = self._made(train_step)
        self._completed += 1
        return report

    def _made(self, train_step: TrainStep) -> StepReport:
        """Make the next step, once."""
        self._gradients.begin()
        with self._turns.of(TRAIN):
            result = train_step()
        return self._report(*check_result(result, *self._turns.returned))

    def _report(self, losses: Sequence[Reported], grad_norm: float) -> StepReport:
        """Report a step, by the losses of this worker."""
        loss, tokens = self._agreed(losses)
        lr = self._optimizers[0].param_groups[0]["lr"]
        return StepReport(loss=loss, grad_norm=grad_norm, lr=lr, tokens=tokens)

    def _in_body(self) -> AbstractContextManager[None]:
        """Inside, the body of the script's loop runs."""
        return nullcontext()

    @property
    def _is_told_to_leave(self) -> bool:
        """True if every worker was told to leave."""
        return False

    def _leave_at_exit(self) -> None:
        """Leave with the others when the script ends."""
        atexit.register(self._end)

    def _end(self) -> None:
        """The script ends; it may have destroyed the groups."""
        if dist.is_initialized():
            self.finish()
            dist.destroy_process_group()

    def finish(self) -> None:
        """Leave with the others now, once: for loops that end before the last step."""
        if not self._finished:
            self._finished = True
            dist.barrier()
            self._patches.undo()

    @ends_in_a_sentence
    def evaluate(self, evaluate: Callable[[], Sequence[Losses]]) -> float:
        """Mean loss over global batches; ``evaluate()`` returns the losses of each."""

        def from_the_start() -> float:
            batches = check_evaluation(evaluate(), self._turns.returned)
            means = [self._agreed(losses)[0] for losses in batches]
            return sum(means) / len(means)

        self._check_bound(EVALUATE)
        check_work(evaluate, EVALUATE)
        return self._between_steps(from_the_start, EVALUATE, phase="evaluation", detached=math.nan)

    def _agreed(self, losses: Sequence[Reported]) -> tuple[float, int]:
        """Mean loss of a global batch and its tokens, by the losses of this worker."""
        sums = torch.zeros(3, dtype=torch.float64)
        # Where they are: at the last stage, and there once for each TP group.
        if losses and parallel_state.get_tensor_model_parallel_rank() == 0:
            sums = torch.tensor(losses, dtype=torch.float64).sum(dim=0)
        dist.all_reduce(sums)
        total, weight, tokens = sums.tolist()
        return total / weight, int(tokens)

    @ends_in_a_sentence
    def run(self, work: Callable[[], Result], *, phase: str) -> Result | None:
        """Run other work between steps, which every worker calls; ``phase`` names it: "save".

        Before training "load" is work that loads a checkpoint. None for a worker that comes later
        and is not in the job yet: it has no part in it, and no need to load; and for a save that
        the storage has failed, which is told.
        """
        self._check_bound(RUN)
        check_work(work, RUN, phase)
        return self._between_steps(work, RUN, phase=phase, detached=None)

    def _check_bound(self, verb: str) -> None:
        """Check that a model is bound; the first verb takes all that is bound into care."""
        if self._turns.check_bound(verb):
            self._guard()

    def _guard(self) -> None:
        self._gradients = StepGradients(self._chunks)

    def _between_steps(
        self, work: Callable[[], Any], verb: str, *, phase: str, detached: Any
    ) -> Any:
        """Do work of a verb between two steps; ``detached``: the result where it is left out."""
        return self._work(work, verb)

    def _work(self, work: Callable[[], Result], verb: str) -> Result:
        """Do it, once."""
        with self._turns.of(verb), self._positions.between_steps():
            return work()

    @ends_in_a_sentence
    def name_newest(self, tracker: str | Path, text: object) -> None:
        """Have the small file ``tracker`` name the newest checkpoint, by ``text``.

        Every worker calls it in the ``save`` of ``run``, when the checkpoint is written. The file
        changes in one step, and never by a worker that the others have given up.
        """
        self._turns.check_saves()
        self._name(Path(tracker), str(text))

    def _name(self, tracker: Path, text: str) -> None:
        """Write it beside its place, and rename it; on rank 0."""
        if dist.get_rank() == 0:
            part = Path(f"{tracker}.part-plain")
            part.write_text(text)
            part.replace(tracker)
