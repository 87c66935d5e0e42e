"""The methods of transformers.Trainer that ask the job: batches, steps, evaluations, saves.

The Trainer's own loop runs. Its ``get_batch_samples`` opens a step, its first ``training_step`` of
an update makes all of it, and those that follow return the losses: by then the update is complete,
or was made again. So callbacks, counters, the schedule and the log see each step once.
"""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from elaswave_plugin.adapters.deepspeed.accelerate.accelerate import AcceleratedJob
from elaswave_plugin.adapters.deepspeed.compat.patches import trainer_patches
from elaswave_plugin.adapters.deepspeed.engine.loader import ElasticLoader
from elaswave_plugin.adapters.deepspeed.hf_trainer.best_model import BestModel
from elaswave_plugin.adapters.deepspeed.hf_trainer.generation import (
    Generation,
    check_exact,
    generates,
)
from elaswave_plugin.adapters.deepspeed.hf_trainer.job import TrainerJob
from elaswave_plugin.adapters.deepspeed.hf_trainer.last_checkpoint import take_jit_checkpoint
from elaswave_plugin.adapters.deepspeed.hf_trainer.resumed import place_of
from elaswave_plugin.adapters.deepspeed.hf_trainer.trackers import Trackers
from elaswave_plugin.adapters.deepspeed.hf_trainer.update import Update
from elaswave_plugin.adapters.deepspeed.hf_trainer.weighing import Turn, Weighing
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.ipc.console import say
from elaswave_plugin.trainer.fatal import ends_in_a_sentence
from elaswave_plugin.values.set_within import set_within


