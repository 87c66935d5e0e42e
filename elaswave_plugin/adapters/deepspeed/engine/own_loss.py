"""The weight of the losses of a loop that the script owns, where the shares are unequal.

A loss that the model itself returns is asked for its kind in the first step. A mean over labels is
then computed apart for the samples of each micro-batch of the launch. A loss that the script makes
of the model's output is taken for a mean over samples, or for what the script says it is.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from elaswave_plugin.adapters.deepspeed.engine.loss_kinds import (
    UNLABELLED,
    WHOLE,
    Batch,
    Kinds,
    LossKind,
    Told,
    check_padding,
    counts_of,
    evaluating,
    kinds_of,
    known_of,
    named,
    parts_of,
    pattern_of,
    taken,
    told_parts,
    tolerance_of,
    with_a_label,
)
from elaswave_plugin.adapters.host_draws import undone_numbers
from elaswave_plugin.core.step.loss_parts import RULES, SAMPLES, TOKENS, Interval, Pass, passes
from elaswave_plugin.ipc.console import say
from elaswave_plugin.loss_terms import added
from elaswave_plugin.recovery.worker import Worker
from elaswave_plugin.values.gathered import gathered

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
        self, worker: Worker, engine: Any, *, width: int, compute: Callable[..., Any]
    ) -> None:
        """``width``: workers of the launch; ``compute``: a pass that the script did not ask for."""
        self._worker = worker
        self._engine = engine
        self._width = width
        self._compute = compute
        self._declared = worker.config.loss
        # Whether the model returns it; None before it was asked for.
        self._is_inside: bool | None = None
        # Kinds that are known, by the pattern of batches.
        self._known: dict[str, Kinds] = {}
        self._kind = LossKind(self._declared or SAMPLES)
        self._served: Served | None = None
        self._passes: Sequence[Pass] = ()
        self._has_terms = self._is_silent = self._is_mixed_told = False

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
        start, stop = served.share
        tolerance = tolerance_of(self._engine)

        def ask(batch: Batch) -> dict[str, float]:
            return {WHOLE: self._loss(batch) or 0.0}

        if self._declared is None:
            check_padding(call, ask, tolerance=tolerance)
        found = kinds_of(
            [Told(name, {WHOLE: one}, None, {WHOLE: one}) for name, one in everyone],
            lambda: told_parts(parts_of(call, stop - start), ask),
            declared=self._declared,
            shifts=True,
            tolerance=tolerance,
        )
        silent: dict[str, Kinds] = {name: {} for name, _ in everyone if name.endswith(UNLABELLED)}
        self._known.update({**silent, **found})
        # One loss: where it is a mean over labels, it is for every batch.
        kinds = [one for each in self._known.values() for one in each.values()]
        self._kind = max(kinds, key=lambda one: RULES.index(one.rule), default=self._kind)

    @torch.no_grad()
    def _loss(self, call: Batch) -> float | None:
        """Compute the loss that the model returns, without a draw; None where it returns none."""
        with evaluating(self._engine.module), undone_numbers():
            places, names = inputs_of(call)
            loss = loss_in(self._compute(*places, **names))
        return None if loss is None else float(loss)

    def due(self) -> float:
        """Return the weight of the loss that is passed backward now."""
        self._tell()
        return 1.0 if self._has_terms else self.weight()

    def _tell(self) -> None:
        """Warn once of a loss of the script's own, of which it has said nothing."""
        if self._is_silent:
            return
        served, self._is_silent = self._served, True
        knows = self._is_inside is not False or self._declared is not None or self._has_terms
        if knows or served is None or not self._worker.owns_rank_0:
            return
        counts = counts_of(named(served.batch), shifts=False) or [0]
        if len({*counts}) > 1:
            say(
                f"the samples of a micro-batch have {min(counts)} to {max(counts)} labels, and the"
                " script computes its loss outside of the model: after a loss of workers it counts"
                ' as a mean over samples; if it is one over labels, or a sum, have the key "loss"'
                f' of the section "elaswave" say "tokens" or "sum" ({_PAGE})'
            )

    # ---- its weight -----------------------------------------------------------------------------

    def serve(self, served: Served) -> None:
        """A batch comes next."""
        self._served = served
        self._passes = passes(served.share, served.launch, tokens=None, rules=(SAMPLES,))

    def _count(self, served: Served) -> None:
        """Weigh by the labels of all workers' shares (collective over WORLD)."""
        mine = counts_of(named(served.batch), shifts=self._kind.shifts) or []
        by_rank = zip(self._worker.view.ranks, gathered(mine), strict=True)
        # Shares are in the order of slots.
        counts = [one for _, each in sorted(by_rank, key=lambda pair: pair[0]) for one in each]
        if len(counts) != served.launch[-1][1]:
            return
        made = [
            passes(each, served.launch, tokens=counts, rules=(TOKENS,)) for each in served.shares
        ]
        self._passes = made[[*served.shares].index(served.share)]
        most = max(map(len, made))
        if self._kind.rule != TOKENS:
            return
        if self._is_inside:
            # ZeRO-3 gathers the weights for each pass, on all workers.
            void = Pass(*served.share, 0, dict.fromkeys(RULES, 0.0))
            self._passes = [*self._passes, *[void] * (most - len(self._passes))]
        elif most > 1 and self._worker.owns_rank_0 and not self._is_mixed_told:
            self._is_mixed_told = True
            say(
                "the loss is a mean over labels, which the script computes outside of the model, of"
                " samples of micro-batches that had different numbers of labels at the launch: the"
                " losses differ from those of a run without a loss of workers; have the model"
                f" return the loss, or divide it by the labels of all workers ({_PAGE})"
            )

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
        if self._is_inside is not False and (served.is_cut or step & (step - 1) == 0):
            self._learn(served, call)
        if served.is_cut:
            self._count(served)
        if not (self._is_inside and self._kind.rule == TOKENS and len(self._passes) > 1):
            return native(*inputs, **kwargs)
        outputs = []
        first, count = served.share[0], served.share[1] - served.share[0]
        for one in self._passes:
            picked = range(one.start - first, one.stop - first)
            if not one.weights[TOKENS]:
                call, picked = with_a_label(call), range(1)
            places, names = inputs_of(taken(call, picked, count))
            outputs.append(native(*places, **names))
        weights = [one.weights[TOKENS] for one in self._passes]
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
