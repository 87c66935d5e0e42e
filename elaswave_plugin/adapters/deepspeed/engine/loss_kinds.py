"""The kind of a loss, found by its values: what a worker's part of it weighs after a loss of some.

A loss may be divided by the items of all workers, or be the mean of its own batch, over samples or
over labels, and may be multiplied by the number of processes or not. Nothing else tells these apart
for every script, and each needs another weight once workers have unequal shares.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from deepspeed import checkpointing

from elaswave_plugin.adapters.host_draws import seed_host, undone_draws
from elaswave_plugin.core.step.loss_parts import (
    RULES,
    SAMPLES,
    SUM,
    TOKENS,
    Seen,
    fitting,
    nearest,
)
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.values.plain import gathered

# A loss that has no terms.
WHOLE = ""
IGNORED = -100
_LABELS = ("shift_labels", "labels")
UNLABELLED, _IGNORES = ", without a label", ", some labels"
# Counted on modules by the hooks of ZeRO-3.
_PASSES = "applied_pre_backward_ref_cnt"
# A ratio that is nearer than this to 1, 2 or a half is that: relative, of losses in 32 and 16 bits.
_TOLERANCE, _TOLERANCE_16_BITS = 2e-5, 1e-3
DRAWS = (
    "the loss draws random numbers, so that its parts do not tell what divides it: after a loss of"
    " workers it counts as a mean over samples; if it is one over labels, or a sum, have the key"
    ' "loss" of the section "elaswave" say "tokens" or "sum"'
)
NOT_FINITE = (
    "the loss of step {step} is not finite, so nothing tells whether it is a mean over samples or"
    " over labels: what workers have lost is weighed by samples here, and its gradient may differ"
    " from that of a run without a loss of workers; have the key"
    ' "loss" of the section "elaswave" say "samples", "tokens" or "sum"'
)
_NAME_TERMS = (
    "after a loss of workers no one weight is right for it; have the key"
    ' "loss" of the section "elaswave" say what counts ("tokens", "samples" or "sum"), or name its'
    " terms, as in elaswave_plugin.terms(tokens=cross_entropy, samples=distillation)"
)


class LossKind(NamedTuple):
    """``rule``: of core/step/loss_parts.py; ``times_processes``: multiplied by their number.

    ``shifts``: the first label of a sample counts for nothing; ``is_alone``: it is that of nothing
    but a whole micro-batch of the launch.
    """

    rule: str = SAMPLES
    times_processes: bool = False
    shifts: bool = False
    is_alone: bool = False

    def weight(self, weights: Mapping[str, float], *, launched: int, live: int) -> float:
        """Return the weight by which the mean over the workers stays that of the launch.

        ``weights``: of a `Pass`; ``launched``, ``live``: workers.
        """
        return weights[self.rule] * (1.0 if self.times_processes else live / launched)


# By the name of a term.
Kinds = Mapping[str, LossKind]


class Told(NamedTuple):
    """The losses of a micro-batch that one worker tells, by the name of their term.

    ``items``, ``processes``: with twice as many; the first is None where the loss is told of none.
    """

    pattern: str
    once: Mapping[str, float]
    items: Mapping[str, float] | None
    processes: Mapping[str, float]


@contextmanager
def without_trace(model: torch.nn.Module) -> Iterator[None]:
    """Have a pass in this block, in evaluation mode, that no backward pass follows.

    Draws come again, and what DeepSpeed counts for the backward pass is as before.
    """
    before = [(one, one.training, one.__dict__.get(_PASSES)) for one in model.modules()]
    # An engine passes its own `eval` on to its module alone.
    for module, *_ in before:
        module.training = False
    try:
        with undone_draws():
            yield
    finally:
        for module, training, passes in before:
            module.training = training
            if _PASSES in module.__dict__:
                setattr(module, _PASSES, passes or 0)
        checkpointing.reset()


def tolerance_of(engine: Any) -> float:
    """Return how far losses of an engine may be apart that are the same."""
    is_rough = torch.backends.cuda.matmul.allow_tf32 and engine.device.type == "cuda"
    module_types = {parameter.dtype for parameter in engine.module.parameters()}
    if is_rough or module_types & {torch.bfloat16, torch.float16} or torch.is_autocast_enabled():
        return _TOLERANCE_16_BITS
    return _TOLERANCE


Batch = Mapping[Any, Any]


def named(batch: Any) -> Batch:
    """Return a batch by names, or by places where it is a sequence or one tensor."""
    if isinstance(batch, Mapping):
        return batch
    return dict(enumerate(batch if isinstance(batch, list | tuple) else [batch]))


def labels_of(batch: Batch) -> tuple[Any, torch.Tensor] | None:
    """Return key and tensor [samples, time, ...] of a batch's labels of tokens; None without.

    Of two or more tensors of integers without names the last one has them.
    """

    def are_tokens(value: Any) -> bool:
        return torch.is_tensor(value) and value.ndim > 1 and not value.is_floating_point()

    places = [key for key, value in batch.items() if isinstance(key, int) and are_tokens(value)]
    keys = [key for key in _LABELS if are_tokens(batch.get(key))] or places[1:][-1:]
    return (keys[0], batch[keys[0]]) if keys else None


def counts_of(batch: Batch, *, shifts: bool) -> list[int] | None:
    """Return the labels of each sample of a batch; None where they are unknown."""
    found = labels_of(batch)
    if found is None:
        return None
    name, labels = found
    counted = labels[:, 1:] if shifts and name == "labels" else labels
    return [int(one) for one in counted.flatten(1).ne(IGNORED).sum(1)]


def pattern_of(batch: Batch) -> str:
    """Return what batches whose losses are of one kind have in common, as a text."""
    names, found = " ".join(sorted(map(str, batch))), labels_of(batch)
    ignored = 0 if found is None else int(found[1].eq(IGNORED).sum())
    if not ignored:
        return names
    assert found is not None
    return names + (UNLABELLED if ignored == found[1].numel() else _IGNORES)


def known_of(known: Mapping[str, Kinds], pattern: str) -> Kinds | None:
    """Return the kinds of batches of a pattern; None where they have to be asked for.

    A mean over labels is one over samples, until some labels are ignored.
    """
    return known.get(pattern + _IGNORES, known.get(pattern))


def kinds_of(
    everyone: Sequence[Told],
    ask_parts: Callable[[], Sequence[tuple[Mapping[str, Seen], Mapping[str, Seen]]] | str],
    *,
    declared: str | None,
    shifts: bool,
    is_alone: bool,
    tolerance: float,
    draws: Callable[[], bool],
) -> Mapping[str, Kinds]:
    """Return the kinds of the terms of the micro-batches of all workers, by their pattern.

    ``ask_parts()``: of each worker, what its parts show where all labels count, and where the first
    ones of samples do not, or why they show nothing; ``declared``: the rule that the script names;
    ``is_alone``: micro-batches of the launch have one sample, and need no parts; ``draws()``:
    whether the loss follows random numbers, so that its parts show nothing. A pattern is left out
    where the losses say nothing: 0, not finite, or alike for every rule. Raises ConfigurationError
    for a loss that no weight is right for.
    """
    terms = sorted({(one.pattern, term) for one in everyone for term in one.once})
    told = {
        each: [one for one in everyone if one.pattern == each[0] and each[1] in one.once]
        for each in terms
    }
    told = {each: those for each, those in told.items() if _ratio(those, each[1], "processes")}
    rules = {
        each: (_rule(those, each[1], each[1] or declared, tolerance=tolerance), shifts)
        for each, those in told.items()
    }
    alone = set()
    if any(rule is None for rule, _ in rules.values()):
        parts = ask_parts()
        for each in [each for each, (rule, _) in rules.items() if rule is None]:
            try:
                seen = _seen_of(*each, everyone, parts)
                rules[each] = _rule_of_parts(
                    seen, each[1] or declared, tolerance=tolerance, draws=draws
                )
            except ConfigurationError:
                if not is_alone:
                    raise
                alone.add(each)
                rules[each] = SAMPLES, False
    kinds: dict[str, dict[str, LossKind]] = {}
    for (pattern, term), (rule, first) in rules.items():
        if rule is not None:
            times = _times(told[pattern, term], term, tolerance=tolerance)
            made = LossKind(rule, times, first, (pattern, term) in alone)
            kinds.setdefault(pattern, {})[term] = made
    return kinds


def _seen_of(
    pattern: str,
    term: str,
    everyone: Sequence[Told],
    parts: Sequence[tuple[Mapping[str, Seen], Mapping[str, Seen]]] | str,
) -> list[tuple[Seen, Seen]]:
    """Return what the parts of a term show; raises ConfigurationError where that is nothing."""
    if isinstance(parts, str):
        raise ConfigurationError(
            "the loss of a part of a micro-batch cannot be computed, so that its kind is unknown"
            f" ({parts:.200}): {_NAME_TERMS}"
        )
    return [
        (plain[term], shifted[term])
        for one, (plain, shifted) in zip(everyone, parts, strict=True)
        if one.pattern == pattern and term in plain
    ]


def _rule(
    everyone: Sequence[Told], term: str, declared: str | None, *, tolerance: float
) -> str | None:
    """Return the rule as far as the items of a step tell it; None: its parts have to."""
    if declared in (SUM, SAMPLES):
        return declared
    ratio = _ratio(everyone, term, "items")
    if ratio is None or abs(ratio - 1) <= tolerance:
        return None
    if abs(ratio - 0.5) > tolerance and declared is None:
        raise ConfigurationError(
            f"with twice the items of a step the loss is {ratio:.4g} of itself, wanted 0.5, as one"
            f" that is divided by them, or 1, as the mean of its own batch: {_NAME_TERMS}"
        )
    return SUM if ratio < 0.75 else None


def _times(everyone: Sequence[Told], term: str, *, tolerance: float) -> bool:
    """Return whether a term is multiplied by the number of processes."""
    ratio = _ratio(everyone, term, "processes") or 0.0
    if min(abs(ratio - 1), abs(ratio - 2)) > tolerance:
        raise ConfigurationError(
            f"with twice the processes the loss is {ratio:.4g} of itself, wanted 2 or 1:"
            f" {_NAME_TERMS}"
        )
    return ratio > 1.5


def _ratio(everyone: Sequence[Told], term: str, field: str) -> float | None:
    """Return a loss by what it is at once, over all workers; None where that is nothing."""
    pairs = [(one.once[term], (getattr(one, field) or {}).get(term)) for one in everyone]
    finite = [
        (abs(once), abs(more))
        for once, more in pairs
        if more is not None and math.isfinite(once) and math.isfinite(more)
    ]
    once = sum(one for one, _ in finite)
    return sum(more for _, more in finite) / once if once else None


class Parts(NamedTuple):
    """A micro-batch made for asking, and its two parts; few labels are left in it.

    ``samples``: of each part; ``tokens``: labels of each part, all of them, and without the first
    of each sample.
    """

    batches: tuple[Batch, Batch, Batch]
    samples: tuple[int, int]
    tokens: tuple[tuple[int, int], tuple[int, int]]

    def seen(self, losses: Sequence[Mapping[str, float]]) -> Iterator[dict[str, Seen]]:
        """Yield what their losses show, by term: where all labels count, and where first ones not.

        ``losses``: by term, of each of the three.
        """
        whole, first, second = losses
        for tokens in self.tokens:
            yield {
                term: Seen(loss, (first[term], second[term]), self.samples, tokens)
                for term, loss in whole.items()
            }


def parts_of(batch: Batch, num_samples: int) -> Parts:
    """Cut a micro-batch in two, of two labels (three with the first of a sample) and of one.

    Of a single sample another one is made. So a mean over samples differs from one over labels,
    also where all samples of a batch have as many. No label is taken out where none is. Raises
    ConfigurationError for one of unknown form.
    """
    rows = rows_of(batch)
    if rows is None:
        raise ConfigurationError(
            f"a micro-batch has no tensor ({', '.join(map(str, batch))}), and its samples cannot be"
            " told apart"
        )
    # Samples without padding between them are one row, and pairs have two blocks of rows.
    count = num_samples if rows % num_samples == 0 else rows
    if count == 1:
        batch, count = _with_another(batch), 2
    half = count // 2
    batch = _with_few_labels(batch, half)
    first = taken(batch, range(half), count)
    second = taken(batch, range(half, count), count)

    def tokens(shifts: bool) -> tuple[int, int]:
        one, two = (sum(counts_of(each, shifts=shifts) or ()) for each in (first, second))
        return one, two

    return Parts((batch, first, second), (half, count - half), (tokens(False), tokens(True)))


def told_parts(
    batch: Batch, num_samples: int, losses: Callable[[Batch], Mapping[str, float]]
) -> list[tuple[Mapping[str, Seen], Mapping[str, Seen]]] | str:
    """Return what the losses of the parts of its batch show on each worker (collective over WORLD).

    Returns the error where the loss of a part cannot be computed.
    """
    flaw, made = "", None
    try:
        made = parts_of(batch, num_samples)
    except Exception as error:
        flaw = f"{type(error).__name__}: {error}"
    # In ZeRO-3 all compute, or nobody does.
    flaws = [one for one in gathered(flaw) if one]
    if flaws or made is None:
        return str(flaws[0])
    try:
        seen = [*made.seen([losses(one) for one in made.batches])]
        told: Any = [{term: tuple(one) for term, one in each.items()} for each in seen]
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
    everyone = gathered(told)
    failed = [one for one in everyone if isinstance(one, str)]
    if failed:
        return str(failed[0])
    return [(_seen_again(plain), _seen_again(shifted)) for plain, shifted in everyone]


def check_padding(
    batch: Batch, losses: Callable[[Batch], Mapping[str, float]], *, tolerance: float
) -> None:
    """Check that batches of different lengths have losses alike (collective over WORLD).

    Parts are padded to other lengths than the micro-batches that they are of. Raises
    ConfigurationError for a loss that counts what is padded, where lengths differ.
    """
    lengths = gathered(_length_of(batch))
    if len({*lengths}) == 1:
        return
    # No longer than one of them is: a model may have no more places.
    longer, apart = with_padding(batch, max(lengths)), 0.0
    if all(gathered(longer is not None)) and longer is not None:
        apart = _apart(losses(batch), losses(longer))
    apart = max(gathered(apart))
    if apart > tolerance and not draws(batch, losses, tolerance=tolerance):
        raise ConfigurationError(
            f"the loss changes by {apart:.2g} of itself where a batch is padded more, and"
            f" micro-batches are {min(lengths)} to {max(lengths)} long: after a loss of workers"
            " their parts have other lengths; leave out of its means what attention_mask leaves"
            ' out, pad all to one length, or have the key "loss" of the section "elaswave" say'
            " what counts"
        )


def draws(
    batch: Batch, losses: Callable[[Batch], Mapping[str, float]], *, tolerance: float
) -> bool:
    """Return whether losses follow the random numbers that come next (collective over WORLD)."""
    once = losses(batch)
    with undone_draws():
        key = 1 + torch.initial_seed() % 2**32
        torch.manual_seed(key)
        seed_host(key)
        again = losses(batch)
    return max(gathered(_apart(once, again))) > tolerance


def _apart(before: Mapping[str, float], after: Mapping[str, float]) -> float:
    return max(abs(after[one] - before[one]) / (abs(before[one]) or 1.0) for one in before)


def with_padding(batch: Batch, wanted: int) -> Batch | None:
    """Return a batch of ``wanted`` places, the last ones no text; None where that is unknown."""
    mask, found = batch.get("attention_mask"), labels_of(batch)
    if not torch.is_tensor(mask) or mask.ndim != 2:
        return None
    if found is not None and not bool(found[1].eq(IGNORED).any()):
        return None
    length, more = mask.shape[1], {}
    for name, value in batch.items():
        if torch.is_tensor(value) and value.ndim > 1 and value.shape[1] == length:
            if value.ndim > 2:
                return None
            fill = IGNORED if name in _LABELS else 0
            more[name] = torch.nn.functional.pad(value, (0, wanted - length), value=fill)
    return {**batch, **more}


def _length_of(batch: Batch) -> int:
    mask = batch.get("attention_mask")
    return int(mask.shape[1]) if torch.is_tensor(mask) and mask.ndim == 2 else 0


def _seen_again(told: Mapping[str, Any]) -> dict[str, Seen]:
    return {term: Seen(*one) for term, one in told.items()}


def rows_of(batch: Batch) -> int | None:
    """Return the rows of a batch, as its tensors have them; None without one."""
    found = labels_of(batch)
    tensors = [one for one in batch.values() if torch.is_tensor(one) and one.ndim]
    first = found[1] if found else tensors[0] if tensors else None
    return None if first is None else len(first)


def taken(batch: Batch, picked: Sequence[int], num_samples: int) -> Batch:
    """Return these samples of a batch, of as many blocks of rows as it has; other values as is."""
    sizes = (num_samples, rows_of(batch))

    def of(value: Any) -> Any:
        is_tensor = torch.is_tensor(value) and value.ndim > 0
        if not (is_tensor or isinstance(value, list)) or len(value) not in sizes:
            return value
        chosen = [block + one for block in range(0, len(value), num_samples) for one in picked]
        if is_tensor:
            return value[torch.tensor(chosen, device=value.device)]
        return [value[row] for row in chosen]

    return {name: of(value) for name, value in batch.items()}


def with_a_label(batch: Batch) -> Batch:
    """Return a batch whose samples have a label each, so that no mean over them is of nothing."""
    found = labels_of(batch)
    if found is None:
        return batch
    name, labels = found
    labels = labels.clone()
    last = labels.view(len(labels), -1)[:, -1]
    last[last.eq(IGNORED)] = 0
    return {**batch, name: labels}


def _with_another(batch: Batch) -> Batch:
    """Return a batch of one sample with one more, of other values that are possible as well."""

    def of(value: torch.Tensor) -> torch.Tensor:
        if value.is_floating_point():
            return value / 2
        if value.ndim > 1 and value.shape[1] > 1:
            return value.flip(1)
        return value if value.dtype == torch.bool else torch.where(value > 0, value - 1, value)

    # Of each block of rows the second one.
    return {
        name: torch.stack([one[::2], of(one[1::2])], 1).flatten(0, 1)
        if torch.is_tensor(one) and one is not batch[name]
        else one
        for name, one in taken(batch, [0, 0], 1).items()
    }


def _with_few_labels(batch: Batch, half: int) -> Batch:
    found = labels_of(batch)
    # A loss that has met none may not know what to ignore.
    if found is None or not bool(found[1].eq(IGNORED).any()):
        return batch
    name, labels = found
    given = labels.flatten(1)
    if not bool(given.ne(IGNORED).any()):
        return batch
    few = torch.full_like(given, IGNORED)
    valid = given[given.ne(IGNORED)][0]
    last = given.shape[1] - 1
    # The first part has as many samples or fewer, and more labels.
    for rows, count in ((range(half), 2), (range(half, len(given)), 1)):
        places = [(row, 1 + int(at)) for row in rows for at in given[row, 1:].ne(IGNORED).nonzero()]
        # Where there are too few, also what is beside the last one.
        row, at = places[-1] if places else (rows[0], last)
        beside = [(row, at), (row, at - 1 if at > 1 else min(at + 1, last))]
        for place in {*places[-count:]} if len(places) >= count else beside[:count]:
            few[place] = given[place] if given[place] != IGNORED else valid
    few[0, 0] = valid
    return {**batch, name: few.view_as(labels)}


def _rule_of_parts(
    everyone: Sequence[tuple[Seen, Seen]],
    declared: str | None,
    *,
    tolerance: float,
    draws: Callable[[], bool],
) -> tuple[str | None, bool]:
    """Return rule and ``shifts`` of a mean, by its parts; no rule where they say nothing."""
    plain, shifted = ([one[place] for one in everyone] for place in (0, 1))
    if declared is not None:
        return nearest(shifted, (SUM, TOKENS)), True
    if not any(one.says for one in plain):
        return None, False
    fits = [
        (rule, shifts)
        for shifts, seen in ((False, plain), (True, shifted))
        for rule in fitting(seen, tolerance=tolerance) or ()
        if rule == TOKENS or not shifts
    ]
    if fits:
        # Of several nothing is known: these losses do not tell them apart, later ones may.
        return fits[0] if len(fits) == 1 else (None, False)
    if draws():
        return SAMPLES, False
    raise ConfigurationError(
        "the loss of a micro-batch is not made up of those of its parts: neither their sum, nor"
        f" their mean by samples or by labels (it is {_missed(shifted)} apart): {_NAME_TERMS}"
    )


def _missed(everyone: Sequence[Seen]) -> str:
    told = [one for one in everyone if one.says]
    least = min(max(one.miss(rule) for one in told) for rule in RULES)
    return f"{least:.2g} of its size"
