"""A data loader that reads any micro-batch of a step, in the order of Megatron-LM's own samplers.

Micro-batch k of a batch belongs to replica k mod D0 of the launch: it is the one that the sampler
of that replica yields there, on any worker (megatron/training/datasets/data_samplers.py).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from elaswave_plugin.adapters.megatron.step.sample_draws import SampleDraws
from elaswave_plugin.adapters.read_ahead import Key, ReadAhead
from elaswave_plugin.rehearsed import unobserved

OnBatch = Callable[[int, Sequence[int]], None]


class _Request(NamedTuple):
    """The samples of a micro-batch, and the epoch in which the dataset has them."""

    position: int
    ids: list[int]
    epoch: int | None


class _Reader:
    """The sampler of one replica; ``position``: samples, of all, before its next batch."""

    def __init__(self, sampler: Any, position: int) -> None:
        self.sampler = sampler
        self.position = position
        self._batches = iter(sampler)
        # A cyclic order of samples that no replica has to itself leaves some replicas a batch more
        # than others. An epoch ends for all of them where one that is opened there begins the next.
        self._ends: float = math.inf
        if hasattr(sampler, "last_batch_size"):
            length = sampler.total_samples - sampler.last_batch_size
            self._ends = (position // length + 1) * length

    def read(self) -> list[int] | None:
        """The samples of its next batch; None at the end of an epoch."""
        return next(self._batches, None) if self.position < self._ends else None


class MicrobatchLoader:
    """The loader of one dataset; ``position``: samples consumed before the present batch."""

    def __init__(
        self,
        dataset: Any,
        position: int,
        *,
        make: Callable[[int, int], Any],
        num_replicas: int,
        micro_batch_size: int,
        on_batch: OnBatch,
        seed: int,
    ) -> None:
        """``make(replica, position)`` is Megatron-LM's own loader of a replica.

        ``on_batch(micro-batch, numbers of samples)`` is told of each before it is used: they are
        numbered in the order of all passes, whatever an epoch's order makes of them.
        ``seed``: of what the dataset draws.
        """
        self._dataset = dataset
        self._draws = SampleDraws(dataset, seed)
        self.position = position
        self.observe: Callable[..., None] = unobserved
        self._make = make
        self._num_replicas = num_replicas
        self._size = micro_batch_size
        self._stride = num_replicas * micro_batch_size
        self._on_batch = on_batch
        self._readers: dict[int, _Reader] = {}
        self._native = make(0, position)
        self._queue: Iterator[int] = iter(())
        self._requests: dict[Key, _Request] = {}
        self._ahead = ReadAhead(self._read, self._request, like=self._native)

    def __len__(self) -> int:
        return len(self._native)

    def __iter__(self) -> "MicrobatchLoader":
        return self

    def begin(self, num_microbatches: int) -> None:
        """So many micro-batches of all replicas are the present batch."""

    def deliver(self, microbatch: int) -> None:
        """The next one read is this micro-batch of the present batch."""
        self._queue = iter((microbatch,))

    def advance(self, samples: int) -> None:
        """Advance past the present batch, of ``samples`` samples."""
        self.position += samples
        self._requests = {k: one for k, one in self._requests.items() if k.place >= self.position}

    def __next__(self) -> Any:
        """The micro-batch that was asked for, as Megatron-LM's loader collates it."""
        microbatch = next(self._queue)
        key = Key(self.position, microbatch)
        request = self._request(key)
        if request is None:
            raise StopIteration
        first = self.position + microbatch * self._size
        self._on_batch(microbatch, range(first, first + len(request.ids)))
        batch = self._ahead.take(key, request)
        self.observe("batch", batch)
        return batch

    def _read(self, request: "_Request") -> Any:
        if request.epoch is not None and hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(request.epoch)
        return self._native.collate_fn(self._draws.read(request.ids, request.position))

    def _request(self, key: Key) -> "_Request | None":
        """Return what to read for a micro-batch; None behind the end of the data."""
        if key not in self._requests:
            assert isinstance(key.part, int)
            order, replica = divmod(key.part, self._num_replicas)
            found = self._ids(replica, key.place + order * self._stride)
            if found is None:
                return None
            ids, sampler = found
            self._requests[key] = _Request(key.place, ids, getattr(sampler, "epoch", None))
        return self._requests[key]

    def _ids(self, replica: int, position: int) -> tuple[list[int], Any] | None:
        reader = self._readers.get(replica)
        ids = reader.read() if reader is not None and reader.position == position else None
        if reader is None or ids is None:
            reader = _Reader(self._make(replica, position).batch_sampler, position)
            ids = reader.read()
        if ids is None:
            return None
        reader.position = position + self._stride
        self._readers[replica] = reader
        return ids, reader.sampler
