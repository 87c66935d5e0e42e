"""The samples of a micro-batch are those of Megatron-LM's sampler, on any worker."""

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from elaswave_plugin.adapters.megatron_lm.loader import MicrobatchLoader


class Sequential:
    """Batches of one replica from a position on; the last of an epoch of 48 is at 48."""

    def __init__(self, replica: int, position: int) -> None:
        self.replica, self.position = replica, position
        self.opened: list[int] = []

    def __iter__(self) -> Iterator[list[int]]:
        epoch, start = divmod(self.position, 48)
        for first in range(start, 48, 8):
            own = first + 2 * self.replica
            yield [1000 * epoch + own, 1000 * epoch + own + 1][:2]


class Batches(list):  # type: ignore[type-arg]
    """Batches of the sampler of a cyclic order: of 10 samples, of which a pass leaves 4."""

    total_samples, last_batch_size = 10, 4


def loader(told: list[tuple[int, Sequence[int]]], made: list[tuple[int, int]]) -> MicrobatchLoader:
    """Four replicas, micro-batches of two samples."""

    def make(replica: int, position: int) -> Any:
        made.append((replica, position))
        sampler = Sequential(replica, position)
        return SimpleNamespace(batch_sampler=sampler, collate_fn=list, num_workers=0)

    return MicrobatchLoader(
        {one: one for one in range(3000)},
        0,
        make=make,
        num_replicas=4,
        micro_batch_size=2,
        seed=1,
        on_batch=lambda microbatch, ids: told.append((microbatch, ids)),
    )


def read(one: MicrobatchLoader, microbatch: int) -> list[int]:
    one.deliver(microbatch)
    return list(next(one))


def test_microbatches_are_those_of_the_replicas_in_any_order() -> None:
    told: list[tuple[int, Sequence[int]]] = []
    one = loader(told, [])
    assert [read(one, k) for k in (5, 0, 7, 2)] == [[10, 11], [0, 1], [14, 15], [4, 5]]
    assert [microbatch for microbatch, _ in told] == [5, 0, 7, 2]
    one.advance(16)
    assert [read(one, k) for k in (0, 1, 4)] == [[16, 17], [18, 19], [24, 25]]


def test_a_replica_that_is_read_in_order_is_opened_once() -> None:
    made: list[tuple[int, int]] = []
    one = loader([], made)
    made.clear()
    for _ in range(3):
        read(one, 1), read(one, 5)
        one.advance(16)
    assert made == [(1, 0)]


def test_a_step_back_reads_the_same_again() -> None:
    one = loader([], [])
    one.advance(16)
    first = [read(one, k) for k in range(8)]
    one.position = 16
    assert [read(one, k) for k in range(8)] == first


def test_the_next_epoch_begins_where_one_ends() -> None:
    one = loader([], [])
    for _ in range(3):
        read(one, 0), read(one, 4)
        one.advance(16)
    assert read(one, 0) == [1000, 1001]


def test_a_pass_ends_for_all_replicas_together() -> None:
    """As one that is opened there has it, also where a replica has samples for one batch more."""

    def make(replica: int, position: int) -> Any:
        epoch, start = divmod(position, 6)
        mine = range(start, 10)[replica::3]
        batches = [[100 * epoch + item for item in mine[k : k + 2]] for k in range(0, len(mine), 2)]
        sampler = Batches(one for one in batches if len(one) == 2)
        return SimpleNamespace(batch_sampler=sampler, collate_fn=list, num_workers=0)

    data = {one: one for one in range(300)}
    sizes = {"num_replicas": 3, "micro_batch_size": 2, "seed": 1}
    one, later = (
        MicrobatchLoader(data, begins, make=make, on_batch=lambda *told: None, **sizes)
        for begins in (0, 6)
    )
    assert [read(one, k) for k in range(3)] == [[0, 3], [1, 4], [2, 5]]
    one.advance(6)
    second = [[100, 103], [101, 104], [102, 105]]
    assert [read(one, k) for k in range(3)] == [read(later, k) for k in range(3)] == second


def test_samples_are_numbered_in_the_order_of_all_epochs() -> None:
    """The second epoch's have the numbers behind those of the first one."""
    told: list[tuple[int, Sequence[int]]] = []
    one = loader(told, [])
    for _ in range(4):
        read(one, 0), read(one, 5)
        one.advance(16)
    assert [[*ids] for _, ids in told[-2:]] == [[48, 49], [58, 59]]


def test_a_batch_is_read_only_when_it_is_asked_for() -> None:
    with pytest.raises(StopIteration):
        next(loader([], []))
