"""The weight that the loss of a part of a micro-batch has in the loss of the whole.

A loss may be summed, or be a mean over the samples or over the tokens with a label. Which of them
it is follows from its values: of a micro-batch, and of two parts of it. What fits none of them is
never taken for the nearest one.

>>> seen = Seen(whole=2.5, parts=(1.0, 3.0), samples=(1, 1), tokens=(1, 3))
>>> fitting([seen], tolerance=1e-4)
('tokens',)
>>> for one in passes((2, 5), ((0, 4), (4, 8)), tokens=(9, 9, 1, 1, 3, 3, 3, 3), rules=("tokens",)):
...     print(one.start, one.stop, one.weights)
2 4 {'sum': 1.0, 'samples': 0.5, 'tokens': 0.1}
4 5 {'sum': 1.0, 'samples': 0.25, 'tokens': 0.25}
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

SUM, SAMPLES, TOKENS = RULES = ("sum", "samples", "tokens")
Interval = tuple[int, int]


class Seen(NamedTuple):
    """The losses of a micro-batch and of its two parts; the samples and labels of these.

    ``tokens`` are 0 where labels are unknown.
    """

    whole: float
    parts: tuple[float, float]
    samples: tuple[int, int]
    tokens: tuple[int, int]

    @property
    def says(self) -> bool:
        """True if a rule can be told from it: no loss is missing, or of nothing."""
        losses = (self.whole, *self.parts)
        return all(map(math.isfinite, losses)) and any(losses)

    def miss(self, rule: str) -> float:
        """Return how far a rule is from the whole, relative to what it adds up."""
        counts = {SUM: None, SAMPLES: self.samples, TOKENS: self.tokens}[rule]
        if counts is not None and not all(counts):
            return math.inf
        if rule == TOKENS and self.tokens[0] * self.samples[1] == self.tokens[1] * self.samples[0]:
            # No mean of its own here.
            return math.inf
        weights = (1.0, 1.0) if counts is None else tuple(one / sum(counts) for one in counts)
        terms = [weight * loss for weight, loss in zip(weights, self.parts, strict=True)]
        size = max(abs(self.whole), *map(abs, terms))
        return abs(sum(terms) - self.whole) / size


def fitting(everyone: Sequence[Seen], *, tolerance: float) -> tuple[str, ...] | None:
    """Return the rules that fit what all workers have seen; None where that says nothing."""
    told = [one for one in everyone if one.says]
    if not told:
        return None
    return tuple(r for r in RULES if all(one.miss(r) <= tolerance for one in told))


def nearest(everyone: Sequence[Seen], rules: Sequence[str]) -> str | None:
    """Return that of the ``rules``, of which the script has named one, that is nearest."""
    told = [one for one in everyone if one.says]
    return min(rules, key=lambda r: max(one.miss(r) for one in told)) if told else None


class Pass(NamedTuple):
    """Samples [start, stop) of an iteration whose loss is computed at once.

    ``replica``: the worker of the launch whose micro-batch they are of, or the first of several;
    ``weights``: of the loss in those of these micro-batches, by rule.
    """

    start: int
    stop: int
    replica: int
    weights: Mapping[str, float]


def passes(
    share: Interval,
    launch: Sequence[Interval],
    *,
    tokens: Sequence[int] | None,
    rules: Sequence[str],
    apart: Sequence[object] | None = None,
) -> tuple[Pass, ...]:
    """Return the passes of a worker's ``share`` of the samples of an iteration, in their order.

    ``launch``: the micro-batches of the launch; ``tokens``: labels of each sample of the iteration,
    None where no rule needs them; ``rules``: of the terms of the loss. A mean over tokens of two
    micro-batches is that of none, unless both have as many: these are passed one by one, and parts
    without a label are left out. ``apart``: micro-batches of which this differs are passed one by
    one as well.
    """
    counts = tokens if TOKENS in rules else None
    parts = [*_parts(share, launch, counts)]

    def key(part: Pass) -> tuple[object, ...]:
        first, last = launch[part.replica]
        total = None if counts is None else _sum(counts[first:last])
        return total, None if apart is None else apart[part.replica]

    together = (_joined([*those]) for _, those in groupby(parts, key))
    return tuple(one for one in together if any(one.weights[rule] for rule in rules))


def _parts(
    share: Interval, launch: Sequence[Interval], counts: Sequence[int] | None
) -> Iterator[Pass]:
    for replica, (first, last) in enumerate(launch):
        start, stop = max(share[0], first), min(share[1], last)
        if start >= stop:
            continue
        of_samples = of_tokens = (stop - start) / (last - first)
        if counts is not None and any(counts[first:last]):
            of_tokens = _sum(counts[start:stop]) / _sum(counts[first:last])
        weights = {SUM: 1.0, SAMPLES: of_samples, TOKENS: of_tokens}
        yield Pass(start, stop, replica, weights)


def _sum(counts: Sequence[int]) -> int:
    return sum(counts)


def _joined(parts: Sequence[Pass]) -> Pass:
    means = {rule: sum(one.weights[rule] for one in parts) for rule in (SAMPLES, TOKENS)}
    return parts[0]._replace(stop=parts[-1].stop, weights={SUM: 1.0, **means})
