"""The weight of the losses of a loop that the script owns, where the shares are unequal.

A loss that the model itself returns is asked for its kind in the first step. A mean over labels is
then computed apart for the samples of each micro-batch of the launch. A loss that the script makes
of the model's output is taken for a mean over samples, or for what the script says it is.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from math import isfinite
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from elaswave_plugin.adapters.cut_draws import CutDraws
from elaswave_plugin.adapters.deepspeed.engine.loss_kinds import (
    DRAWS,
    NOT_FINITE,
    UNLABELLED,
    WHOLE,
    Batch,
    Kinds,
    LossKind,
    Told,
    check_padding,
    counts_of,
    draws,
    kinds_of,
    known_of,
    named,
    pattern_of,
    taken,
    told_parts,
    tolerance_of,
    with_a_label,
    without_trace,
)
from elaswave_plugin.adapters.deepspeed.engine.placeholder_output import unkept
from elaswave_plugin.core.step.loss_parts import RULES, SAMPLES, TOKENS, Interval, Pass, passes
from elaswave_plugin.ipc.console import say
from elaswave_plugin.loss_terms import added
from elaswave_plugin.recovery.worker import Worker
from elaswave_plugin.values.plain import gathered

_PAGE = "docs/deepspeed.md"


class Served(NamedTuple):
    """A batch that was served: its samples among those of all, the shares of all, the launch's."""

    batch: Any
    share: Interval
    shares: Sequence[Interval]
    launch: Sequence[Interval]

    @property
    def is_cut(self) -> bool:
        """True if workers have other samples than at the launch."""
        return [*self.shares] != [*self.launch]


