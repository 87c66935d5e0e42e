"""The order of an Accelerate loader: that of its own shards, for each worker that asks."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

pytest.importorskip("deepspeed")
pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from accelerate.data_loader import BatchSamplerShard, SeedableRandomSampler, SkipBatchSampler
from transformers.trainer_pt_utils import LengthGroupedSampler

from elaswave_plugin.adapters.deepspeed.accelerate.order import (
    SamplerOrder,
    sampler_of,
    unskipped,
)
from elaswave_plugin.errors import ConfigurationError


def make_sampler(kind: str, num_items: int) -> Any:
    """Two calls make two samplers that draw alike."""
    data = range(num_items)
    if kind == "sequential":
        return SequentialSampler(data)
    generator = torch.Generator().manual_seed(5)
    if kind == "seedable":
        return SeedableRandomSampler(data, generator=generator, data_seed=11)
    if kind == "grouped":
        lengths = [1 + item % 7 for item in data]
        return LengthGroupedSampler(batch_size=4, lengths=lengths, generator=generator)
    return RandomSampler(data, generator=generator, replacement=kind == "replacement")


@settings(derandomize=True, max_examples=60, deadline=None)
@given(
    st.sampled_from(("sequential", "random", "replacement", "seedable", "grouped")),
    st.integers(1, 40),
    st.integers(1, 4),
    st.integers(1, 3),
    st.booleans(),
)
def test_it_is_what_the_shards_of_accelerate_deal_out(
    kind: str, num_items: int, width: int, batch_size: int, drop_last: bool
) -> None:
    order = SamplerOrder(
        make_sampler(kind, num_items), num_samples=width * batch_size, drop_last=drop_last
    )
    dealt = []
    for process in range(width):
        batches = BatchSampler(make_sampler(kind, num_items), batch_size, drop_last)
        shard = BatchSamplerShard(batches, width, process)
        epochs = []
        for epoch in range(3):
            if kind == "seedable":
                batches.sampler.set_epoch(epoch)
            epochs.append(list(shard))
        dealt.append(epochs)
    assert all(len(epochs[0]) == order.iterations_of(0) for epochs in dealt)
    wanted = {
        (epoch, iteration): [one for epochs in dealt for one in epochs[epoch][iteration]]
        for epoch in range(3)
        for iteration in range(order.iterations_of(0))
    }
    for place in [*reversed(wanted), *wanted]:
        assert order.items(*place) == wanted[place]


class Loader:
    """As much of a prepared loader as is looked at."""

    def __init__(self, batch_sampler: Any) -> None:
        self.batch_sampler = batch_sampler


def batches(sampler: Any = None) -> BatchSampler:
    return BatchSampler(sampler or SequentialSampler(range(8)), 4, False)


@pytest.mark.parametrize(
    ("batch_sampler", "words"),
    [
        (BatchSamplerShard(batches(), 4, 0, split_batches=True), "split_batches is True"),
        (BatchSamplerShard(batches(), 4, 0, even_batches=False), "even_batches is False"),
        (batches(), "accelerator.prepare"),
        (
            BatchSamplerShard(batches(torch.utils.data.SubsetRandomSampler(range(8))), 4, 0),
            "draws from a SubsetRandomSampler, wanted a RandomSampler",
        ),
    ],
)
def test_an_order_that_nobody_could_draw_again_is_refused(batch_sampler: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        sampler_of(Loader(batch_sampler), 4)


def test_an_ordinary_loader_is_taken() -> None:
    loader = DataLoader(range(10), batch_size=2, shuffle=True, drop_last=True)
    assert sampler_of(loader, 1) == (loader.sampler, 2, True)
    shard = BatchSamplerShard(loader.batch_sampler, 4, 1)
    assert sampler_of(Loader(shard), 4) == (loader.sampler, 2, True)
    skipping = SkipBatchSampler(SkipBatchSampler(shard, 2), 1)
    assert sampler_of(Loader(skipping), 4) == (loader.sampler, 2, True)
    assert unskipped(skipping) == (shard, 3)
