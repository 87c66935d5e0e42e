"""Collators that draw: the samples of a share have what they have in whole micro-batches."""

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

pytest.importorskip("deepspeed")

from elaswave_plugin.adapters.deepspeed.engine.loader import ElasticLoader, GlobalOrder
from elaswave_plugin.core.step.dataflow import share

SIZE, REPLICAS = 4, 3
SHARES = [(0, 6), (3, 6), (5, 7), (2, 11), (0, 12), (4, 8)]


class Pair(NamedTuple):
    tokens: torch.Tensor
    names: list[str]


class Counted(list[int]):
    """Samples, and how many of them were read."""

    read = 0

    def __getitem__(self, item: Any) -> Any:
        self.read += 1
        return super().__getitem__(item)


def by_torch(samples: list[int]) -> Any:
    return {"tokens": torch.tensor(samples)[:, None] + torch.rand(len(samples), 3), "count": 1.5}


def by_numpy(samples: list[int]) -> Any:
    return [torch.from_numpy(one + np.random.rand(len(samples))) for one in (0, 1)]


def by_python(samples: list[int]) -> Any:
    names = [f"{one} {random.random()}" for one in samples]
    return Pair(torch.tensor([random.random() for _ in samples]), names)


def in_blocks(samples: list[int]) -> Any:
    """Two rows of a sample, apart, as of pairs."""
    return torch.tensor([*samples, *samples])[:, None] + torch.rand(2 * len(samples), 2)


def padded(samples: list[int]) -> Any:
    return torch.rand(len(samples), max(samples) + 1)


def still(samples: list[int]) -> Any:
    return torch.tensor(samples)


def wholes_of(size: int) -> list[tuple[int, int]]:
    return [(first, first + size) for first in range(0, size * REPLICAS, size)]


def loader_of(
    collate: Callable[[list[int]], Any], size: int = SIZE
) -> tuple[ElasticLoader, list[int], list[str]]:
    """A loader, its samples, and what it tells."""
    items, told = Counted(range(5 * size * REPLICAS)), list[str]()
    order = GlobalOrder(
        len(items),
        num_replicas=REPLICAS,
        micro_batch_size=size,
        shuffle=True,
        seed=3,
        drop_last=True,
    )
    loader: Any = ElasticLoader(None, items, order, collate=collate, seed=7)  # type: ignore[arg-type]
    slots = range(REPLICAS)

    def launch(count: int) -> list[tuple[int, int]]:
        dealt = share(num_samples=count, launch_slots=slots, live=slots)
        return [(start, stop) for _, start, stop in dealt.intervals]

    loader.launch, loader.on_collated = launch, lambda: told.append("collated")
    return loader, items, told


def read(loader: ElasticLoader, interval: tuple[int, int]) -> Any:
    items = loader.items_at(0, 1)
    loader.seek(0, 1)
    return loader.read(items, interval)[1]


def leaves(batch: Any) -> list[Any]:
    return torch.utils._pytree.tree_leaves(batch)


def rows(batch: Any, start: int, stop: int, of: int) -> list[Any]:
    """The samples of all values of a batch."""
    found = []
    for value in leaves(batch):
        if torch.is_tensor(value):
            found += value.unflatten(0, (-1, of))[:, start:stop].flatten(0, 1).tolist()
    return found


@pytest.mark.parametrize("interval", SHARES, ids=str)
@pytest.mark.parametrize("collate", [by_torch, by_numpy, by_python, in_blocks])
def test_a_sample_is_collated_as_in_its_micro_batch(
    collate: Callable[[list[int]], Any], interval: tuple[int, int]
) -> None:
    check_rows(collate, interval, SIZE)


def test_names_are_no_samples_where_there_are_as_many() -> None:
    check_rows(by_numpy, (1, 3), 2)
    check_rows(by_numpy, (1, 4), 2)


def check_rows(collate: Callable[[list[int]], Any], interval: tuple[int, int], size: int) -> None:
    loader, _, told = loader_of(collate, size)
    wholes = {one: read(loader, one) for one in wholes_of(size)}
    batch = read(loader, interval)
    for place in range(*interval):
        (first, last), whole = next(one for one in wholes.items() if place < one[0][1])
        assert type(batch) is type(whole)
        ours = rows(batch, place - interval[0], place - interval[0] + 1, interval[1] - interval[0])
        theirs = rows(whole, place - first, place - first + 1, last - first)
        assert ours == theirs
    assert told == []


def test_lists_of_samples_are_joined() -> None:
    loader, _, _ = loader_of(by_python)
    names = [name for one in wholes_of(SIZE) for name in read(loader, one).names]
    assert len({*names}) == SIZE * REPLICAS
    assert read(loader, (3, 9)).names == names[3:9]


def test_other_shapes_are_told_and_drawn_for_the_share() -> None:
    loader, _, told = loader_of(padded)
    batch = read(loader, (2, 10))
    assert told == ["collated"]
    assert batch.shape == (8, max(loader.items_at(0, 1)[2:10]) + 1)
    assert torch.equal(batch, read(loader, (2, 10)))


def test_what_draws_nothing_reads_no_more() -> None:
    loader, items, told = loader_of(still)
    assert read(loader, (2, 10)).tolist() == loader.items_at(0, 1)[2:10]
    assert (items.read, told) == (8, [])  # type: ignore[attr-defined]
    drawing, others, _ = loader_of(by_torch)
    read(drawing, (2, 10))
    assert others.read == 8 + SIZE * REPLICAS  # type: ignore[attr-defined]


def test_the_generators_of_the_script_do_not_notice() -> None:
    loader, _, _ = loader_of(by_python)
    before = random.getstate(), torch.get_rng_state()
    read(loader, (2, 10))
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
