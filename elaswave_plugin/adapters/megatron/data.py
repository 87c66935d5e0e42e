"""Batches keyed by (step, samples): whoever runs samples of a step's batch reads these."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from elaswave_plugin.core.dataflow import Samples, sample_ids


def in_order(
    forward_step_func: Callable[..., Any],
    pieces: Sequence[Samples],
    begin: Callable[["KeyedBatches", Any, Samples], None],
) -> Callable[..., Any]:
    """The forward step whose i-th call for a model chunk runs the i-th of ``pieces``.

    ``begin(data iterator, chunk, samples)`` comes first. Schedules call the forward steps of a
    chunk in the order of samples, whichever stage they are.
    """
    upcoming: dict[int, Iterator[Samples]] = {}

    def forward_step(batches: "KeyedBatches", chunk: Any, *args: Any, **kwargs: Any) -> Any:
        begin(batches, chunk, next(upcoming.setdefault(id(chunk), iter(pieces))))
        return forward_step_func(batches, chunk, *args, **kwargs)

    return forward_step


class KeyedBatches:
    """The data iterator on which a forward step calls ``next``, once a micro-batch or never."""

    def __init__(
        self,
        dataset: Any,
        *,
        micro_batch_size: int,
        num_microbatches: int,
        on_batch: Callable[[int, int, tuple[int, ...]], None],
    ) -> None:
        """``on_batch(step, micro-batch, sample ids)`` is told of what is read before it is used.

        Once for each micro-batch of which a piece has samples.
        """
        self._dataset = dataset
        self._micro_batch_size = micro_batch_size
        self._num_microbatches = num_microbatches
        self._on_batch = on_batch
        self._step = 0
        self._queue: Iterator[Samples] = iter(())

    def deliver(self, step: int, samples: Samples) -> None:
        """The next batch is these samples of ``step``."""
        self._step = step
        self._queue = iter((samples,))

    def __iter__(self) -> "KeyedBatches":
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        """The next piece as a dict of stacked tensors [samples, ...]."""
        read: list[int] = []
        for microbatch, start, stop in next(self._queue).rows(size=self._micro_batch_size):
            ids = sample_ids(
                step=self._step,
                microbatch=microbatch,
                num_microbatches=self._num_microbatches,
                size=self._micro_batch_size,
            )[start:stop]
            self._on_batch(self._step, microbatch, ids)
            read += ids
        return torch.utils.data.default_collate([self._dataset[one] for one in read])
