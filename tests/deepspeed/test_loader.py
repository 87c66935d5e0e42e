"""The loader's order is DeepSpeed's for each worker; shares have no gap and no overlap."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

pytest.importorskip("deepspeed")

from deepspeed.runtime.dataloader import RepeatingLoader

from elaswave_plugin.adapters.deepspeed.compat.patches import deepspeed_patches
from elaswave_plugin.adapters.deepspeed.engine.attached import AttachedEngine
from elaswave_plugin.adapters.deepspeed.engine.loader import ElasticLoader, GlobalOrder, Position
from elaswave_plugin.adapters.torch_loader import batches_of
from elaswave_plugin.core.step.dataflow import share
from elaswave_plugin.deepspeed import loader
from elaswave_plugin.errors import ConfigurationError, ElasWaveError


class Alone:
    """A job of one reader that takes all samples of each iteration."""

    def next_batch(self, loader: ElasticLoader) -> Any:
        items = loader.items()
        _, batch = loader.read(items, (0, len(items)))
        return batch


def loader_of(num_items: int, replicas: int, size: int, shuffle: bool = True) -> ElasticLoader:
    order = GlobalOrder(
        num_items,
        num_replicas=replicas,
        micro_batch_size=size,
        shuffle=shuffle,
        seed=0,
        drop_last=False,
    )
    return ElasticLoader(Alone(), list(range(num_items)), order, collate=list)


def test_the_smallest_iteration_of_an_epoch_is_its_rest() -> None:
    assert loader_of(16, replicas=4, size=2).fewest_samples == 8
    # Three samples of each replica, the last of them filled up from the front.
    assert loader_of(9, replicas=4, size=2).fewest_samples == 4


@settings(derandomize=True, max_examples=40, deadline=None)
@given(st.integers(1, 6), st.integers(1, 4), st.integers(0, 40), st.booleans(), st.integers(0, 3))
def test_replicas_read_what_the_distributed_sampler_gives_them(
    replicas: int, size: int, more: int, shuffle: bool, epoch: int
) -> None:
    num_items = replicas + more
    loader = loader_of(num_items, replicas, size, shuffle)
    loader.set_epoch(epoch)
    wanted = []
    for rank in range(replicas):
        sampler = DistributedSampler(
            range(num_items), num_replicas=replicas, rank=rank, shuffle=shuffle
        )
        sampler.set_epoch(epoch)
        wanted.append(list(DataLoader(range(num_items), batch_size=size, sampler=sampler)))
    batches = list(loader)
    assert len(batches) == len(loader) == len(wanted[0])
    for iteration, batch in enumerate(batches):
        assert batch == [int(one) for rank in range(replicas) for one in wanted[rank][iteration]]


def test_a_new_pass_begins_the_next_epoch_and_a_position_brings_it_back() -> None:
    loader = loader_of(10, 2, 2, shuffle=False)
    passes = iter(loader)
    first = [next(passes), next(passes)]
    here = loader.position
    third = next(passes)
    second_pass = iter(loader)
    again = [next(second_pass), next(second_pass)]
    assert again == first and loader.position.epoch == 1
    loader.position = here
    assert next(second_pass) == third  # the redo crosses the border of the epochs ...
    assert [next(second_pass), next(second_pass)] == again  # ... as the first time did
    assert loader.position.served == 10 + 8


def test_an_epoch_that_was_left_early_is_left_there_again() -> None:
    loader = loader_of(20, 2, 2, shuffle=False)
    passes = iter(loader)
    first, second = next(passes), next(passes)
    here = loader.position
    third = next(passes)
    passes = iter(loader)
    assert next(passes) == first
    loader.position = here
    assert [next(passes), next(passes), next(passes)] == [third, first, second]


def test_fewer_samples_than_workers_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="at least 4"):
        loader_of(3, 4, 1)


@settings(derandomize=True, max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(1, 5), st.data())
def test_shares_cover_every_sample_once_and_weigh_one_mean(
    replicas: int, size: int, data: st.DataObject
) -> None:
    homes = tuple(range(replicas))
    live = tuple(data.draw(st.lists(st.sampled_from(homes), min_size=1, unique=True)))
    shares = share(num_samples=replicas * size, launch_slots=homes, live=live)
    taken = [one for slot in sorted(live) for one in range(*shares.interval(slot))]
    assert taken == list(range(replicas * size))
    values = [float((3 * one) % 7) for one in range(replicas * size)]
    means = []
    for slot in live:
        start, stop = shares.interval(slot)
        means.append(shares.weight(slot) * sum(values[start:stop]) / (stop - start))
    assert sum(means) / len(live) == pytest.approx(sum(values) / len(values), rel=1e-12)
    if len(live) == replicas:
        assert all(shares.weight(slot) == 1.0 for slot in live)


class Follower(Alone):
    """As `Alone`, but it enters a running job with its first batch, as ``EngineJob`` does."""

    def __init__(self, epoch: int, left_at: dict[int, int], position: Position) -> None:
        self._told: Any = epoch, left_at
        self._position = position

    def next_batch(self, loader: ElasticLoader) -> Any:
        if self._told is not None:
            loader.follow(self._told)
            loader.position, self._told = self._position, None
        if loader.lagging:
            loader.skip_epoch()
        return super().next_batch(loader)


def follower(epoch: int, left_at: dict[int, int], position: tuple[int, int]) -> ElasticLoader:
    """A loader of a worker that comes where the others iterate over this epoch."""
    order = GlobalOrder(
        16, num_replicas=2, micro_batch_size=2, shuffle=True, seed=0, drop_last=False
    )
    reader = Follower(epoch, left_at, Position(epoch=position[0], iteration=position[1]))
    return ElasticLoader(reader, list(range(16)), order, collate=list)


def test_a_loop_over_epochs_comes_to_where_the_others_are() -> None:
    followed = loader_of(16, 2, 2)
    for epoch in range(3):
        followed.set_epoch(epoch)
        batches = list(followed)
    later = follower(2, {}, (2, 1))
    found = []
    for epoch in range(4):
        later.set_epoch(epoch)
        found.append(list(later))
    assert found[:2] == [[], []] and found[2] == batches[1:] and len(found[3]) == 4


@pytest.mark.parametrize("says", ["the sampler", "the loader"])
def test_the_scripts_sampler_says_how_an_epoch_is_shuffled(says: str) -> None:
    sampler = DistributedSampler(range(16), num_replicas=1, rank=0, seed=0)
    order = GlobalOrder(
        16, num_replicas=1, micro_batch_size=2, shuffle=True, seed=0, drop_last=False
    )
    loader = ElasticLoader(Alone(), list(range(16)), order, collate=list, sampler=sampler)
    found, wanted = [], []
    for epoch in (0, 1, 5):
        (sampler if says == "the sampler" else loader).set_epoch(epoch)
        wanted.append(list(sampler))
        found.append([item for batch in loader for item in batch])
    assert found == wanted and wanted[0] != wanted[1] != wanted[2]


def test_a_random_sampler_shuffles_each_epoch_anew() -> None:
    order = GlobalOrder(
        16,
        num_replicas=1,
        micro_batch_size=2,
        shuffle=True,
        seed=0,
        drop_last=False,
        reshuffles=True,
    )
    loader = ElasticLoader(Alone(), list(range(16)), order, collate=list)
    assert list(loader) != list(loader)


def test_an_epoch_that_the_others_left_early_is_left_there() -> None:
    # Its last step is sealed, and nobody has begun the next epoch, which they iterate over.
    later = follower(3, {2: 3}, (2, 3))
    lengths = [len(list(later)) for _ in range(5)]
    assert lengths == [0, 0, 0, 4, 4] and later.position == Position(epoch=5, served=32)


def test_a_script_that_is_past_the_others_is_told() -> None:
    loader = loader_of(16, 2, 2)
    list(loader), list(loader)
    with pytest.raises(ElasWaveError, match="in epoch 1 of the data and the job in epoch 0"):
        loader.follow((0, {}))


def test_a_repeating_loader_goes_through_many_empty_epochs() -> None:
    patches = deepspeed_patches()
    patches.apply()
    try:
        repeating = RepeatingLoader(follower(3, {}, (3, 0)))
        assert len(next(repeating)) == 4
    finally:
        patches.undo()


DATA = list(range(10))


@pytest.mark.parametrize(
    ("options", "shuffle", "seed"),
    [
        ({}, False, None),
        ({"shuffle": True}, True, None),
        ({"sampler": DistributedSampler(DATA, 4, 1, shuffle=False, seed=3)}, False, 3),
        ({"sampler": DistributedSampler(DATA, 4, 1, seed=3)}, True, 3),
        ({"batch_sampler": BatchSampler(RandomSampler(DATA), 2, drop_last=False)}, True, None),
    ],
)
def test_a_torch_loader_says_how_it_shuffles(
    options: dict[str, Any], shuffle: bool, seed: int | None
) -> None:
    options = options if "batch_sampler" in options else {"batch_size": 2, **options}
    given = batches_of(DataLoader(DATA, collate_fn=list, **options), micro_batch_size=2)
    sampler = options.get("sampler")
    assert given == (DATA, list, shuffle, seed, False, sampler)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"sampler": SubsetRandomSampler([1, 2])}, "a SubsetRandomSampler"),
        ({"sampler": WeightedRandomSampler([1.0] * 10, 10)}, "a WeightedRandomSampler"),
        ({"batch_sampler": [[1, 2], [3, 4]]}, "draws from a list"),
        ({"sampler": RandomSampler(DATA, num_samples=4), "batch_size": 2}, "4 of 10 samples"),
        ({"sampler": RandomSampler(DATA, replacement=True), "batch_size": 2}, "replacement"),
        ({"batch_size": 3}, "batch_size is 3 and train_micro_batch_size_per_gpu is 2"),
        ({"batch_size": None}, "draws from a NoneType"),
        (
            {"sampler": DistributedSampler(DATA, 4, 1, drop_last=True), "batch_size": 2},
            "10 samples do not divide by 4 workers",
        ),
    ],
)
def test_a_torch_loader_with_other_batches_is_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        batches_of(DataLoader(DATA, **options), micro_batch_size=2)


class Stream(IterableDataset[int]):
    """Samples in the order in which they come."""

    def __iter__(self) -> Iterator[int]:
        return iter(DATA)


class CountedStream(Stream):
    """One that knows how many."""

    def __len__(self) -> int:
        return len(DATA)


@pytest.mark.parametrize("stream", [Stream(), CountedStream()])
def test_a_torch_loader_over_a_stream_is_refused(stream: Stream) -> None:
    wanted = f"dataset is a {type(stream).__name__}, wanted one with __getitem__ and __len__"
    with pytest.raises(ConfigurationError, match=wanted):
        batches_of(DataLoader(stream, batch_size=2), micro_batch_size=2)


@pytest.mark.parametrize("stream", [Stream(), CountedStream()])
def test_a_stream_as_training_data_is_refused(stream: Stream) -> None:
    nothing: Any = None
    job: Any = SimpleNamespace(_framework=SimpleNamespace(loader=None))
    wanted = f"the dataset is a {type(stream).__name__}, wanted one with __getitem__ and __len__"
    with pytest.raises(ConfigurationError, match=wanted):
        AttachedEngine.take_order(job, stream, lambda: nothing, collate=None)


class Plain:
    """An engine without a job: its loader is DeepSpeed's, of which only the order is there."""

    dp_world_size, global_rank = 2, 1

    def train_micro_batch_size_per_gpu(self) -> int:
        return 2

    def deepspeed_io(self, dataset: Any, data_sampler: Any, collate_fn: Any) -> list[int]:
        return list(data_sampler)


def test_without_the_section_a_torch_loader_is_obeyed_too() -> None:
    assert loader(Plain(), DataLoader(DATA, batch_size=2)) == [1, 3, 5, 7, 9]
    wanted = DistributedSampler(DATA, 2, 1, seed=7)
    assert loader(Plain(), DATA, seed=7) == list(wanted) != [1, 3, 5, 7, 9]
