"""The kind of a loss by its values: of any that scripts write, on batches of any labels."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from elaswave_plugin.adapters.deepspeed.engine.loss_kinds import (
    WHOLE,
    Kinds,
    LossKind,
    Told,
    check_padding,
    draws,
    kinds_of,
    known_of,
    labels_of,
    named,
    parts_of,
    pattern_of,
    taken,
    with_padding,
)
from elaswave_plugin.adapters.deepspeed.engine.own_loss import is_scaled
from elaswave_plugin.adapters.host_draws import undone_draws
from elaswave_plugin.core.step.loss_parts import SAMPLES, SUM, TOKENS
from elaswave_plugin.errors import ConfigurationError


@contextmanager
def alone() -> Iterator[None]:
    """A job of one worker."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


Loss = Callable[[Mapping[Any, Any], float, int], float]
ITEMS = 50.0


def table(batch: Mapping[Any, Any], *, shifts: bool = True) -> tuple[Any, Any]:
    """A loss for each place, and which have a label."""
    labels = batch["labels"][:, 1:] if shifts else batch["labels"]
    has_label = labels.ne(-100)
    places = torch.arange(1, labels.shape[1] + 1)
    return has_label * (0.1 + (batch["ids"].double() * places).cos().square()), has_label


def by_items(batch: Any, items: float, processes: int) -> float:
    """The loss that a Trainer's model returns, times the processes."""
    return float(table(batch)[0].sum() / items * processes)


def by_labels(batch: Any, items: float, processes: int, *, shifts: bool = True) -> float:
    """The mean over the labels of the batch."""
    losses, has_label = table(batch, shifts=shifts)
    return float(losses.sum() / has_label.sum())


def by_samples(batch: Any, items: float, processes: int) -> float:
    """The mean over samples."""
    return float(table(batch)[0].sum(1).mean())


LOSSES: dict[str, tuple[Loss, LossKind]] = {
    "items": (by_items, LossKind(SUM, True, True)),
    "items, no processes": (lambda b, i, p: by_items(b, i, 1), LossKind(SUM, False, True)),
    "sum": (lambda b, i, p: float(table(b)[0].sum()), LossKind(SUM)),
    "labels": (by_labels, LossKind(TOKENS, False, True)),
    "all labels": (lambda b, i, p: by_labels(b, i, p, shifts=False), LossKind(TOKENS)),
    "labels, processes": (lambda b, i, p: by_labels(b, i, p) * p, LossKind(TOKENS, True, True)),
    "samples": (by_samples, LossKind(SAMPLES)),
}


