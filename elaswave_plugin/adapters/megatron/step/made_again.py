"""Makes an iterator again that nothing was read from, once for each replica of the launch.

An iterator is what it was made of: a generator its function and what that was given, a ``map`` its
function and what lies below, down to DataLoaders. These pieces are copied in the memory of this
process. What has no place in the data (functions, modules, tensors, datasets) is the same object in
each copy; a sampler names the replica that the copy is for; the batches of a DataLoader come from
the copy's run.
"""

import hashlib
import inspect
import io
import pickle
import warnings
from collections.abc import Collection, Iterator
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from elaswave_plugin.adapters.megatron.step import copied
from elaswave_plugin.adapters.megatron.step.loader_source import Source
from elaswave_plugin.adapters.megatron.step.replica_sampler import (
    ADVICE,
    drawing,
    replica_name,
)
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.values.plain import bytes_of

# What is larger is not taken apart again in each step.
_CHECKED_BYTES = 1 << 16


class InMemory(Exception):
    """An iterator's batches are in memory: it reads no DataLoader that it is made of."""


class Original:
    """An iterator as the script has given it, and what it is made of."""

    def __init__(self, iterator: Any, *, mine: Collection[int], num_replicas: int) -> None:
        """``mine``: the replicas that it may be of.

        Raises InMemory for one that reads no DataLoader, ConfigurationError for one that cannot be
        made again.
        """
        self.name = type(iterator).__name__
        self._mine, self._num_replicas = mine, num_replicas
        if _is_pass(iterator) and iterator._persistent_workers:
            raise ConfigurationError(
                "the DataLoader's persistent_workers is True, with which the iterators of all"
                " epochs are one object: leave it out"
            )
        try:
            # Once more, as a sampler or a dataset may have come before the loader that says so.
            self._taken = self._take(iterator, self._take(iterator, None))
        except ConfigurationError:
            raise
        except _Begun:
            raise self._gone("something was read from it before") from None
        except Exception as error:  # a script's own objects may raise anything
            why = f"what it is made of cannot be copied: {error}"
            raise self._gone(why) from error
        if not self._taken.sources:
            raise InMemory
        self.begun = _read_of(iterator)
        """So many batches were read of it, of one of those that may have begun."""

    def _take(self, iterator: Any, known: "_Taker | None") -> "_Taker":
        taker = _Taker(known, iterator, mine=self._mine, num_replicas=self._num_replicas)
        with warnings.catch_warnings():
            # Of itertools, which Python 3.14 does not take apart any more.
            warnings.simplefilter("ignore", DeprecationWarning)
            taker.dump(iterator)
        taker.forget()
        return taker

    def _gone(self, why: str) -> ConfigurationError:
        return ConfigurationError(
            f"data_iterator is a {self.name}, of which a lost worker's batches are gone ({why}):"
            f" {ADVICE}"
        )

    @property
    def sources(self) -> list[Source]:
        """The datasets that its loaders read, by number."""
        return self._taken.sources

    def digests(self, iterator: Any) -> dict[str, str]:
        """Return digests of what it is made of, by name; they are the same for each replica."""
        found = {"": self._taken.digest()}
        if inspect.isgenerator(iterator):
            local: dict[str, Any] = inspect.getgeneratorlocals(iterator)
            found |= {name: self._take(one, self._taken).digest() for name, one in local.items()}
        return found

    def shares(self, other: "Original") -> bool:
        """Return whether both read one iterator of the script's."""
        mine, others = ({id(one()) for one in two._taken.below if one()} for two in (self, other))
        return not mine.isdisjoint(others)

    def check(self, iterator: Any) -> None:
        """Raise ConfigurationError where the script has changed what it is made of, or read it."""
        taken = self._taken.taken()
        was_read = any(_read_of(one()) > self.begun for one in self._taken.below)
        if was_read:
            raise ConfigurationError(
                "the script reads from an iterator between calls of forward_backward that it gives"
                " to these, so that a loss would take others for its batches: make an iterator of"
                " its own for each"
            )
        # Where that would take long it is left out, and so it is of an iterator that has begun.
        is_small = len(taken) <= _CHECKED_BYTES and not _is_pass(iterator)
        if is_small and self._take(iterator, self._taken).taken() != taken:
            raise ConfigurationError(
                f"the script changes what data_iterator, a {self.name}, is made of (a variable, an"
                " attribute, the epoch of a sampler), and who runs the micro-batches of a lost"
                " worker cannot know when that was: change it in the generator"
            )

    def made(self, run: copied.Run) -> Iterator[Any]:
        """Make it again, for a run."""
        return _Maker(self._taken, run).load()


