"""A loader of the script's own (--dataloader-type external), by the micro-batches of a step.

Such a loader is a stream that nobody can read at a place: each replica has its own, and what a lost
replica would have read next is not known. A micro-batch of it is read from the stream of whoever
runs it. While all stages are whole, each replica of a stage has a stream of its own, alike on all
stages; after a loss, stages run a micro-batch on other replicas, and one worker reads it for all of
them. What was read for a step is kept until the one after it is done, so that a redone step has the
same batches.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.recovery.worker import Worker
from elaswave_plugin.step_state.moved_state import receive, send
from elaswave_plugin.values.plain import gathered

OnBatch = Callable[[int, Sequence[int]], None]


class ExternalLoader:
    """The stream of one replica; ``position``: samples consumed before the present batch."""

    def __init__(
        self,
        stream: Any,
        position: int,
        *,
        replica: int,
        num_replicas: int,
        micro_batch_size: int,
        on_batch: OnBatch,
    ) -> None:
        """``stream``: what the script gave; None where it reads nothing.

        ``on_batch(micro-batch, numbers of samples)`` is told of each before it is used.
        """
        self._stream = stream
        self.position = position
        self.replica = replica
        self.num_replicas = num_replicas
        self.was_read = False
        self._size = micro_batch_size
        self._on_batch = on_batch
        # By position and micro-batch: of the present batch, and of the one before.
        self._read: dict[int, dict[int, Any]] = {}
        self._num_microbatches = 0
        self._queue: Iterator[int] = iter(())

    @property
    def has_stream(self) -> bool:
        """Return whether the script made a loader here."""
        return self._stream is not None

    def __iter__(self) -> "ExternalLoader":
        return self

    def __getattr__(self, name: str) -> Any:
        """Return what else the script's loader can do, such as saving its state."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._stream, name)

    def begin(self, num_microbatches: int) -> None:
        """So many micro-batches of all replicas are the present batch."""
        self._num_microbatches = num_microbatches

    def deliver(self, microbatch: int) -> None:
        """The next one read is this micro-batch of the present batch."""
        self._queue = iter((microbatch,))

    def advance(self, samples: int) -> None:
        """The present batch, of so many samples, is done."""
        for before in [one for one in self._read if one < self.position]:
            del self._read[before]
        self.position += samples

    def __next__(self) -> Any:
        """The micro-batch that was asked for; raises ConfigurationError where nothing is read."""
        microbatch = next(self._queue)
        first = self.position + microbatch * self._size
        self._on_batch(microbatch, range(first, first + self._size))
        return self.read(microbatch)

    def read(self, microbatch: int) -> Any:
        """Read a micro-batch of the present batch, or find what was read of it."""
        self.keep_pace()
        read = self._read.setdefault(self.position, {})
        if microbatch not in read:
            read[microbatch] = next(self._present_stream())
        return read[microbatch]

    def keep_pace(self) -> None:
        """Read the own micro-batches of the present batch, in order, whether they are run or not.

        What comes from where so does not depend on when a loss struck.
        """
        if self._stream is None or self.position in self._read:
            return
        own = range(self.replica, self._num_microbatches, self.num_replicas)
        self.was_read = True
        self._read[self.position] = {microbatch: next(self._stream) for microbatch in own}

    def take(self, microbatch: int, batch: Any) -> None:
        """Have what another worker has read of the present batch, in place of what is here."""
        self._read.setdefault(self.position, {})[microbatch] = batch

    def _present_stream(self) -> Any:
        if self._stream is None:
            raise ConfigurationError(
                "a worker that has no loader of the script's was to read a micro-batch after a "
                "loss: have the datasets provider return its loaders on every worker whose "
                "tensor-parallel rank is 0"
            )
        return self._stream


def share_batches(
    loaders: Sequence[ExternalLoader], runs: Sequence[tuple[int, int]], worker: Worker
) -> None:
    """Have every worker hold the micro-batches that it runs; collective over WORLD.

    ``loaders``: of the call, one a model chunk; ``runs``: each micro-batch with the slots that read
    it, in one order everywhere. Raises ConfigurationError where no loader is left.
    """
    own = next((one for one in loaders if one.was_read), loaders[0])
    readers = _readers(own, worker, num_microbatches=1 + max(microbatch for microbatch, _ in runs))
    own.keep_pace()
    for microbatch, slot in sorted(runs):
        reader = readers[microbatch]
        if worker.slot not in (reader, slot):
            continue
        if reader != slot == worker.slot:
            batch = receive(worker.ranks.index(reader))
        else:
            batch = own.read(microbatch)
        if reader != slot and worker.slot == reader:
            send(batch, worker.ranks.index(slot))
        else:
            for loader in loaders:
                loader.take(microbatch, batch)


def _readers(own: ExternalLoader, worker: Worker, *, num_microbatches: int) -> Sequence[int]:
    """The slot that reads each micro-batch: of its replica, or else any that has a stream."""
    told = gathered([own.has_stream, own.was_read, own.replica])
    rows = dict(zip(worker.ranks, told, strict=True))
    # The streams of stages that read nothing are behind.
    having = [slot for slot, (has, read, _) in rows.items() if has and read]
    having = having or [slot for slot, (has, _, _) in rows.items() if has]
    if not having:
        raise ConfigurationError(
            "no worker is left that has a loader of the script's: have the datasets provider "
            "return its loaders on every worker whose tensor-parallel rank is 0"
        )
    of_replica = {rows[slot][2]: slot for slot in reversed(having)}
    return [
        of_replica.get(number % own.num_replicas, having[number % len(having)])
        for number in range(num_microbatches)
    ]