def batch_of(*labelled: int, length: int = 8, seed: int = 0) -> dict[str, Any]:
    """Samples of which the last places have a label."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 99, (len(labelled), 1), generator=generator)
    labels = torch.randint(1, 99, (len(labelled), length), generator=generator)
    for row, count in zip(labels, labelled, strict=True):
        row[: length - count] = -100
    return {"ids": ids, "labels": labels}


def asked(
    loss: Loss,
    *batches: dict[str, Any],
    items: float | None = ITEMS,
    declared: str | None = None,
    is_alone: bool = False,
    follows_draws: bool = False,
) -> Mapping[str, Kinds]:
    """Ask for the kind of a loss, of the batches of some workers."""

    def told(batch: Any) -> Told:
        once = {WHOLE: loss(batch, ITEMS, 3)}
        twice = None if items is None else {WHOLE: loss(batch, 2 * ITEMS, 3)}
        return Told(pattern_of(batch), once, twice, {WHOLE: loss(batch, ITEMS, 6)})

    def parts() -> list[Any]:
        every = [parts_of(batch, len(batch["ids"])) for batch in batches]
        return [
            tuple(made.seen([{WHOLE: loss(one, ITEMS, 3)} for one in made.batches]))
            for made in every
        ]

    everyone = [told(batch) for batch in batches]
    return kinds_of(
        everyone,
        parts,
        declared=declared,
        shifts=True,
        is_alone=is_alone,
        tolerance=2e-5,
        draws=lambda: follows_draws,
    )


@pytest.mark.parametrize("name", LOSSES)
@given(
    counts=st.lists(st.integers(0, 8), min_size=1, max_size=5).filter(
        lambda counts: any(counts) and set(counts) != {8}
    ),
    seed=st.integers(0, 99),
)
def test_each_kind_is_found(name: str, counts: list[int], seed: int) -> None:
    loss, wanted = LOSSES[name]
    batch = batch_of(*counts, seed=seed)
    found = asked(loss, batch)
    if not math.isfinite(loss(batch, ITEMS, 3)) or not loss(batch, ITEMS, 3):
        # The first place of a sample has the only label.
        assert not found
    else:
        assert found == {pattern_of(batch): {WHOLE: wanted}}


@pytest.mark.parametrize("share", [0.05, 0.5, 0.78])
@pytest.mark.parametrize(
    ("one", "other"),
    [("items", "samples"), ("items", "labels"), ("labels", "samples"), ("sum", "samples")],
)
def test_a_mixture_is_refused_however_near_one_kind_is(share: float, one: str, other: str) -> None:
    def mixed(batch: Any, items: float, processes: int) -> float:
        first, second = (LOSSES[name][0](batch, items, processes) for name in (one, other))
        return share * first + (1 - share) * second

    with pytest.raises(ConfigurationError, match=r"elaswave_plugin.terms\(tokens="):
        asked(mixed, batch_of(3, 8, 5), batch_of(8, 8, 2, seed=1))


def test_what_the_script_says_counts_for_a_mixture_too() -> None:
    def mixed(batch: Any, items: float, processes: int) -> float:
        return by_items(batch, items, processes) + 0.01 * by_samples(batch, items, processes)

    batch = batch_of(3, 8, 5)
    (found,) = asked(lambda b, i, p: mixed(b, i, 1), batch, declared="tokens").values()
    assert found[WHOLE].rule == SUM
    (found,) = asked(lambda b, i, p: mixed(b, i, 1), batch, declared="samples").values()
    assert found[WHOLE].rule == SAMPLES
    (found,) = asked(by_labels, batch, declared="tokens").values()
    assert found[WHOLE].rule == TOKENS


@pytest.mark.parametrize("value", [0.0, math.nan, math.inf])
def test_a_loss_of_nothing_says_nothing(value: float) -> None:
    nothing = batch_of(0, 0)
    assert asked(lambda b, i, p: value, nothing) == {}
    # Another worker has something to say, of batches with labels.
    some = batch_of(3, 8)
    found = asked(
        lambda b, i, p: value if b["labels"].lt(0).all() else by_items(b, i, p), nothing, some
    )
    assert found == {pattern_of(some): {WHOLE: LossKind(SUM, True, True)}}


def test_a_loss_without_an_ignored_label_is_asked_again_once_there_is_one() -> None:
    full, some = batch_of(8, 8), batch_of(8, 3)
    known = dict(asked(by_labels, full, items=None))
    assert known == {pattern_of(full): {WHOLE: LossKind(SAMPLES)}}
    assert known_of(known, pattern_of(full)) and not known_of(known, pattern_of(some))
    known |= asked(by_labels, some, items=None)
    assert known_of(known, pattern_of(full)) == {WHOLE: LossKind(TOKENS, False, True)}


def test_a_loss_that_draws_is_taken_for_a_mean_over_samples() -> None:
    """Its parts fit nothing, as the draws of each are others."""
    batch = {"ids": torch.ones(4, 3)}
    drawn = iter([0.7, 0.7, 0.9, 0.8, 0.6])
    found = asked(lambda b, i, p: next(drawn), batch, items=None, follows_draws=True)
    assert found == {"ids": {WHOLE: LossKind(SAMPLES)}}


@given(seed=st.integers(0, 99), count=st.integers(2, 8))
def test_a_mean_that_weighs_samples_is_that_of_a_whole_micro_batch(seed: int, count: int) -> None:
    """Refused where parts of one are passed; one of a single sample never has parts."""

    def weighed(batch: Any, items: float, processes: int) -> float:
        losses, weights = table(batch)[0].sum(1), 1.5 + batch["ids"][:, 0] % 3
        return float((losses * weights).sum() / weights.sum())

    one = batch_of(count, seed=seed)
    found = asked(weighed, one, items=None, is_alone=True)
    assert found == {pattern_of(one): {WHOLE: LossKind(SAMPLES, is_alone=True)}}
    assert asked(by_samples, one, items=None, is_alone=True) == {
        pattern_of(one): {WHOLE: LossKind(SAMPLES)}
    }


def test_a_made_sample_differs_from_the_one_it_is_made_of() -> None:
    batch = {
        "ids": torch.tensor([[5, 6, 7], [8, 9, 1]]),
        "weights": torch.tensor([0.5]),
        "class": torch.tensor([3]),
    }
    whole, _, second = parts_of(batch, 1).batches
    assert whole["ids"].tolist() == [[5, 6, 7], [7, 6, 5], [8, 9, 1], [1, 9, 8]]
    assert whole["weights"].tolist() == [0.5, 0.25] and second["weights"].tolist() == [0.25]
    assert whole["class"].tolist() == [3, 2]


def test_draws_are_told_from_a_loss_that_only_batches_change() -> None:
    def noisy(batch: Any) -> dict[str, float]:
        with undone_draws():
            return {WHOLE: float(torch.rand(1))}

    before = torch.get_rng_state()
    with alone():
        assert draws({}, noisy, tolerance=1e-5)
        assert not draws({}, lambda batch: {WHOLE: 1.5}, tolerance=1e-5)
    assert torch.get_rng_state().equal(before)


def test_no_batch_is_made_longer_than_the_longest() -> None:
    """A model may have no more places, and no loss is asked where lengths are alike."""
    batch = {"input_ids": torch.ones(2, 6), "attention_mask": torch.ones(2, 6)}
    assert {one.shape for one in (with_padding(batch, 8) or {}).values()} == {(2, 8)}

    def fail(batch: Any) -> dict[str, float]:
        raise IndexError

    with alone():
        check_padding(batch, fail, tolerance=1e-5)


def test_a_loss_by_a_number_is_told_from_one_with_others() -> None:
    weight = torch.ones(2, requires_grad=True)
    loss = (weight * 3).sum()
    assert all(is_scaled(one, [loss]) for one in (loss, loss / 4, 2 * loss.float()))
    assert not is_scaled(loss + weight.square().sum(), [loss])
    assert not is_scaled(loss + loss * 2, [loss, loss * 2])


def test_no_label_is_taken_out_where_none_is() -> None:
    """A loss that has met none may fail on it."""
    for one in parts_of(batch_of(8, 8, 8), 3).batches:
        assert one["labels"].gt(0).all()


def test_pairs_in_two_blocks_stay_together() -> None:
    batch = {"ids": torch.arange(6)[:, None], "logps": torch.arange(3), "names": ["a", "b", "c"]}
    picked = taken(batch, range(1, 3), 3)
    assert picked["ids"].flatten().tolist() == [1, 2, 4, 5]
    assert picked["logps"].tolist() == [1, 2] and picked["names"] == ["b", "c"]
    whole, first, second = parts_of(batch, 3).batches
    assert [len(one["ids"]) for one in (whole, first, second)] == [6, 2, 4]


def test_labels_are_found_by_name_or_as_the_last_of_several() -> None:
    tokens, labels = torch.ones(2, 4, dtype=torch.long), torch.zeros(2, 4, dtype=torch.long)
    assert labels_of(named((tokens, labels))) == (1, labels)
    assert labels_of(named([tokens])) is None
    assert labels_of({"labels": torch.zeros(2)}) is None
    (name, _) = labels_of({"labels": labels, "shift_labels": labels}) or ("", None)
    assert name == "shift_labels"
