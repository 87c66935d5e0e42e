"""The samples that a Trainer generates itself: a share for each worker, in the order of prompts.

TRL's GRPO and RLOO repeat each prompt, generate for a whole update at once, and compare the rewards
of a prompt's completions, which lie on several workers. After a loss the shares differ in size, and
ranks are in another order than shares. An update that is made again generates again, so no sample
of a lost worker is missed; samples that several updates use would be.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch

from elaswave_plugin.adapters.deepspeed.accelerate.accelerate import gathered_pieces
from elaswave_plugin.adapters.deepspeed.compat.patches import generation_patches
from elaswave_plugin.adapters.deepspeed.engine.loss_kinds import WHOLE, LossKind
from elaswave_plugin.adapters.deepspeed.hf_trainer.job import TrainerJob
from elaswave_plugin.adapters.deepspeed.hf_trainer.pieces import batch_size, intervals, sizes
from elaswave_plugin.adapters.deepspeed.hf_trainer.weighing import Turn
from elaswave_plugin.core.step.loss_parts import SAMPLES, SUM
from elaswave_plugin.errors import ConfigurationError

# The modules whose trainers are known here, and the methods that have to be theirs.
_MODULES = ("trl.trainer.grpo_trainer", "trl.trainer.rloo_trainer")
_GENERATE, _PREPARE = "_generate_and_score_completions", "_prepare_inputs"
_SCORE, _REWARD = "_get_per_token_logps_and_entropies", "_calculate_rewards"
_ENTROPY = "_entropy_window_stats"
_THEIRS = (_GENERATE, _PREPARE, "_compute_loss", "compute_loss")
# Losses that are divided by the tokens of all workers, times their number.
_SUM_ITEMS = ("cispo", "dapo", "vespo")
# Attributes of a trainer that are set where it generates in another way, and what to do.
_REFUSED = (
    ("use_vllm", "vLLM generates in an engine that is told of no loss; set it to False"),
    (
        "use_transformers_continuous_batching",
        "its order of completions is unknown; set it to False",
    ),
    ("rollout_func", "what it generates on is unknown; leave it out"),
    ("tools", "their calls would be made again with a step; leave them out"),
    ("environment_factories", "a step that is redone would find them changed; leave it out"),
)


def generates(trainer: Any) -> bool:
    """Return whether a Trainer trains on samples that it has generated."""
    return hasattr(trainer, "_buffered_inputs")


def check_exact(trainer: Any) -> None:
    """Raise ConfigurationError for a Trainer whose numbers no round of exact mode can keep."""
    why = None
    if generates(trainer):
        why = f"{type(trainer).__name__} generates the samples of a step on all workers together"
    elif trainer.args.include_num_input_tokens_seen not in ("no", False):
        why = "include_num_input_tokens_seen counts the tokens of the workers that are left"
    if why is not None:
        raise ConfigurationError(
            f'elaswave.consistency is exact, and {why}: leave that out, or set it to "fast"'
        )


class Generation:
    """The generations of one process's Trainer."""

    def __init__(self, job: TrainerJob, trainer: Any) -> None:
        """Lead the trainer's module here; raises ConfigurationError for what is not carried."""
        module = _check(trainer, int(job.engine.zero_optimization_stage()))
        self._job = job
        self._trainer = trainer
        # Micro-batches that a generation is split into.
        self.pieces = int(trainer.args.steps_per_generation)
        job.pieces = self.pieces
        # Samples of a pass whose shares are not those of the launch.
        self._batch_size = 1
        patches = generation_patches(self, module)
        patches.apply()
        job.at_leave.append(patches.undo)

    @property
    def fewest_samples(self) -> int:
        """Samples of the smallest micro-batch, of training and of evaluation."""
        args, width = self._trainer.args, self._job.batch_shape[0]
        fewest = args.per_device_train_batch_size
        if self._trainer.eval_dataset is not None:
            fewest = min(fewest, args.per_device_eval_batch_size)
        return int(width * fewest)

    @property
    def methods(self) -> dict[str, Callable[..., Any]]:
        """The trainer's methods that go through ours, which get the native one first."""
        return {
            _GENERATE: partial(self._generate),
            _SCORE: partial(self._score),
            _REWARD: partial(self._reward),
        }

    def weigh(self, batches: Sequence[Any], num_items: Any) -> list[list[Turn]]:
        """Return the pass of each micro-batch of an update."""
        sums = getattr(self._trainer, "loss_type", None) in _SUM_ITEMS
        kinds = {WHOLE: LossKind(SUM if sums else SAMPLES, times_processes=sums)}
        return [
            [Turn(batch, None, kinds, num_items, self._job.weights_of(number))]
            for number, batch in enumerate(batches)
        ]

    # ---- the trainer's methods ------------------------------------------------------------------

    def _generate(self, native: Callable[[Any], Any], inputs: Sequence[Any]) -> Any:
        """Generate for this worker's prompts, and tell the advantages of what it has generated."""
        trainer = self._trainer
        training = trainer.model.training
        if training and self._job.begins_update and hasattr(trainer, _ENTROPY):
            # What a controller has added up in an update that is made again.
            setattr(trainer, _ENTROPY, None)
        with self._whole():
            output = native(inputs) if self._job.is_as_launched else self._in_order(native, inputs)
        if training:
            self._job.note_tokens(
                int(output["prompt_mask"].sum() + output["completion_mask"].sum())
            )
        return output

    def _in_order(self, native: Callable[[Any], Any], inputs: Sequence[Any]) -> Any:
        """Call it, whose slice of the advantages is that of equal shares in the order of ranks."""
        mine = torch.tensor([len(inputs)], device=self._job.engine.device)
        lengths = [int(one) for one in self._job.in_order(gathered_pieces(mine))]
        passes = self.pieces if self._trainer.model.training else 1
        self._batch_size = batch_size(len(inputs), lengths, passes=passes)
        logs = self._trainer._logs
        logged, logs["advantages"] = logs["advantages"], []
        try:
            output = native(inputs)
            everyone = logs["advantages"]
        finally:
            logs["advantages"] = logged
        logged.extend(everyone)
        first = sum(lengths[: self._job.position])
        own = everyone[first : first + len(inputs)]
        output["advantages"] = output["advantages"].new_tensor(own)
        return output

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Have the model as it was also after a generation that a loss has interrupted."""
        model, args = self._trainer.model, self._trainer.args
        recomputes = model.is_gradient_checkpointing
        try:
            yield
        finally:
            if recomputes and not model.is_gradient_checkpointing:
                model.gradient_checkpointing_enable(args.gradient_checkpointing_kwargs)

    def _score(
        self,
        native: Callable[..., Any],
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        **given: Any,
    ) -> Any:
        """Pass samples through a model, in batches of which all workers have as many in ZeRO-3."""
        if batch_size is not None and not self._job.is_as_launched:
            batch_size = self._batch_size
        return native(
            model, input_ids, attention_mask, logits_to_keep, batch_size=batch_size, **given
        )

    def _reward(self, native: Callable[..., Any], *args: Any) -> Any:
        """Announce functions of the script, which take as long as they like, as data."""
        self._job.announce_reading()
        return native(*args)

    # ---- functions of the trainer's module ------------------------------------------------------

    def gather(self, native: Callable[[Any], Any], tensor: torch.Tensor) -> torch.Tensor:
        """``gather()`` in the order of the shares, which may be of different size."""
        if self._job.is_as_launched:
            return native(tensor)
        return torch.cat(self._job.in_order(gathered_pieces(tensor)))

    def gather_object(self, native: Callable[[Any], list[Any]], mine: list[Any]) -> list[Any]:
        """``gather_object()`` in the order of the shares."""
        return [*chain.from_iterable(self._job.in_order(native([mine])))]

    def split(
        self, native: Callable[..., list[Any]], samples: dict[str, Any], count: int
    ) -> list[Any]:
        """``split_tensor_dict()`` of a share that need not be a multiple of ``count``."""
        counts = sizes(*self._job.generated, count)
        if len({*counts}) == 1:
            return native(samples, count)

        def cut(value: Any, start: int, stop: int) -> Any:
            has_rows = value is not None and (isinstance(value, list) or value.ndim > 0)
            return value[start:stop] if has_rows else value

        return [
            {name: cut(value, *interval) for name, value in samples.items()}
            for interval in intervals(counts)
        ]


def _check(trainer: Any, stage: int) -> str:
    """Return the module of a trainer's methods; raises ConfigurationError."""
    kind, args = type(trainer), trainer.args
    modules = {getattr(kind, name).__module__ for name in _THEIRS if hasattr(kind, name)}
    module = next(iter(modules))
    if len(modules) > 1 or module not in _MODULES:
        raise ConfigurationError(
            f"{kind.__name__} trains on samples that it generates, by methods of"
            f" {', '.join(sorted(modules))}, wanted {_GENERATE}, {_PREPARE} and compute_loss of"
            " TRL's GRPOTrainer or RLOOTrainer: those of a lost worker would be lost with it; use"
            " one of these, or leave the section out"
        )
    for name, why in _REFUSED:
        value = getattr(trainer, name, None)
        if value:
            raise ConfigurationError(f"{name} is {value!r} in the {kind.__name__}: {why}")
    every = args.steps_per_generation * args.num_iterations
    if args.gradient_accumulation_steps % every:
        raise ConfigurationError(
            f"steps_per_generation is {args.steps_per_generation} and num_iterations"
            f" {args.num_iterations} in the {type(args).__name__}, with"
            f" gradient_accumulation_steps {args.gradient_accumulation_steps}: samples that several"
            " steps use would be lost with their worker; leave both out, and generation_batch_size,"
            " so that each step generates its own"
        )
    if stage == 3 and not args.ds3_gather_for_generation:
        raise ConfigurationError(
            f"ds3_gather_for_generation is False in the {type(args).__name__}, in ZeRO stage 3, and"
            " generating layer by layer is not carried; set it to True"
        )
    evaluated = trainer.eval_dataset
    evaluated = [*evaluated.values()] if isinstance(evaluated, dict) else [evaluated]
    datasets = [one for one in (trainer.train_dataset, *evaluated) if one is not None]
    if any(_is_iterable(one) for one in datasets):
        raise ConfigurationError(
            f"{kind.__name__} reads an iterable dataset, of which the completions of a prompt may"
            " not stay together after a loss; use one with __getitem__ and __len__"
        )
    return module


def _is_iterable(dataset: Any) -> bool:
    """Return whether a dataset's samples have no places; some of torch's have a length."""
    return isinstance(dataset, torch.utils.data.IterableDataset) or not hasattr(dataset, "__len__")
