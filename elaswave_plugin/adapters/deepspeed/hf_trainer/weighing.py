"""The weights of the losses of a Trainer's update, and the passes that they are computed in."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import isfinite
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, PartialState

from elaswave_plugin.adapters.deepspeed.compat.patches import asking_patches
from elaswave_plugin.adapters.deepspeed.engine.loss_kinds import (
    DRAWS,
    IGNORED,
    NOT_FINITE,
    UNLABELLED,
    WHOLE,
    Kinds,
    LossKind,
    Told,
    check_padding,
    counts_of,
    draws,
    kinds_of,
    known_of,
    pattern_of,
    rows_of,
    taken,
    told_parts,
    tolerance_of,
    with_a_label,
    without_trace,
)
from elaswave_plugin.adapters.deepspeed.engine.placeholder_output import unkept
from elaswave_plugin.adapters.deepspeed.hf_trainer.job import TrainerJob
from elaswave_plugin.core.step.loss_parts import (
    RULES,
    SAMPLES,
    SUM,
    TOKENS,
    Interval,
    Pass,
    passes,
)
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.ipc.console import say
from elaswave_plugin.loss_terms import added, weighed_by
from elaswave_plugin.trainer.fatal import ends_in_a_sentence
from elaswave_plugin.values.plain import gathered

# (batch, items of the step) -> loss.
Compute = Callable[[Any, Any], torch.Tensor]
# By the name of a term.
Losses = dict[str, float]


class Turn(NamedTuple):
    """One pass of a micro-batch: samples, kinds of the loss, the items it is told, weights.

    ``samples``: their interval among those of all; None where they have none, or count nothing.
    """

    batch: Any
    samples: Interval | None
    kinds: Kinds
    num_items: Any
    weights: Mapping[str, float]


class Weighing:
    """The kinds of a Trainer's losses, and what follows from them for each update."""

    def __init__(self, job: TrainerJob, trainer: Any, declared: str | None) -> None:
        """``declared``: what the script says of its loss, or None."""
        self._job = job
        self._trainer = trainer
        self._declared = declared
        args = trainer.args
        self._draws_told = False
        self._items_are_own = not args.average_tokens_across_devices
        self._shifts = bool(getattr(trainer, "_loss_shifts_labels", True))
        self._unknown_told = self._parts_asked = False
        # Whether micro-batches of the launch, of one sample each, are passed one by one.
        self._is_alone = False

    # ---- the kinds ------------------------------------------------------------------------------

    def is_unknown(self, batch: Any) -> bool:
        """Return whether the loss of a micro-batch has to be asked for its kind."""
        known = self._job.trainer_state.loss_kinds
        return self._job.asks and known_of(known, pattern_of(batch)) is None

    @ends_in_a_sentence
    def learn(self, model: Any, batch: Any, number: int, num_items: Any) -> None:
        """Find out the kind of a micro-batch's loss (collective over WORLD).

        Raises ConfigurationError for a loss that no weight is right for.
        """
        state = self._job.trainer_state
        # Subclasses keep metrics of each loss.
        before = state.keep()
        with self._job.uncompiled(), self._job.draws.paused():
            found = self._found(model, batch, number, num_items)
        state.put_back(before)
        state.loss_kinds.update(found)

    def _loss(self, model: Any, batch: Any, num_items: Any) -> torch.Tensor:
        """Compute a loss as the Trainer does; some take the labels out of a batch."""

        def compute() -> Any:
            with self._trainer.compute_loss_context_manager(), without_trace(model):
                return self._trainer.compute_loss(
                    model, copy.copy(batch), num_items_in_batch=num_items
                )

        return unkept(compute)

    def _found(self, model: Any, batch: Any, number: int, num_items: Any) -> dict[str, Kinds]:
        compute = partial(self._loss, model)
        batch = self._trainer._prepare_inputs(batch)
        if self._items_are_own and num_items is not None:
            self._check_items(batch, self._samples(number))
        tolerance = tolerance_of(self._job.engine)
        once = losses_of(compute, batch, num_items)
        ask = partial(losses_of, compute, num_items=num_items)
        if self._declared is None:
            check_padding(batch, ask, tolerance=tolerance)
        items = None if num_items is None else losses_of(compute, batch, 2 * num_items)
        with told_of(2 * PartialState().num_processes):
            processes = losses_of(compute, batch, num_items)

        def follows_draws() -> bool:
            found = draws(batch, ask, tolerance=tolerance)
            if found and self._job.speaks and not self._draws_told:
                self._draws_told = True
                say(f"{DRAWS} (docs/huggingface.md)")
            return found

        told = gathered((pattern_of(batch), once, items, processes))
        if not all(isfinite(one) for _, losses, *_ in told for one in losses.values()):
            self._tell_of_the_unknown()
        # A loss of no label is nothing, and is asked once; another one may become something.
        silent: dict[str, Kinds] = {one[0]: {} for one in told if one[0].endswith(UNLABELLED)}
        known = kinds_of(
            [Told(*one) for one in told],
            lambda: told_parts(batch, self._samples(number), ask),
            declared=self._declared,
            shifts=self._shifts,
            is_alone=self._job.batch_shape[1] == 1,
            tolerance=tolerance,
            draws=follows_draws,
        )
        if any(WHOLE in one and one[WHOLE].rule == SUM for one in known.values()):
            self._tell_of_parts(batch, number, ask, tolerance)
        return {**silent, **known}

    def _tell_of_parts(
        self, batch: Any, number: int, ask: Callable[[Any], Losses], tolerance: float
    ) -> None:
        """Say once that a loss which is divided by items is not the sum of those of its parts."""
        # One that came later has asked nothing.
        if self._declared is not None or any(gathered(self._parts_asked)):
            return
        parts = told_parts(batch, self._samples(number), ask)
        self._parts_asked = True
        if isinstance(parts, str):
            return
        told = [one[WHOLE] for one, _ in parts if WHOLE in one and one[WHOLE].says]
        apart = max((one.miss(SUM) for one in told), default=0.0)
        # Parts have few labels, whose errors of rounding are larger.
        if apart <= 10 * tolerance or draws(batch, ask, tolerance=tolerance):
            return
        if self._job.speaks:
            say(
                f"the loss of a micro-batch is {apart:.2g} of itself apart from the sum of those of"
                " its parts, as where experts have a capacity or negatives are taken from the"
                " batch: a loss of workers cuts micro-batches in other parts, and the losses differ"
                " then from those of a run without one (docs/huggingface.md)"
            )

    def _tell_of_the_unknown(self) -> None:
        """Say once that a loss which is not finite tells no weight for parts of unequal size."""
        job = self._job
        if self._unknown_told or self._declared is not None or job.portions.has_launch_shares:
            return
        self._unknown_told = True
        if job.speaks:
            step = job.trainer_state.trainer.state.global_step
            say(f"{NOT_FINITE.format(step=step)} (docs/huggingface.md)")

    # ---- the passes -----------------------------------------------------------------------------

    def weigh(self, batches: Sequence[Any], num_items: Any) -> list[list[Turn]]:
        """Return the passes of each micro-batch of an update (collective over WORLD)."""
        job, known = self._job, self._job.trainer_state.loss_kinds
        if job.portions.has_launch_shares:
            whole = dict.fromkeys(RULES, 1.0)
            return [
                [Turn(batch, job.share_of(number), {}, num_items, whole)]
                for number, batch in enumerate(batches)
            ]
        unknown = self._unasked()
        found = [known_of(known, pattern_of(batch)) for batch in batches]
        kinds = [unknown if one is None else one for one in found]
        every = {one for each in (*known.values(), unknown) for one in each.values()}
        by_labels = {one for one in every if one.rule == TOKENS}
        own = self._items_are_own and num_items is not None
        self._is_alone = any(one.is_alone for one in every)
        if not (by_labels or own or self._is_alone):
            return [
                self._turns(number, *one, num_items, None, None)
                for number, one in enumerate(zip(batches, kinds, strict=True))
            ]
        shifts = any(one.shifts for one in by_labels)
        counts = job.of_all([counts_of(batch, shifts=shifts) or [] for batch in batches])
        items = self._items_of_replicas(job.of_all([*map(self._items, batches)])) if own else None
        turns = [
            self._turns(number, *one, num_items, counts[number], items)
            for number, one in enumerate(zip(batches, kinds, strict=True))
        ]
        # Every worker takes part in as many reductions, and in ZeRO-3 in as many passes.
        most = torch.tensor([len(one) for one in turns], device=job.engine.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        for number, (each, count) in enumerate(zip(turns, most.tolist(), strict=True)):
            one = with_a_label(taken(batches[number], [0], self._samples(number)))
            void = Turn(one, None, {}, num_items, dict.fromkeys(RULES, 0.0))
            each.extend([void] * (count - len(each)))
        return turns

    def _unasked(self) -> Kinds:
        """Return the kinds of a micro-batch whose loss told nothing: as the script declares it.

        A sum is divided by the items of all workers, and multiplied by their number.
        """
        if self._declared is None:
            return {}
        known = self._job.trainer_state.loss_kinds.values()
        same = (one for each in known for one in each.values() if one.rule == self._declared)
        is_multiplied = self._declared == SUM and not self._items_are_own
        return {WHOLE: next(same, LossKind(self._declared, is_multiplied, self._shifts))}

    def _turns(
        self,
        number: int,
        batch: Any,
        kinds: Kinds,
        num_items: Any,
        counts: Sequence[int] | None,
        items: Sequence[int] | None,
    ) -> list[Turn]:
        share, launch = self._job.cut(number)
        rules = {one.rule for one in kinds.values()} or {SAMPLES}
        if counts is not None and len(counts) != launch[-1][1]:
            # Batches without labels, on some worker.
            counts = None
        apart = range(len(launch)) if items is None and self._is_alone else items
        made = passes(share, launch, tokens=counts, rules=[*rules], apart=apart)
        return [
            Turn(
                self._rows(batch, share, one),
                (one.start, one.stop),
                kinds,
                num_items if items is None else num_items.new_tensor(items[one.replica]),
                one.weights,
            )
            for one in made
        ]

    def _rows(self, batch: Any, share: Interval, one: Pass) -> Any:
        if (one.start, one.stop) == share:
            return batch
        num_samples = share[1] - share[0]
        if (rows_of(batch) or 1) % num_samples:
            raise ConfigurationError(
                f"a batch of {num_samples} samples has {rows_of(batch)} rows, and its loss is a"
                " mean over labels, which has to be computed apart for samples of different"
                " micro-batches: have the loss divided by num_items_in_batch"
            )
        return taken(batch, range(one.start - share[0], one.stop - share[0]), num_samples)

    def _items(self, batch: Any) -> list[int]:
        """Return the items of each row of a batch, as the Trainer counts them."""
        labels = batch["shift_labels"] if "shift_labels" in batch else batch["labels"]
        if self._shifts and "shift_labels" not in batch:
            labels = labels[..., 1:]
        return [int(one) for one in labels.ne(IGNORED).view(len(labels), -1).sum(1)]

    def _check_items(self, batch: Any, num_samples: int) -> None:
        if len(self._items(batch)) != num_samples:
            raise ConfigurationError(
                f"average_tokens_across_devices is False in the TrainingArguments, and a batch of"
                f" {num_samples} samples has {len(self._items(batch))} rows, so that the items of"
                " each are unknown after a loss of workers; set it to True"
            )

    def _samples(self, number: int) -> int:
        """Return the samples of this worker in a micro-batch."""
        (start, stop), _ = self._job.cut(number)
        return stop - start

    def _items_of_replicas(self, counts: Sequence[Sequence[int]]) -> list[int]:
        """Return the items of the update that each worker of the launch would count."""
        launches = [self._job.cut(number)[1] for number in range(len(counts))]
        return [
            sum(sum(one[slice(*each[replica])]) for one, each in zip(counts, launches, strict=True))
            for replica in range(len(launches[0]))
        ]


def losses_of(compute: Compute, batch: Any, num_items: Any) -> Losses:
    """Return the terms of a loss as they are in the end, by name; a loss without terms is one."""
    named: dict[str, float] = {}

    def note(terms: Mapping[str, Any]) -> Any:
        named.update((name, float(one)) for name, one in terms.items())
        return added(terms)

    with weighed_by(note):
        loss = float(compute(batch, num_items))
    total = sum(named.values())
    # The whole may be scaled behind the terms.
    return {name: one * loss / total for name, one in named.items()} if total else {WHOLE: loss}


@contextmanager
def told_of(num_processes: int) -> Iterator[None]:
    """Losses in this block are told of ``num_processes``."""
    shared = [one._shared_state for one in (PartialState, AcceleratorState)]
    before = [one["num_processes"] for one in shared]
    if before == [num_processes] * len(shared):
        yield
        return
    patches = asking_patches()
    patches.apply()
    try:
        for one in shared:
            one["num_processes"] = num_processes
        yield
    finally:
        for one, number in zip(shared, before, strict=True):
            one["num_processes"] = number
        patches.undo()
