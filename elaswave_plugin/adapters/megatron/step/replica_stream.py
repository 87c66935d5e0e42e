"""The batches of every replica, from an iterator over DataLoaders that one of them was given."""

import copy
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch.utils import _pytree

from elaswave_plugin.adapters.megatron.step.loader_source import Request, Source
from elaswave_plugin.adapters.megatron.step.made_again import Original
from elaswave_plugin.adapters.megatron.step.replica_run import ReplicaRun
from elaswave_plugin.adapters.read_ahead import Key, ReadAhead
from elaswave_plugin.around import around
from elaswave_plugin.core.step.rng import draw_key
from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.values.plain import gathered

# Items that are kept of each replica, where they are not read.
_REMEMBERED = 1024
# Calls behind which a replica that none of them has read is forgotten.
_UNUSED = 8


class ReplicaStream:
    """The items of an iterator, and of those that the other replicas were given."""

    def __init__(
        self,
        original: Original,
        *,
        digests: dict[str, str],
        number: int,
        seed: int,
        life: Callable[[], int],
        passed: Callable[[], object],
    ) -> None:
        """``original``: of the script's ``number``-th iterator; ``digests``: of its pieces.

        ``seed``: of what the dataset draws, and of a shuffled order that names none; ``life()``: of
        the workers' view; ``passed()`` is called for each item that a copy passes over.
        """
        self.original = original
        """What its copies are made of."""
        self.position = original.begun
        """The batch of each replica that comes next."""
        self._key, self._life, self._passed = draw_key(seed, number), life, passed
        self._digests = digests
        self._agreed: int | None = None
        # Whether a copy does something with its batches.
        self._reads, self._remembered = False, 0
        self._runs: dict[int, ReplicaRun] = {}
        # Calls of `take` so far, and at which of them a replica was read last.
        self._takes, self._used = 0, dict[int, int]()
        # The batch that comes next: the call's first, the replica, and its number in the call.
        self._due: tuple[int, int, int] | None = None
        # Whether a forward step was told that the last one was read.
        self._is_over = False
        settings = max((one.settings for one in original.sources), key=lambda one: one.num_workers)
        read = partial(_read, original.sources)
        self._ahead = ReadAhead(read, self._request, like=settings)

    left_out: frozenset[int] = frozenset()
    """No replica: the batches of each are read."""

    def take(self, count: int) -> int:
        """Take the next ``count`` batches of each replica; returns the first one's number.

        Collective over WORLD. Raises ConfigurationError where the workers have other iterators.
        """
        if self._agreed != (life := self._life()):
            self._compare(gathered(self._digests))
            self._agreed = life
        self._takes, self._is_over = self._takes + 1, False
        for replica in [*self._runs]:
            # Of a rehearsed first step, or before a worker came back; it may have processes.
            if self._takes - self._used[replica] > _UNUSED:
                self._runs.pop(replica).close()
        first = self.position
        self.position += count
        # Of the step before as well.
        self._remembered = max(self._remembered, 2 * count)
        return first

    def _compare(self, told: list[dict[str, str]]) -> None:
        for rank, others in enumerate(told):
            if others == told[0]:
                continue
            names = [one for one in others if one and others[one] != told[0].get(one)]
            what = ", ".join(names) or "a rank, a seed, batches in memory"
            raise ConfigurationError(
                f"data_iterator is a {self.original.name} that is made of other things on rank"
                f" {rank} than on rank 0 ({what}), and who runs the micro-batches of a lost"
                " worker would not know its: give all the same, and have the loader's sampler name"
                " the replica"
            )

    def has(self, first: int, replica: int, number: int) -> bool:
        """Return whether a replica's data go on to its ``number``-th batch from ``first`` on."""
        return self._request(Key(first, (replica, number))) is not None

    def deliver(self, first: int, replica: int, number: int) -> None:
        """The next batch is a replica's ``number``-th of those from ``first`` on."""
        self._due = first, replica, number

    def close(self) -> None:
        """End the processes that read for it."""
        self._forget()
        self._ahead.close()

    def _forget(self) -> None:
        while self._runs:
            self._runs.popitem()[1].close()

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
        found = self._request(key)
        if found is None:
            self._is_over = True
            raise StopIteration
        # The script may change what it is given.
        return copy.deepcopy(found[0]) if self._reads else self._ahead.take(key, found)

    def read_by(self, forward_step: Callable[..., Any]) -> Callable[..., Any]:
        """Return the forward step; raises ConfigurationError where it goes on behind the end."""
        return around(self._until_its_end)(forward_step)

    def _until_its_end(self, forward_step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = forward_step(*args, **kwargs)
        if self._is_over:
            raise ConfigurationError(
                "forward_step goes on where its data_iterator has ended, with a batch from"
                " elsewhere, which is unknown to a worker that runs the micro-batches of a lost"
                " worker: give forward_backward a new iter(loader) once it has made"
                " len(loader) micro-batches, and catch no StopIteration in forward_step"
            )
        return result

    def _request(self, key: Key) -> list[Any] | None:
        """Find the item of a key, with a request for each batch in it; None behind the last."""
        assert isinstance(key.part, tuple)
        replica, number = key.part
        number += key.place
        if not self._reads:
            try:
                return self._found(replica, number)
            except Exception:
                # The iterator does something with its batches; what is its own comes again.
                self._reads = True
                self._forget()
        return self._found(replica, number)

    def _found(self, replica: int, number: int) -> list[Any] | None:
        self._used[replica] = self._takes
        run = self._runs.get(replica)
        if run is None or (number < run.next and number not in run.known):
            if run is not None:
                run.close()
            self._runs[replica] = run = ReplicaRun(
                self.original,
                replica=replica,
                key=draw_key(self._key, replica),
                reads=self._reads,
            )
        run.remembered = self._remembered if self._reads else _REMEMBERED
        return [run.known[number]] if run.reach(number, self._passed) else None


def _read(sources: Sequence[Source], found: list[Any]) -> Any:
    """Read the batches of an item; no method, as spawned processes are given it."""
    return _pytree.tree_map_only(Request, lambda one: sources[one.source].read(one), found[0])


class Streams:
    """The streams of a script's iterators, while it has them."""

    def __init__(self) -> None:
        # None: its batches are in memory.
        self._known: dict[int, tuple[Any, ReplicaStream | None]] = {}

    def knows(self, iterator: Any) -> bool:
        """Return whether an iterator was added."""
        return id(iterator) in self._known

    def of(self, iterator: Any) -> ReplicaStream | None:
        """Find one; raises ConfigurationError where the script has used the iterator by itself."""
        _, stream = self._known.get(id(iterator), (None, None))
        if stream is not None:
            stream.original.check(iterator)
        return stream

    def add(self, iterator: Any, stream: ReplicaStream | None) -> None:
        """Add one; raises ConfigurationError where it goes on with another's."""
        for key in [*self._known]:
            other = self._known[key][1]
            # In the tuple, and as the argument: most iterators cannot be referred to weakly.
            if sys.getrefcount(self._known[key][0]) <= 2:
                del self._known[key]
                if other is not None:
                    other.close()
            elif stream and other and stream.original.shares(other.original):
                raise ConfigurationError(
                    f"data_iterator is a {stream.original.name} that goes on with an iterator which"
                    " an earlier call was given, so that it would begin with the same batches: make"
                    " one for all calls"
                )
        self._known[id(iterator)] = iterator, stream
