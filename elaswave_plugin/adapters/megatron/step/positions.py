"""The positions of a job's data iterators: each moves on with every call that reads it."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol
from weakref import WeakValueDictionary

from elaswave_plugin.adapters.megatron.step.data import KeyedBatches, served
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.step_state.step_state import Part
from elaswave_plugin.values.set_within import set_within


class HasPosition(Protocol):
    """Something that is read in some order; ``position`` comes next."""

    position: int


class Count:
    """A number that goes on with what is read, and goes back with it."""

    position = 0


class Positions(Part):
    """The global batch that each iterator reads next in training; a part of a step's state.

    Evaluations, and other work between steps, read from the first one on, each time.
    """

    name = "how far the data iterators are"

    def __init__(self) -> None:
        # In the order in which the script makes them, which drops some.
        self._iterators = WeakValueDictionary[int, HasPosition]()
        # Of each, where it was when it was made.
        self._begun: dict[int, int] = {}
        self.made = 0
        """So many were made."""
        self._first = 0
        self.end = 0
        """Where an iterator ends of which each step reads one batch."""
        # In work between steps.
        self._between: dict[int, int] | None = None

    def begin_at(self, batch: int, *, steps: int) -> None:
        """Begin a training of ``steps`` steps at this batch: not at 0 in a resumed run."""
        self._first, self.end = batch, batch + steps
        for number, one in self._iterators.items():
            one.position = self._begun[number] = batch

    def add(self, batches: KeyedBatches) -> KeyedBatches:
        """An iterator of the script's."""
        batches.position = self._first
        self.follow(batches)
        return batches

    def follow(self, iterator: HasPosition) -> None:
        """One more, from where it is on."""
        self._iterators[self.made] = iterator
        self._begun = {one: at for one, at in self._begun.items() if one in self._iterators}
        self._begun[self.made] = iterator.position
        self.made += 1

    def take(self, data_iterator: Any) -> dict[int, int]:
        """The global batch that a call reads, by id of the iterator; they go on.

        ``data_iterator``: one, or one a model chunk, as the call is given it.
        """
        given = data_iterator if isinstance(data_iterator, Sequence) else [data_iterator]
        taken: dict[int, int] = {}
        for one in {id(one): served(one) for one in given}.values():
            if self._between is None:
                taken[id(one)] = one.position
                one.position += 1
            else:
                taken[id(one)] = self._between.get(id(one), 0)
                self._between[id(one)] = taken[id(one)] + 1
        return taken

    def between_steps(self) -> AbstractContextManager[None]:
        """Inside, work between steps reads, from the first batch on."""
        return set_within(self, "_between", {})

    def keep(self) -> dict[int, int]:
        """Of each iterator, by its number in the order in which the script has made them."""
        return {number: one.position for number, one in self._iterators.items()}

    def put_back(self, kept: Any) -> None:
        """Be there again; one that was made since then begins again."""
        for number, one in self._iterators.items():
            one.position = kept.get(number, self._begun[number])


def first_batch(
    start_step: Any, consumed_samples: Any, *, train_iters: int, global_batch_size: int
) -> int:
    """The global batch that the first step of a run reads.

    Raises ConfigurationError for a step or a number of samples that no such run begins at.
    """
    if not _is_count(start_step) or start_step > train_iters:
        raise ConfigurationError(
            f"job.bind got start_step={start_step!r}, wanted a step from 0 to train_iters, which is"
            f" {train_iters}: give it the number of steps that the checkpoint has behind it"
        )
    if consumed_samples is None:
        return int(start_step)
    if not _is_count(consumed_samples) or consumed_samples % global_batch_size:
        raise ConfigurationError(
            f"job.bind got consumed_samples={consumed_samples!r}, wanted a multiple of the global"
            f" batch of {global_batch_size} samples: go on at the start of a batch, or leave it out"
        )
    return int(consumed_samples) // global_batch_size


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
