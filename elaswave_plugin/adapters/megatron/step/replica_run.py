"""A copy of a script's iterator, run for one replica from its beginning.

Its loaders draw the indices of each batch. The samples are read where the batch is used: the
iterator is given an ``Unread`` in its place, unless it does something with its batches.
"""

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import chain, islice
from typing import Any, NoReturn

from torch.utils import _pytree
from torch.utils.data import DataLoader

from elaswave_plugin.adapters.host_draws import host_states, seed_host, set_host, undone_numbers
from elaswave_plugin.adapters.megatron.step.loader_source import Request
from elaswave_plugin.adapters.megatron.step.made_again import Original
from elaswave_plugin.adapters.read_ahead import Requested
from elaswave_plugin.core.step.rng import draw_key
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.values.set_within import set_within


class ReplicaRun:
    """The items of a replica, by number."""

    def __init__(self, original: Original, *, replica: int, key: int, reads: bool) -> None:
        """``key``: of all that is drawn, except by a sampler with a seed of its own.

        ``reads``: whether the iterator is given batches that are read.
        """
        self.replica = replica
        self.next = 0
        """The item that comes next."""
        self.known: dict[int, Any] = {}
        self.remembered = 1
        """The number of items before that which are kept."""
        self._original, self._key, self._reads = original, key, reads
        self._passes = 0
        # Whether the iterator has done something with an `Unread`.
        self._is_touched = False
        self._iterator: Iterator[Any] | None = None
        self._states: Any = None
        self._thread = threading.get_ident()

    def reach(self, number: int, passed: Callable[[], object]) -> bool:
        """Go on until an item is known; False where the last one is before it.

        ``passed()`` is called for each other one on the way. Raises TypeError where the iterator
        has to be given batches that are read, and what it raises itself.
        """
        end = object()
        with self._drawing(), _other_loaders_refused():
            if self._iterator is None:
                self._iterator = self._original.made(self)
            while self.next <= number:
                item = next(self._iterator, end)
                if self._is_touched:
                    raise TypeError("the iterator did something with a batch that is not read")
                if item is end:
                    return False
                if not self._passes:
                    raise ConfigurationError(
                        f"data_iterator is a {self._original.name} whose first batch comes from no"
                        " DataLoader that it was made of, so that a lost worker's are gone: give"
                        " the loader to it"
                    )
                if self.next > number - self.remembered:
                    self.known[self.next] = self._kept(item)
                self.known.pop(self.next - self.remembered, None)
                self.next += 1
                if self.next <= number:
                    passed()
        return True

    def close(self) -> None:
        """Let go of the iterator, which holds this run, and so of its loaders' processes.

        torch's DataLoader waits five seconds for each of them where Python's collection of cycles
        finds it: the pipes that would tell them may be closed by then (torch 2.13).
        """
        self._iterator = None

    def _kept(self, item: Any) -> Any:
        """Return what to keep of an item, which the iterator may change later."""
        if self._reads:
            return copy.deepcopy(item)
        kinds = {type(one) for one in _pytree.tree_leaves(item)}
        if Unread not in kinds or not kinds <= {Unread, bool, int, float, str, type(None)}:
            raise TypeError("the iterator makes other batches of what it is given")
        return _pytree.tree_map_only(Unread, _request_of, item)

    def batches(self, source: int, sampler: Any) -> Iterator[Any]:
        """Pass over a loader once, in the order of ``sampler``."""
        if threading.get_ident() != self._thread:
            raise ConfigurationError(
                "data_iterator reads its DataLoader in a thread, whose draws would come in between"
                " those of the training: leave that to the DataLoader's num_workers"
            )
        self._passes += 1
        requests = self._requests(source, sampler, draw_key(self._key, self._passes))
        if self._reads:
            return self._original.sources[source].read_all(requests)
        return map(partial(Unread, self), requests)

    def _requests(self, source: int, sampler: Any, key: int) -> Iterator[Request]:
        coming = iter(sampler)
        with undone_numbers():
            # A shuffled order is drawn here.
            seed_host(key)
            first = [*islice(coming, 1)]
        for number, indices in enumerate(chain(first, coming)):
            yield Request(source, draw_key(key, number), copy.copy(indices))

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        """Have what the iterator itself draws follow from the replica and its items alone."""
        with undone_numbers():
            if self._states is None:
                seed_host(self._key)
            else:
                set_host(self._states)
            yield
            self._states = host_states()


class Unread:
    """A batch that an iterator passes on; doing anything else with it raises TypeError."""

    __slots__ = ("_request", "_run")

    def __init__(self, run: ReplicaRun, request: Request) -> None:
        object.__setattr__(self, "_run", run)
        object.__setattr__(self, "_request", request)

    def _touched(self, *_: Any, **__: Any) -> NoReturn:
        object.__getattribute__(self, "_run")._is_touched = True
        raise TypeError("a batch that is not read yet")

    __getattribute__ = __setattr__ = __getitem__ = __setitem__ = __contains__ = _touched
    __iter__ = __len__ = __bool__ = __eq__ = __hash__ = __call__ = _touched
    __repr__ = __str__ = __format__ = _touched


def _request_of(unread: Unread) -> Request:
    """Return what reads the batch."""
    return object.__getattribute__(unread, "_request")


def _other_loaders_refused() -> AbstractContextManager[None]:
    """Inside, raise ConfigurationError for a loader that is not the copy's."""

    def refuse(self: Any) -> Any:
        if isinstance(self.dataset, Requested) or threading.get_ident() != thread:
            return native(self)
        raise ConfigurationError(
            "data_iterator reads a DataLoader that it finds neither in its arguments nor in a"
            " variable that it names, so that a lost worker's batches are gone: give the loader to"
            " the generator"
        )

    native, thread = DataLoader.__iter__, threading.get_ident()
    return set_within(DataLoader, "__iter__", refuse)