def _is_pass(iterator: Any) -> bool:
    return isinstance(iterator, _BaseDataLoaderIter)


def _read_of(iterator: Any) -> int:
    """Count what was read of a loader's iterator; 1 for a generator that has begun."""
    if inspect.isgenerator(iterator):
        return int(inspect.getgeneratorstate(iterator) != inspect.GEN_CREATED)
    return iterator._num_yielded if _is_pass(iterator) else 0


class _Begun(Exception):
    """Something was read from an iterator."""


class _Taker(pickle.Pickler):
    """Takes an iterator apart; ``known``: one that has done so before."""

    def __init__(
        self, known: "_Taker | None", top: Any, *, mine: Collection[int], num_replicas: int
    ) -> None:
        self._file = io.BytesIO()
        super().__init__(self._file, pickle.HIGHEST_PROTOCOL)
        self._top, self._mine, self._num_replicas = top, mine, num_replicas
        # By id: samplers that draw for a replica, and what each copy has in common.
        self._samplers: dict[int, str] = known._samplers if known else {}
        self._common: set[int] = known._common if known else set()
        self.sources: list[Source] = []
        self.alike: list[Any] = []
        # Iterators of which nothing may be read.
        self.below: list[ref[Any]] = []

    def taken(self) -> bytes:
        return self._file.getvalue()

    def digest(self) -> str:
        digest = hashlib.sha256(self.taken())
        for one in self.alike:
            tensor = torch.from_numpy(one) if isinstance(one, np.ndarray) else one
            if isinstance(tensor, torch.Tensor):
                digest.update(bytes_of(tensor.cpu()))
        return digest.hexdigest()

    def forget(self) -> None:
        """Refer no more to what was taken apart, which the script may drop."""
        self.clear_memo()
        self._top = None

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, copied.Own):
            return value.name
        if id(value) not in self._common and not copied.is_common(value):
            return None
        self.alike.append(value)
        return len(self.alike) - 1

    def reducer_override(self, value: Any) -> Any:
        if inspect.isgenerator(value):
            return self._generator(value)
        if _is_pass(value):
            return self._pass(value)
        if isinstance(value, DataLoader):
            return self._loader(value)
        if isinstance(value, Sampler):
            self._share(getattr(value, "dataset", None), getattr(value, "data_source", None))
        if id(value) in self._samplers:
            own = {self._samplers[id(value)]: copied.Own.REPLICA}
            return copied.of_class, (type(value),), {**vars(value), **own}
        return NotImplemented

    def _generator(self, value: Any) -> tuple[Any, ...]:
        if _read_of(value):
            raise _Begun
        self.below.append(ref(value))
        around = value.gi_frame.f_globals
        self._share(around)
        named = {one: around[one] for one in copied.globals_of(value.gi_code) if one in around}
        local = dict(value.gi_frame.f_locals)
        return copied.generator, (value.gi_code, around, named, local)

    def _pass(self, value: Any) -> tuple[Any, ...]:
        if _read_of(value) and value is not self._top:
            raise _Begun
        self.below.append(ref(value))
        number = self._add(value, value._dataset, value._collate_fn)
        return copied.one_pass, (copied.Own.RUN, number, value._index_sampler)

    def _loader(self, value: Any) -> tuple[Any, ...]:
        number = self._add(value, value.dataset, value.collate_fn)
        self._share(value.worker_init_fn, value.multiprocessing_context, value.generator)
        own = {"_iterator": None, copied.RUN: copied.Own.RUN, copied.SOURCE: number}
        return copied.loader, (type(value),), {**vars(value), **own}

    def _add(self, loader: Any, dataset: Any, collate: Any) -> int:
        self._share(dataset, collate)
        sampler = drawing(loader._index_sampler)
        name = replica_name(sampler, mine=self._mine, num_replicas=self._num_replicas)
        if name is not None:
            self._samplers[id(sampler)] = name
        self.sources.append(Source(loader, dataset, collate))
        return len(self.sources) - 1

    def _share(self, *objects: Any) -> None:
        self._common.update(id(one) for one in objects if one is not None)


class _Maker(pickle.Unpickler):
    """Puts the pieces together for a run."""

    def __init__(self, taken: _Taker, run: copied.Run) -> None:
        super().__init__(io.BytesIO(taken.taken()))
        self._alike = taken.alike
        self._own = {copied.Own.RUN.name: run, copied.Own.REPLICA.name: run.replica}

    def persistent_load(self, pid: Any) -> Any:
        return self._own[pid] if isinstance(pid, str) else self._alike[pid]