class OwnLoss:
    """The losses of one worker's engine."""

    def __init__(
        self,
        worker: Worker,
        engine: Any,
        draws: CutDraws,
        *,
        width: int,
        compute: Callable[..., Any],
    ) -> None:
        """``width``: workers of the launch; ``compute``: a pass that the script did not ask for."""
        self._worker = worker
        self._engine = engine
        self._cut_draws = draws
        self._width = width
        self._compute = compute
        self._declared = worker.config.loss
        self._is_alone = engine.train_micro_batch_size_per_gpu() == 1
        # Whether the model returns it; None before it was asked for.
        self._is_inside: bool | None = None
        # Kinds that are known, by the pattern of batches; whether others are met in this step, and
        # whether somebody has met one in the step before.
        self._known: dict[str, Kinds] = {}
        self.meets_unknown = False
        self._asks = True
        self._kind = LossKind(self._declared or SAMPLES)
        self._served: Served | None = None
        self._passes: Sequence[Pass] = ()
        self._has_terms = False
        # Losses that the model has returned since the last backward pass.
        self._returned: list[torch.Tensor] = []
        # What was said.
        self._told: set[str] = set()

    # ---- its kind -------------------------------------------------------------------------------

    def _learn(self, served: Served, call: Batch) -> None:
        """Find out the kind of the loss where it is not known (collective over WORLD).

        ``call``: what the model is called with. Raises ConfigurationError for a loss that no weight
        is right for.
        """
        pattern = pattern_of(call)
        if all(gathered(known_of(self._known, pattern) is not None)):
            return
        loss = self._loss(call)
        everyone = gathered((pattern, loss))
        self._is_inside = all(one is not None for _, one in everyone)
        if not self._is_inside:
            return
        if served.is_cut and not (self._knows or all(isfinite(one) for _, one in everyone)):
            self._say(NOT_FINITE.format(step=self._engine.global_steps), once="not finite")
        start, stop = served.share
        tolerance = tolerance_of(self._engine)

        def ask(batch: Batch) -> dict[str, float]:
            return {WHOLE: self._loss(batch) or 0.0}

        if self._declared is None:
            check_padding(call, ask, tolerance=tolerance)
        found = kinds_of(
            [Told(name, {WHOLE: one}, None, {WHOLE: one}) for name, one in everyone],
            lambda: told_parts(call, stop - start, ask),
            declared=self._declared,
            shifts=True,
            is_alone=self._is_alone,
            tolerance=tolerance,
            draws=partial(self._draws, call, ask, tolerance),
        )
        silent: dict[str, Kinds] = {name: {} for name, _ in everyone if name.endswith(UNLABELLED)}
        self._known.update({**silent, **found})
        self._settle()

    @property
    def _knows(self) -> bool:
        return self._declared is not None or any(self._known.values())

    def agree(self) -> None:
        """Have all workers know the same after a recovery (collective over WORLD).

        One that came later knows nothing, and a loss may have met the first step's asking.
        """
        plain = {
            pattern: {term: tuple(one) for term, one in kinds.items()}
            for pattern, kinds in self._known.items()
        }
        for is_inside, known in gathered((self._is_inside, plain)):
            if self._is_inside is None:
                self._is_inside = is_inside
            for pattern, kinds in known.items():
                self._known[pattern] = {term: LossKind(*one) for term, one in kinds.items()}
        self._asks = False
        self._settle()

    def end_step(self, *, somebody_asks: bool) -> None:
        """A step is over, in which this worker or another one met a pattern that is unknown."""
        self._asks, self.meets_unknown = somebody_asks, False

    def _settle(self) -> None:
        # One loss: where it is a mean over labels, it is for every batch.
        kinds = [one for each in self._known.values() for one in each.values()]
        by_need = sorted(kinds, key=lambda one: (one.is_alone, RULES.index(one.rule)))
        self._kind = [self._kind, *by_need][-1]

    def _draws(self, call: Batch, ask: Callable[..., Any], tolerance: float) -> bool:
        found = draws(call, ask, tolerance=tolerance)
        if found:
            self._say(DRAWS, once="draws")
        return found

    def _loss(self, call: Batch) -> float | None:
        """Compute the loss that the model returns, without a trace; None where it returns none."""

        def compute() -> float | None:
            with without_trace(self._engine.module), self._cut_draws.paused():
                places, names = inputs_of(call)
                loss = loss_in(self._compute(*places, **names))
            return None if loss is None else float(loss)

        return unkept(compute)

    def due(self, loss: torch.Tensor) -> float:
        """Return the weight of a loss that is passed backward now."""
        returned, self._returned = self._returned, []
        knows = self._declared is not None or self._has_terms
        if self._is_inside is False and not knows:
            self._tell_outside()
        weighs = self._is_inside and self._kind.rule != SAMPLES and not knows
        if weighs and not is_scaled(loss, returned):
            self._say(
                f"the script makes its loss of one that the model returns, of the kind"
                f" {self._kind.rule!r}, and of others: after a loss of workers all of it counts as"
                " that one; name its terms, as in elaswave_plugin.terms("
                f"{self._kind.rule}=output.loss, samples=other)",
                once="mixed",
            )
        return 1.0 if self._has_terms else self.weight()

    def _tell_outside(self) -> None:
        """Warn of a loss of the script's own, of which it has said nothing."""
        served = self._served
        if served is None:
            return
        counts, seen = counts_of(named(served.batch), shifts=False) or [0], ""
        if len({*counts}) > 1:
            seen = f"the samples of a micro-batch have {min(counts)} to {max(counts)} labels, and "
        if seen or served.is_cut:
            self._say(
                f"{seen}the script computes its loss outside of the model: after a loss of workers"
                " it counts as a mean over samples; if it is one over labels, or a sum, have the"
                ' key "loss" of the section "elaswave" say "tokens" or "sum"',
                once="outside",
            )

    def _say(self, sentence: str, *, once: str) -> None:
        if self._worker.owns_rank_0 and once not in self._told:
            self._told.add(once)
            say(f"{sentence} ({_PAGE})")

    # ---- its weight -----------------------------------------------------------------------------

    def serve(self, served: Served) -> None:
        """A batch comes next."""
        self._served = served
        self._passes = passes(served.share, served.launch, tokens=None, rules=(SAMPLES,))

    def _count(self, served: Served, call: Batch) -> None:
        """Find the passes, by the labels of all workers' shares (collective over WORLD)."""
        # A script may make the labels of what was served.
        counted = [counts_of(one, shifts=self._kind.shifts) for one in (call, named(served.batch))]
        size = served.share[1] - served.share[0]
        mine = next((one for one in counted if one is not None and len(one) == size), [])
        by_rank = zip(self._worker.view.ranks, gathered(mine), strict=True)
        # Shares are in the order of slots.
        counts = [one for _, each in sorted(by_rank, key=lambda pair: pair[0]) for one in each]
        wanted: dict[str, Any] = {"tokens": counts, "rules": (TOKENS,)}
        if self._kind.is_alone:
            wanted = {"tokens": None, "rules": (SAMPLES,), "apart": range(len(served.launch))}
        elif len(counts) != served.launch[-1][1]:
            return
        made = [passes(each, served.launch, **wanted) for each in served.shares]
        self._passes = made[[*served.shares].index(served.share)]
        most = max(map(len, made))
        if not self._is_apart:
            return
        if self._is_inside:
            # ZeRO-3 gathers the weights for each pass, on all workers.
            void = Pass(*served.share, 0, dict.fromkeys(RULES, 0.0))
            self._passes = [*self._passes, *[void] * (most - len(self._passes))]
        elif most > 1:
            self._say(
                "the loss is a mean over labels, which the script computes outside of the model, of"
                " samples of micro-batches that had different numbers of labels at the launch: the"
                " losses differ from those of a run without a loss of workers; have the model"
                " return the loss, or divide it by the labels of all workers",
                once="labels",
            )

    @property
    def _is_apart(self) -> bool:
        """True if samples of two micro-batches of the launch have no loss in common."""
        return self._kind.rule == TOKENS or self._kind.is_alone

    def weight(self, rule: str | None = None) -> float:
        """Return the weight of the loss, or of a term, when gradients are averaged over workers."""
        if not self._passes:
            return 1.0
        kind = self._kind if rule is None else LossKind(rule)
        weights = {one: sum(each.weights[one] for each in self._passes) for one in RULES[1:]}
        weights[RULES[0]] = 1.0
        return kind.weight(weights, launched=self._width, live=dist.get_world_size())

    def terms(self, terms: Mapping[str, Any]) -> Any:
        """Return the sum of a loss's terms, each with its weight; the loss has none of its own."""
        self._has_terms = True
        return added({rule: one * self.weight(rule) for rule, one in terms.items()})

    # ---- the passes -----------------------------------------------------------------------------

    def forward(self, native: Callable[..., Any], inputs: Sequence[Any], kwargs: Any) -> Any:
        """Call the model, for the samples of each micro-batch of the launch apart if need be.

        Collective over WORLD in the first step, and where workers have unequal shares.
        """
        served, call, self._has_terms = self._served, call_of(inputs, kwargs), False
        if served is None:
            return native(*inputs, **kwargs)
        step = self._worker.completed
        if self._is_inside is not False and (served.is_cut or self._asks):
            self._learn(served, call)
        elif self._is_inside is not False and step & (step - 1) == 0:
            # Seldom, since a device has to be waited for.
            self.meets_unknown |= known_of(self._known, pattern_of(call)) is None
        if served.is_cut:
            self._count(served, call)
        output = self._pass(native, served, call)
        self._returned += filter(torch.is_tensor, [loss_in(output)])
        return output

    def _pass(self, native: Callable[..., Any], served: Served, call: Batch) -> Any:
        if not (self._is_inside and self._is_apart and len(self._passes) > 1):
            places, names = inputs_of(call)
            return native(*places, **names)
        outputs, rule = [], self._kind.rule
        first, count = served.share[0], served.share[1] - served.share[0]
        for one in self._passes:
            picked = range(one.start - first, one.stop - first)
            draws: AbstractContextManager[None] = self._cut_draws.narrowed(one.start, one.stop)
            if not one.weights[rule]:
                call, picked, draws = with_a_label(call), range(1), self._cut_draws.paused()
            places, names = inputs_of(taken(call, picked, count))
            with draws:
                outputs.append(native(*places, **names))
        weights = [one.weights[rule] for one in self._passes]
        total = sum(weights) or 1.0
        kept = [bool(one) for one in weights]
        return joined(outputs, [one / total for one in weights], kept)


