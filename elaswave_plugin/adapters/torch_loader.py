"""Reads a torch DataLoader's settings, for the loader that takes its place."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from elaswave_plugin.errors import ConfigurationError


class Batches(NamedTuple):
    """A dataset, and what is drawn from it; ``seed`` is None where the loader names none.

    ``sampler``: the DistributedSampler whose ``set_epoch`` says how an epoch is shuffled.
    """

    dataset: Any
    collate_fn: Any
    shuffle: bool
    seed: int | None
    drop_last: bool
    sampler: "DistributedSampler[Any] | None"


def no_places(dataset: Any, *, named: str) -> str | None:
    """Return the sentence that refuses a dataset whose samples have no places; None for others."""
    is_mapped = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    # Torch's iterable ones have __getitem__ too, which raises, and some have a length.
    if is_mapped and not isinstance(dataset, IterableDataset):
        return None
    return (
        f"{named} is a {type(dataset).__name__}, wanted one with __getitem__ and __len__: the"
        " worker that redoes a step has to read its samples again"
    )


def batches_of(
    loader: Any, *, micro_batch_size: int, named: str = "train_micro_batch_size_per_gpu"
) -> Batches:
    """Raises ConfigurationError for a DataLoader whose batches are others than ours would be.

    ``named``: what the framework calls the size of a micro-batch.
    """
    for problem in _problems(loader, micro_batch_size, named):
        raise ConfigurationError(problem)
    sampler = loader.batch_sampler.sampler
    is_distributed = isinstance(sampler, DistributedSampler)
    return Batches(
        dataset=loader.dataset,
        collate_fn=loader.collate_fn,
        shuffle=sampler.shuffle if is_distributed else isinstance(sampler, RandomSampler),
        seed=sampler.seed if is_distributed else None,
        drop_last=loader.batch_sampler.drop_last,
        sampler=sampler if is_distributed else None,
    )


def _problems(loader: Any, micro_batch_size: int, named: str) -> Iterator[str]:
    dataset = loader.dataset
    problem = no_places(dataset, named="the DataLoader's dataset")
    if problem is not None:
        yield problem
    batches, size = loader.batch_sampler, len(dataset)
    # With a batch sampler of its own a DataLoader's other attributes say nothing.
    sampler: Any = batches.sampler if type(batches) is BatchSampler else batches
    if type(sampler) not in (SequentialSampler, RandomSampler, DistributedSampler):
        yield (
            f"the DataLoader draws from a {type(sampler).__name__}, wanted a RandomSampler or"
            " SequentialSampler (shuffle=True or False), or a DistributedSampler: the worker that"
            " redoes a step has to draw its samples again; choose samples in the dataset"
        )
    if batches.batch_size != micro_batch_size:
        yield (
            f"the DataLoader's batch_size is {batches.batch_size} and {named} is"
            f" {micro_batch_size}; make them equal"
        )
    draws = sampler.num_samples if isinstance(sampler, RandomSampler) else size
    if draws != size or getattr(sampler, "replacement", False):
        yield (
            f"the DataLoader draws {draws} of {size} samples, or some of them twice; leave"
            " replacement and num_samples of its RandomSampler out"
        )
    if getattr(sampler, "drop_last", False) and size % sampler.num_replicas:
        yield (
            f"drop_last is set in the DistributedSampler, and {size} samples do not divide by"
            f" {sampler.num_replicas} workers, which DeepSpeed fills up; leave it out"
        )
