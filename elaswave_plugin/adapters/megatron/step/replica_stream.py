"""The batches of every replica, from an iterator over a DataLoader that one of them was given."""

import copy
from collections.abc import Collection, Iterator
from types import SimpleNamespace
from typing import Any
from weakref import ref

import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
)
from torch.utils.data.dataloader import _BaseDataLoaderIter

from elaswave_plugin.adapters.megatron.step.sample_draws import SampleDraws
from elaswave_plugin.adapters.read_ahead import Key, ReadAhead
from elaswave_plugin.core.step.rng import draw_key
from elaswave_plugin.errors import ConfigurationError

# Index lists that are kept of each replica's order.
_REMEMBERED = 1024
# What samplers call the replica that they draw for: torch's, and Megatron-LM's.
_REPLICA = ("rank", "data_parallel_rank")
_ADVICE = (
    "give forward_backward iter(loader) of a torch DataLoader with shuffle=True or False, a"
    " DistributedSampler, or a sampler with the attribute data_parallel_rank"
)


def check_iterator(iterator: Any) -> None:
    """Raise ConfigurationError for an iterator that is none over a DataLoader."""
    if not isinstance(iterator, _BaseDataLoaderIter):
        raise ConfigurationError(
            f"data_iterator is a {type(iterator).__name__}, of which a lost worker's batches are"
            f" gone: {_ADVICE}"
        )
    if iterator._persistent_workers:
        raise ConfigurationError(
            "the DataLoader's persistent_workers is True, with which the iterators of all epochs"
            " are one object: leave it out"
        )


class ReplicaStream:
    """The items of an iterator, and of those that the other replicas were given."""

    def __init__(
        self, iterator: Any, *, number: int, mine: Collection[int], num_replicas: int, seed: int
    ) -> None:
        """``iterator``: as checked, of a replica of ``mine``, the script's ``number``-th.

        ``seed``: of what the dataset draws, and of a shuffled order that names none.

        Raises ConfigurationError where the batches of other replicas cannot be read.
        """
        # What has the iterator has the stream.
        self._iterator, self._yielded = ref(iterator), iterator._num_yielded
        self.position = self._yielded
        """The batch of each replica that comes next."""
        self._orders = [
            _Order(
                _of(
                    iterator._index_sampler,
                    mine=mine,
                    replica=one,
                    num_replicas=num_replicas,
                    key=draw_key(seed, number, one),
                )
            )
            for one in range(num_replicas)
        ]
        self._collate: Any = iterator._collate_fn
        self._draws = SampleDraws(iterator._dataset, seed)
        # The batch that comes next: the call's first, the replica, and its number in the call.
        self._due: tuple[int, int, int] | None = None
        self._ahead = ReadAhead(self._read, self._request, like=_settings_of(iterator))

    def take(self, count: int) -> int:
        """Take the next ``count`` batches of each replica; returns the first one's number.

        Raises ConfigurationError where the script has read from the iterator by itself.
        """
        given = self._iterator()
        if given is not None and given._num_yielded != self._yielded:
            raise ConfigurationError(
                "the script reads from an iterator between calls of forward_backward that it gives"
                " to these, so that a loss would take others for its batches: make an iterator of"
                " its own for each"
            )
        first = self.position
        self.position += count
        return first

    def deliver(self, first: int, replica: int, number: int) -> None:
        """The next batch is a replica's ``number``-th of those from ``first`` on."""
        self._due = first, replica, number

    def __iter__(self) -> "ReplicaStream":
        return self

    def __next__(self) -> Any:
        """The batch that is due, collated as the loader does it; StopIteration behind the last."""
        due, self._due = self._due, None
        if due is None:
            raise ConfigurationError(
                "next(data_iterator) is called twice in one forward_step, which has one"
                " micro-batch: call it once there"
            )
        key = Key(due[0], due[1:])
        request = self._request(key)
        if request is None:
            raise StopIteration
        return self._ahead.take(key, request)

    def _request(self, key: Key) -> tuple[int, list[int]] | None:
        assert isinstance(key.part, tuple)
        replica, number = key.part
        batch = key.place + number
        indices = self._orders[replica].at(batch)
        return None if indices is None else (batch * len(self._orders) + replica, indices)

    def _read(self, request: tuple[int, list[int]]) -> Any:
        moment, indices = request
        return self._collate(self._draws.read(indices, moment))


class _Order:
    """The indices of each batch of one replica, by number."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self._known: dict[int, list[int]] = {}
        self._begin()

    def _begin(self) -> None:
        self._coming: Iterator[tuple[int, Any]] = enumerate(self._sampler)
        self._known.clear()
        self._next = 0

    def at(self, number: int) -> list[int] | None:
        """Return those of a batch; None behind the last one."""
        if number < self._next and number not in self._known:
            self._begin()
        while number not in self._known:
            came = next(self._coming, None)
            if came is None:
                return None
            self._known[came[0]] = list(came[1])
            self._next = came[0] + 1
            self._known.pop(came[0] - _REMEMBERED, None)
        return self._known[number]


class _Shuffled:
    """The order of a RandomSampler, which has none that another worker would know, by a key."""

    def __init__(self, size: int, key: int) -> None:
        self._size, self._key = size, key

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self._key)
        yield from torch.randperm(self._size, generator=generator).tolist()


def _of(batches: Any, *, mine: Collection[int], replica: int, num_replicas: int, key: int) -> Any:
    """The batch sampler of a replica; raises ConfigurationError for one that only it could have."""
    own = type(batches) is BatchSampler
    sampler: Any = batches.sampler if own else batches
    name = next((one for one in _REPLICA if hasattr(sampler, one)), None)
    if name is None and type(sampler) is SequentialSampler:
        return batches
    is_random = type(sampler) is RandomSampler and sampler.generator is None
    if is_random and not sampler.replacement and sampler.num_samples == len(sampler.data_source):
        order: Any = _Shuffled(sampler.num_samples, key)
        return BatchSampler(order, batches.batch_size, batches.drop_last)
    if name is None or getattr(sampler, name) not in mine:
        wanted = " or ".join(map(str, sorted(mine)))
        seen = "" if name is None else f" whose {name} is {getattr(sampler, name)}, not {wanted}"
        raise ConfigurationError(
            f"the data iterator's loader draws from a {type(sampler).__name__}{seen}, and who runs"
            f" the micro-batches of a lost worker could not draw its samples: {_ADVICE}"
        )
    if isinstance(sampler, DistributedSampler) and sampler.num_replicas != num_replicas:
        raise ConfigurationError(
            f"the DistributedSampler's num_replicas is {sampler.num_replicas}, and there are"
            f" {num_replicas} data-parallel replicas: give it their number"
        )
    other = copy.copy(sampler)
    setattr(other, name, replica)
    return BatchSampler(other, batches.batch_size, batches.drop_last) if own else other


def _settings_of(iterator: Any) -> Any:
    """The settings of the iterator's processes, as `ReadAhead` takes them from a loader."""
    return SimpleNamespace(
        num_workers=iterator._num_workers,
        prefetch_factor=getattr(iterator, "_prefetch_factor", None),
        worker_init_fn=getattr(iterator, "_worker_init_fn", None),
        multiprocessing_context=None,
        timeout=iterator._timeout,
    )