class TrainerHooks:
    """Methods that the Trainer of one process calls instead of its own."""

    def __init__(self, job: TrainerJob, accelerated: AcceleratedJob) -> None:
        self._job = job
        self._accelerated = accelerated
        self._trainer: Any = None
        self.trackers = Trackers(job)
        # The methods that were there, by name; also those of subclasses.
        self._native = SimpleNamespace()
        self._loader: ElasticLoader | None = None
        self._prepared: Any = None
        self._update: Update | None = None
        # Of a Trainer that generates its samples.
        self._generation: Generation | None = None
        # The epoch and iteration of the first step: on a worker that came later, where it goes on
        # with the others, and in a stream where a checkpoint was written.
        self._begins: tuple[int, int] | None = None
        self._comes_later = False
        # Micro-batches of the update that were returned, and the operations of each.
        self._made = 0
        self._operations: list[float] = []
        # What losses weigh, of one that does not, and which batches have one of unknown kind.
        self._weighing: Weighing | None = None
        self._unknown: list[bool] = []
        self._metrics_told = False

    def evaluate(self, native: Callable[..., Any], trainer: Any, *args: Any, **given: Any) -> Any:
        """``Trainer._evaluate``; what ``eval_on_start`` asks for the others have made already."""
        if self._trainer is None and self._job.has_to_enter:
            return None
        return native(trainer, *args, **given)

    @ends_in_a_sentence
    def train_begins(self, native: Callable[..., Any], *args: Any, **given: Any) -> Any:
        """``CallbackHandler.on_train_begin``."""
        return self.trackers.begin(native, *args, **given)

    def run_epoch(self, native: Callable[..., None], trainer: Any, **given: Any) -> None:
        """One pass over the data; the first one takes the Trainer's methods over."""
        if self._trainer is None:
            self._take(trainer, given["train_dataloader"])
            self._begins = self._job.enter()
            self._comes_later = self._begins is not None
            if not self._comes_later and given["resume_from_checkpoint"] is not None:
                self._resume(given)
        if self._begins is not None:
            if given["epoch"] < self._begins[0]:
                return
            given |= self._take_up(*self._begins)
        first = 0
        if given["epoch"] == given["epochs_trained"] and not trainer.args.ignore_data_skip:
            first = given["steps_trained_in_current_epoch"]
        self._job.trainer_state.place = given["epoch"], first
        self._prepared.begin()
        native(trainer, **given)
        self._prepared.end()

    def _take_up(self, epoch: int, first: int) -> dict[str, Any]:
        """Be in an epoch as if the job were resumed there from a checkpoint."""
        self._begins = None
        there = {"epochs_trained": epoch, "steps_trained_in_current_epoch": first}
        if not self._comes_later:
            return there
        # Callbacks have seen the epochs that went by.
        self._job.put_back()
        self._trainer.args.ignore_data_skip = False
        # There is no checkpoint: the state came from the others.
        return there | {"resume_from_checkpoint": os.devnull if first else None}

    @ends_in_a_sentence
    def _resume(self, given: dict[str, Any]) -> None:
        """Begin behind the steps of a checkpoint, also where the Trainer does not know the pass.

        It takes the first pass over a stream for as long as the training.
        """
        assert self._loader is not None
        engine, ignores = self._job.engine, self._trainer.args.ignore_data_skip
        width, micro_batch_size = self._job.batch_shape
        size, made = width * micro_batch_size, int(self._trainer.state.global_step)
        begins = given["epochs_trained"], given["steps_trained_in_current_epoch"]
        if self._accelerated.streams:
            trained = made * engine.train_batch_size()
            if engine.global_steps:
                trained = made * int(engine.global_samples) // int(engine.global_steps)
            folder = Path(given["resume_from_checkpoint"])
            place = place_of(folder, samples=trained, per_update=engine.train_batch_size())
            here = place[0], place[1] // size
            if not ignores:
                self._accelerated.go_to(here[0])
                self._begins = begins = here
        else:
            trained = made * engine.train_batch_size()
            updates = made % given["num_update_steps_per_epoch"]
            here = begins[0], updates * self._trainer.args.gradient_accumulation_steps
        # Where the epoch is another one, it is the first one, from its front.
        ahead = here[1] - begins[1] if here[0] == begins[0] else trained // size
        self._job.follow_steps(self._loader, samples=trained, read_again=ahead * size)

    @ends_in_a_sentence
    def _take(self, trainer: Any, prepared: Any) -> None:
        if trainer.args.auto_find_batch_size:
            raise ConfigurationError(
                "auto_find_batch_size is True in the TrainingArguments, which builds another engine"
                " where memory is short; set it to False"
            )
        if getattr(trainer.args, "sync_ref_model", False):
            raise ConfigurationError(
                "sync_ref_model is True in the TrainingArguments, and the reference model that"
                " follows the weights is in no snapshot; set it to False"
            )
        if self._job.portions.keeps_micro_batches:
            check_exact(trainer)
        self._trainer, self._prepared = trainer, prepared
        if generates(trainer):
            self._generation = made = Generation(self._job, trainer)
            self._accelerated.keeps_batches = True
            self._loader = self._accelerated.elastic(
                prepared, pieces=made.pieces, fewest=made.fewest_samples
            )
        else:
            self._loader = self._accelerated.elastic(prepared, whole_updates=True)
            self._weighing = Weighing(self._job, trainer, self._job.declared_loss)
        self._job.trainer_state.trainer = trainer
        taken = {
            "get_batch_samples": self._get_batch_samples,
            "training_step": self._training_step,
            "evaluation_loop": partial(self._again, "evaluation"),
            "_save_checkpoint": partial(self._again, "save"),
            "save_model": partial(self._again, "save"),
            "floating_point_ops": self._floating_point_ops,
            "store_flos": self._store_flos,
            "_load_best_model": self._load_best_model,
            "_track_num_input_tokens": lambda inputs: None,
            **({} if self._generation is None else self._generation.methods),
        }
        for name, ours in taken.items():
            native = getattr(trainer, name)
            setattr(self._native, name, native)
            if isinstance(ours, partial):
                ours = partial(ours, native)
            setattr(trainer, name, ours)
            self._job.at_leave.append(partial(setattr, trainer, name, native))
        take_jit_checkpoint(self._job, trainer)
        self.trackers.take(trainer)
        self._job.reactions.append(self.trackers.follow)
        self._job.reactions.append(self._tell_of_metrics)

    # ---- an update ------------------------------------------------------------------------------

    def _get_batch_samples(
        self, epoch_iterator: Any, num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """``Trainer.get_batch_samples``: the batches are the job's, so the iterator is left."""
        assert self._loader is not None
        epoch, first = self._job.trainer_state.place
        if self._accelerated.ends_before(epoch, first):
            return [], None
        update = Update(
            self._job,
            self._loader,
            epoch=epoch,
            first=first,
            count=num_batches,
            collect=partial(self._collect, device),
        )
        self._update, self._made = update, 0
        self._job.open()
        self._job.called.open(update)
        self._prepared.end_of_dataloader = first + num_batches >= len(self._loader)
        return update.batches, update.num_items

    def _collect(
        self, device: torch.device, rounds: list[list[Any]]
    ) -> list[tuple[list[Any], Any]]:
        """Count tokens and operations of all workers, where the step is redone with others."""
        read = self._counted(rounds, device)
        own, asked = ([0.0] * len(read[-1][0]) for _ in range(2))
        weighing = self._weighing
        for (batches, _), is_mine in zip(read, self._job.counted, strict=True):
            for number, inputs in enumerate(batches if is_mine else ()):
                self._native._track_num_input_tokens(inputs)
                own[number] += float(self._native.floating_point_ops(inputs))
                asked[number] += weighing is not None and weighing.is_unknown(inputs)
        told = torch.tensor([own, asked], dtype=torch.float64, device=self._job.engine.device)
        dist.all_reduce(told)
        self._operations, unknown = told.tolist()
        self._unknown = [*map(bool, unknown)]
        return read

    def _counted(
        self, rounds: list[list[Any]], device: torch.device
    ) -> list[tuple[list[Any], Any]]:
        """Return the Trainer's list of the batches of each round, and the items of the step."""
        count, arguments = self._native.get_batch_samples, self._trainer.args
        if not self._job.portions.keeps_micro_batches:
            return [count(iter(one), len(one), device) for one in rounds]
        together = arguments.average_tokens_across_devices
        with set_within(arguments, "average_tokens_across_devices", False):
            read = [count(iter(one), len(one), device) for one in rounds]
        items = self._job.items_of([one for _, one in read], together=together)
        return [(batches, one) for (batches, _), one in zip(read, items, strict=True)]

    def _training_step(
        self, model: Any, inputs: Any, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """``Trainer.training_step``: the first one of an update makes all of them."""
        update = self._update
        assert update is not None
        if self._made == 0:
            update.step, update.model = self._native.training_step, model
            update.weigh = self._weigh
            # What it logs of samples that were drawn would not be what a redo draws.
            self._job.called.make(sealed=self._generation is not None)
        self._made += 1
        return update.loss(self._made - 1)

    def _weigh(self, model: Any, batches: list[Any], num_items: Any) -> list[list[Turn]]:
        """Return the passes of an update's batches, once the kinds of their losses are known."""
        if self._generation is not None:
            return self._generation.weigh(batches, num_items)
        assert self._weighing is not None
        for number, batch in enumerate(batches):
            if self._unknown[number]:
                self._weighing.learn(model, batch, number, num_items)
        return self._weighing.weigh(batches, num_items)

    # ---- between two steps ----------------------------------------------------------------------

    def _again(self, phase: str, native: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Work of all workers, which starts again after a loss."""
        return self._job.run(partial(native, *args, **kwargs), phase=phase)

    @ends_in_a_sentence
    def _load_best_model(self) -> None:
        """``Trainer._load_best_model``: a step of the job."""
        step = BestModel(self._job, Path(self._trainer.state.best_model_checkpoint))
        self._job.called.open(step)
        self._job.called.make()

    def _floating_point_ops(self, inputs: Any) -> float:
        """``Trainer.floating_point_ops`` of all workers, for the micro-batch that was returned."""
        return self._operations[self._made - 1]

    def _store_flos(self) -> None:
        """``Trainer.store_flos`` without the others, who have counted the same."""
        trainer = self._trainer
        trainer.state.total_flos += trainer.current_flos
        trainer.current_flos = 0

    # ---- after a loss ---------------------------------------------------------------------------

    def _tell_of_metrics(self) -> None:
        """Say once which of TRL's numbers are means of means, whose sizes have changed."""
        job, trainer, whose = self._job, self._trainer, "of evaluations"
        if self._generation is not None:
            whose = "beside its loss (kl, entropy, clip ratios, and those of evaluations)"
        elif trainer.eval_dataset is None:
            return
        if self._metrics_told or not hasattr(trainer, "_metrics") or job.portions.has_launch_shares:
            return
        self._metrics_told = True
        if job.speaks:
            say(
                f"{type(trainer).__name__} logs metrics {whose} that are means of workers' or"
                " batches' means: with other shares they are near those of a run without a loss of"
                " workers, and not equal (docs/huggingface.md)"
            )


def attach(job: TrainerJob, accelerated: AcceleratedJob) -> None:
    """Lead the Trainer of this process to the job, from its first epoch on."""
    hooks = TrainerHooks(job, accelerated)
    patches = trainer_patches(hooks)
    patches.apply()
    job.at_leave += [patches.undo, hooks.trackers.end]
