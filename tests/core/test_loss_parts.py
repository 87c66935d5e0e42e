"""The weights of a loss after a loss of workers, against the launch's loss made on one process."""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elaswave_plugin.core.step.dataflow import share
from elaswave_plugin.core.step.loss_parts import (
    RULES,
    SAMPLES,
    SUM,
    TOKENS,
    Interval,
    Seen,
    fitting,
    nearest,
    passes,
)


class Step(NamedTuple):
    """Losses of the labels of each sample, by micro-batch of all workers; and the workers."""

    iterations: Sequence[Sequence[Sequence[float]]]
    launched: int
    live: Sequence[int]

    def intervals(self, live: Sequence[int]) -> list[Interval]:
        """Return the share of each worker."""
        slots = range(self.launched)
        shares = share(num_samples=len(self.iterations[0]), launch_slots=slots, live=live)
        return [(start, stop) for _, start, stop in shares.intervals]


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """Widths of 2 to 5, of which some are left or more have come, and padding of any length."""
    launched = draw(st.integers(2, 5))
    each = draw(st.integers(1, 3))
    sample = st.lists(st.floats(0.1, 9), max_size=4)
    iteration = st.lists(sample, min_size=launched * each, max_size=launched * each)
    live = draw(st.sets(st.integers(0, launched), min_size=1))
    iterations = draw(st.lists(iteration, min_size=1, max_size=3))
    return Step(iterations, launched, sorted(live))


def loss_of(samples: Sequence[Sequence[float]], rule: str, items: float) -> float:
    """A loss of a batch, as a script computes it; 0 of nothing."""
    total = sum(map(sum, samples))
    if rule == SAMPLES:
        return sum(sum(one) / max(1, len(one)) for one in samples) / len(samples)
    return total / (max(1, sum(map(len, samples))) if rule == TOKENS else items)


def at_launch(step: Step, rule: str, *, own_items: bool) -> float:
    """The mean over the workers of the launch."""
    total = 0.0
    for replica, (start, stop) in enumerate(step.intervals(range(step.launched))):
        items = items_of(step)[replica] if own_items else sum(items_of(step))
        parts = [loss_of(one[start:stop], rule, items) for one in step.iterations]
        total += sum(parts)
    return total / step.launched


def items_of(step: Step) -> list[int]:
    """Items of the step of each worker of the launch, and at least one."""
    return [
        max(1, sum(len(sample) for one in step.iterations for sample in one[start:stop]))
        for start, stop in step.intervals(range(step.launched))
    ]


def afterwards(step: Step, rule: str, *, own_items: bool) -> float:
    """The mean over those who are left, of what they weigh their passes by."""
    total, launch = 0.0, step.intervals(range(step.launched))
    apart = items_of(step) if own_items else None
    for mine, samples in itertools.product(step.intervals(step.live), step.iterations):
        counts = [len(one) for one in samples] if own_items or rule == TOKENS else None
        for one in passes(mine, launch, tokens=counts, rules=(rule,), apart=apart):
            items = sum(items_of(step)) if apart is None else apart[one.replica]
            loss = loss_of(samples[one.start : one.stop], rule, items)
            total += loss * one.weights[rule] * len(step.live) / step.launched
    return total / len(step.live)


@given(step=steps(), rule=st.sampled_from(RULES), own_items=st.booleans())
def test_the_mean_over_those_who_are_left_is_that_of_the_launch(
    step: Step, rule: str, own_items: bool
) -> None:
    wanted = at_launch(step, rule, own_items=own_items)
    assert afterwards(step, rule, own_items=own_items) == pytest.approx(wanted, rel=1e-9)


@given(step=steps(), rule=st.sampled_from(RULES))
def test_the_passes_of_all_cover_every_sample_that_counts_once(step: Step, rule: str) -> None:
    launch = step.intervals(range(step.launched))
    for samples in step.iterations:
        counts = [len(one) for one in samples]
        made = [
            place
            for mine in step.intervals(step.live)
            for one in passes(mine, launch, tokens=counts, rules=(rule,))
            for place in range(one.start, one.stop)
        ]
        assert made == sorted(set(made))
        missing = set(range(len(samples))) - set(made)
        assert rule == TOKENS or not missing
        assert not any(counts[place] for place in missing)


def test_shares_of_one_kind_of_micro_batch_take_one_pass() -> None:
    launch = ((0, 4), (4, 8), (8, 12))
    assert len(passes((0, 6), launch, tokens=None, rules=(SUM, SAMPLES))) == 1
    # Both micro-batches have as many labels, the samples have not.
    even = (1, 2, 3, 4, 4, 3, 2, 1, 9, 9, 9, 9)
    assert len(passes((0, 6), launch, tokens=even, rules=(TOKENS,))) == 1
    assert len(passes((6, 12), launch, tokens=even, rules=(TOKENS,))) == 2


parts = st.tuples(st.floats(0.5, 9), st.floats(0.5, 9)).filter(
    lambda two: abs(two[0] - two[1]) > 0.1
)
MIXED = {
    SUM: lambda seen: sum(seen.parts),
    SAMPLES: lambda seen: (
        sum(map(math.prod, zip(seen.parts, seen.samples, strict=True))) / sum(seen.samples)
    ),
    TOKENS: lambda seen: (
        sum(map(math.prod, zip(seen.parts, seen.tokens, strict=True))) / sum(seen.tokens)
    ),
}


@given(everyone=st.lists(parts, min_size=1, max_size=4), rule=st.sampled_from(RULES))
def test_a_rule_is_found_by_its_values(everyone: list[tuple[float, float]], rule: str) -> None:
    seen = [Seen(0.0, losses, (2, 2), (1, 3)) for losses in everyone]
    seen = [one._replace(whole=MIXED[rule](one)) for one in seen]
    assert fitting(seen, tolerance=1e-6) == (rule,)
    assert nearest(seen, RULES) == rule


@given(losses=parts, pair=st.sampled_from([*itertools.combinations(RULES, 2)]))
def test_what_is_between_two_rules_fits_none(
    losses: tuple[float, float], pair: Sequence[str]
) -> None:
    seen = Seen(0.0, losses, (2, 2), (1, 3))
    seen = seen._replace(whole=sum(MIXED[rule](seen) for rule in pair) / 2)
    assert fitting([seen], tolerance=1e-4) == ()


@pytest.mark.parametrize("losses", [(0.0, 0.0, 0.0), (math.nan, 1.0, 2.0), (2.0, 1.0, math.inf)])
def test_a_loss_of_nothing_says_nothing(losses: tuple[float, float, float]) -> None:
    nothing = Seen(losses[0], losses[1:], (2, 2), (1, 3))
    told = Seen(3.0, (1.0, 2.0), (2, 2), (1, 3))
    assert fitting([nothing], tolerance=1e-6) is None
    assert fitting([nothing, told], tolerance=1e-6) == (SUM,)
    assert nearest([nothing], RULES) is None
