"""Batches keyed by (step, micro-batch): whoever runs micro-batch k reads the samples of k."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from elaswave_plugin.core.dataflow import sample_ids


def in_order(
    forward_step_func: Callable[..., Any],
    microbatches: Sequence[int],
    begin: Callable[["KeyedBatches", Any, int], None],
) -> Callable[..., Any]:
    """The forward step whose i-th call for a model chunk runs the i-th of ``microbatches``.

    ``begin(data iterator, chunk, micro-batch)`` comes first. Schedules call the forward steps of a
    chunk in the order of micro-batches, whichever stage they are.
    """
    upcoming: dict[int, Iterator[int]] = {}

    def forward_step(batches: "KeyedBatches", chunk: Any, *args: Any, **kwargs: Any) -> Any:
        begin(batches, chunk, next(upcoming.setdefault(id(chunk), iter(microbatches))))
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
        """``on_batch(step, micro-batch, sample ids)`` is told of each batch before it is used."""
        self._dataset = dataset
        self._micro_batch_size = micro_batch_size
        self._num_microbatches = num_microbatches
        self._on_batch = on_batch
        self._step = 0
        self._queue: Iterator[int] = iter(())

    def deliver(self, step: int, microbatch: int) -> None:
        """The next batch is that of a micro-batch of ``step``."""
        self._step = step
        self._queue = iter((microbatch,))

    def __iter__(self) -> "KeyedBatches":
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        """The next micro-batch as a dict of stacked tensors [micro_batch_size, ...]."""
        microbatch = next(self._queue)
        ids = sample_ids(
            step=self._step,
            microbatch=microbatch,
            num_microbatches=self._num_microbatches,
            size=self._micro_batch_size,
        )
        self._on_batch(self._step, microbatch, ids)
        return torch.utils.data.default_collate([self._dataset[one] for one in ids])