def call_of(inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> Batch:
    """Return what a model is called with, by place or name."""
    return {**dict(enumerate(inputs)), **kwargs}


def inputs_of(call: Batch) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a call by place, and those by name."""
    places = [value for key, value in call.items() if isinstance(key, int)]
    return places, {key: value for key, value in call.items() if not isinstance(key, int)}


def loss_in(output: Any) -> torch.Tensor | None:
    """Return the loss that a model returns: alone, by name, or before all else; None without."""
    if isinstance(output, Mapping):
        output = output.get("loss")
    elif isinstance(output, tuple | list) and output:
        output = output[0]
    return output if torch.is_tensor(output) and output.ndim == 0 else None


def is_scaled(loss: torch.Tensor, returned: Sequence[torch.Tensor]) -> bool:
    """Return whether a loss is the only one that was returned, or that by a number."""
    if len(returned) != 1:
        return not returned
    wanted, node = returned[0].grad_fn, loss.grad_fn
    while node is not None and node is not wanted:
        befores = [one for one, _ in node.next_functions if one is not None]
        node = befores[0] if len(befores) == 1 else None
    return node is wanted


def joined(outputs: Sequence[Any], weights: Sequence[float], kept: Sequence[bool]) -> Any:
    """Join the outputs of passes: the weighted sum of numbers, the rows of tensors; None of others.

    ``kept``: of the passes whose rows are rows of the batch.
    """
    first = outputs[0]
    if torch.is_tensor(first) and first.ndim == 0:
        return sum(one * weight for one, weight in zip(outputs, weights, strict=True))
    if torch.is_tensor(first):
        return torch.cat([one for one, keeps in zip(outputs, kept, strict=True) if keeps])
    if isinstance(first, Mapping):
        fields = {key: joined([one[key] for one in outputs], weights, kept) for key in first}
        return type(first)(**fields)
    if type(first) in (tuple, list):
        return type(first)(joined(column, weights, kept) for column in zip(*outputs, strict=True))
    return None
