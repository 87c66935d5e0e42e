"""Batches of shares that are cut, whose collator draws: the rows of whole micro-batches."""

import copy
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch


class Whole(NamedTuple):
    """A whole micro-batch, of ``size`` samples, of which [start, stop) are a share's."""

    batch: Any
    size: int
    start: int
    stop: int


def of_wholes(batch: Any, wholes: Sequence[Whole]) -> Any:
    """Return a batch of a share as its micro-batches have it; None where their shapes differ.

    >>> first, second = ({"x": torch.tensor([[1], [2]])}, {"x": torch.tensor([[3], [4]])})
    >>> of_wholes({"x": torch.zeros(2, 1)}, [Whole(first, 2, 1, 2), Whole(second, 2, 0, 1)])
    {'x': tensor([[2],
            [3]])}
    """
    if isinstance(batch, Mapping):
        made = copy.copy(batch)
        found = {name: of_wholes(value, _at(wholes, name)) for name, value in batch.items()}
        made.update(found)  # type: ignore[attr-defined]
        return None if any(one is None for one in found.values()) else made
    samples = sum(one.stop - one.start for one in wholes)
    if torch.is_tensor(batch):
        return _tensor(batch, samples, wholes)
    if _lists_samples(batch, samples) and all(len(one.batch) == one.size for one in wholes):
        return [*chain.from_iterable(one.batch[one.start : one.stop] for one in wholes)]
    if isinstance(batch, list | tuple):
        parts = [of_wholes(value, _at(wholes, place)) for place, value in enumerate(batch)]
        if any(one is None for one in parts):
            return None
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch


def _lists_samples(batch: Any, samples: int) -> bool:
    """Return whether a batch has an entry for each sample, and not one of all for each name."""
    if not isinstance(batch, list) or len(batch) != samples:
        return False
    return not all(torch.is_tensor(one) and one.ndim and len(one) == samples for one in batch)


def _at(wholes: Sequence[Whole], place: Any) -> list[Whole]:
    return [one._replace(batch=one.batch[place]) for one in wholes]


def _tensor(tensor: torch.Tensor, samples: int, wholes: Sequence[Whole]) -> torch.Tensor | None:
    """Return the rows of a tensor, of as many blocks of samples as it has."""
    if not tensor.ndim or len(tensor) % samples:
        return tensor
    blocks = len(tensor) // samples
    if any(one.batch.shape != (blocks * one.size, *tensor.shape[1:]) for one in wholes):
        return None
    parts = [one.batch.unflatten(0, (blocks, one.size))[:, one.start : one.stop] for one in wholes]
    return torch.cat(parts, 1).flatten(0, 1)
