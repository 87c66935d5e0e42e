"""Batches keyed by (step, samples): the worker that runs samples of a step's batch reads these."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from elaswave_plugin.adapters.megatron.step.loader_order import LoaderOrder
from elaswave_plugin.adapters.megatron.step.sample_draws import SampleDraws
from elaswave_plugin.adapters.read_ahead import Key, ReadAhead
from elaswave_plugin.core.step.dataflow import Samples, sample_ids
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.rehearsed import unobserved
from elaswave_plugin.trainer.fatal import ends_in_a_sentence


def in_order(
    forward_step_func: Callable[..., Any],
    pieces: Sequence[Samples],
    begin: Callable[["KeyedBatches", Any, Samples], None],
    end: Callable[[], None] = lambda: None,
) -> Callable[..., Any]:
    """The forward step whose i-th call for a model chunk runs the i-th of ``pieces``.

    ``begin(data iterator, chunk, samples)`` comes first, ``end()`` last. Schedules call the
    forward steps of a chunk in the order of samples, whichever stage they are.
    """
    upcoming: dict[int, Iterator[Samples]] = {}

    def forward_step(batches: "KeyedBatches", chunk: Any, *args: Any, **kwargs: Any) -> Any:
        begin(batches, chunk, next(upcoming.setdefault(id(chunk), iter(pieces))))
        output = forward_step_func(batches, chunk, *args, **kwargs)
        end()
        return output

    return forward_step


class KeyedBatches:
    """The data iterator on which a forward step calls ``next``, once a micro-batch or never."""

    def __init__(
        self,
        dataset: Any,
        *,
        micro_batch_size: int,
        num_microbatches: int,
        on_batch: Callable[["KeyedBatches", int, tuple[int, ...]], None],
        seed: int,
    ) -> None:
        """``on_batch(these, micro-batch, sample ids)`` is told of what is read before it is used.

        Once for each micro-batch of which a piece has samples. ``seed``: of what the dataset draws.
        Raises ConfigurationError for anything but a map-style dataset, or a DataLoader over one.
        """
        self._collate = torch.utils.data.default_collate
        like: torch.utils.data.DataLoader[Any] | None = None
        if isinstance(dataset, torch.utils.data.DataLoader):
            like, dataset = dataset, LoaderOrder(dataset, micro_batch_size=micro_batch_size)
            self._collate = dataset.collate_fn
        _check_dataset(dataset)
        self._size = len(dataset) if hasattr(dataset, "__len__") else None
        self._draws = SampleDraws(dataset, seed)
        self._micro_batch_size = micro_batch_size
        self._num_microbatches = num_microbatches
        self._on_batch = on_batch
        self.position = 0
        """The global batch that comes next in training."""
        self.observe: Callable[..., None] = unobserved
        """Told of each batch that is read."""
        self._number = 0
        self._delivered = 0
        self._queue: list[Samples] = []
        self._ahead = ReadAhead(self._read, self._request, like=like)

    def deliver(self, number: int, samples: Samples) -> None:
        """The next batch is these samples of the global batch ``number``."""
        self._number = number
        self._delivered += 1
        self._queue = [samples]

    def check_length(self, steps: int) -> None:
        """Raise ConfigurationError where ``steps`` of training read more samples than there are."""
        wanted = steps * self._num_microbatches * self._micro_batch_size
        if self._size is not None and self._size < wanted:
            raise ConfigurationError(
                f"the dataset has {self._size} samples, and {steps} steps of "
                f"{wanted // steps} read {wanted}: give job.batches a longer one, a DataLoader of "
                "it, which begins again at its end, or train fewer steps"
            )

    def __iter__(self) -> "KeyedBatches":
        return self

    @ends_in_a_sentence
    def __next__(self) -> Any:
        """The next piece, collated: of dicts, a dict of stacked tensors [samples, ...].

        Raises ConfigurationError where the wrapped forward-backward function has delivered none.
        """
        if not self._queue:
            raise ConfigurationError(
                "next(batches) is called twice in one forward_step, which has one micro-batch: "
                "call it once there"
                if self._delivered
                else "next(batches) is called where no micro-batch is due: write forward_backward "
                "= job.forward_backward(get_forward_backward_func()), and call that in train_step"
            )
        key = Key(self._number, self._queue.pop())
        for microbatch, ids in self._ids(key):
            self._on_batch(self, microbatch, ids)
        batch = self._ahead.take(key, (key.place, self._all_ids(key)))
        self.observe("batch", batch)
        return batch

    def _ids(self, key: Key) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yield the micro-batches of which a batch has samples, and those."""
        assert isinstance(key.part, Samples)
        for microbatch, start, stop in key.part.rows(size=self._micro_batch_size):
            ids = sample_ids(
                step=key.place,
                microbatch=microbatch,
                num_microbatches=self._num_microbatches,
                size=self._micro_batch_size,
            )
            yield microbatch, ids[start:stop]

    def _all_ids(self, key: Key) -> list[int]:
        return [one for _, ids in self._ids(key) for one in ids]

    def _request(self, key: Key) -> tuple[int, list[int]] | None:
        """Return what to read for a batch; None behind the end of the data."""
        ids = self._all_ids(key)
        return None if self._size is not None and max(ids) >= self._size else (key.place, ids)

    def _read(self, request: tuple[int, list[int]]) -> Any:
        number, ids = request
        return self._collate(self._draws.read(ids, number))


def check_lengths(batches: Any, steps: int) -> None:
    """Raise ConfigurationError where ``steps`` of training read more than a dataset has."""
    for one in batches if isinstance(batches, list) else [batches]:
        if isinstance(one, KeyedBatches):
            one.check_length(steps)


def served(batches: Any) -> KeyedBatches:
    """The data iterator of a forward-backward call; raises ConfigurationError for any other."""
    if not isinstance(batches, KeyedBatches):
        raise ConfigurationError(
            f"data_iterator is {_kind(batches)}, which cannot serve its samples again after a "
            "loss: write train_batches = job.batches(dataset), and give that on every stage"
        )
    return batches


def _check_dataset(dataset: Any) -> None:
    if isinstance(dataset, torch.utils.data.IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise ConfigurationError(
            f"job.batches got {_kind(dataset)}, wanted a dataset with dataset[i], since samples "
            "are read by number, and again after a loss: give one with __getitem__, a list, or the "
            "DataLoader"
        )


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
