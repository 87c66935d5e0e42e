"""A stream of samples, of which every worker reads all and keeps what a step may need again.

Natively one process reads a stream for all (Accelerate's dispatcher), and its loss would lose the
place. Here every worker counts the samples: the place is a number, and one that comes back goes
there by the stream's own state, where it has one (`state_dict`, `load_state_dict`), or reads.
"""

import base64
import copy
import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy
import torch
from accelerate.data_loader import DataLoaderDispatcher, IterableDatasetShard
from torch.utils.data import IterableDataset

from elaswave_plugin.errors import ConfigurationError
from elaswave_plugin.values.plain import decode, encode, row_of

# A recovery goes back to the present update or the last one.
_REMEMBERED_UPDATES = 2
# Every agent keeps the state of a stream; a longer one is not worth it.
_LONGEST_STATE = 1 << 16


class Told(NamedTuple):
    """A place for one that comes later, as JSON has it.

    ``state``: that of the stream there, as values/plain.py writes it, or nothing; ``digest``: of
    the step that begins there.
    """

    epoch: int
    place: int
    digest: int
    state: str


class _Pass:
    """One pass over a stream: the samples that may be needed again, by their place in it."""

    def __init__(self, stream: Any, *, update: int, keeps_states: bool) -> None:
        """``update``: samples of a step; ``keeps_states``: those of the stream before each step."""
        self._stream = stream
        self._iterator: Iterator[Any] = iter(stream)
        self._update = update
        self._keeps_states = keeps_states and _has_state(stream)
        self.states: dict[int, Any] = {}
        self.samples: dict[int, Any] = {}
        # As they were read: a collator may change what it is given.
        self.digests: dict[int, bytes] = {}
        self.read = self._kept_from = 0
        # Known once the stream has ended.
        self.length: int | None = None

    def has_forgotten(self, place: int) -> bool:
        """Return whether a place that was read is not kept any more."""
        return self._update <= place < self._kept_from

    def read_to(self, stop: int) -> None:
        """Read up to a place, or the end.

        Kept are the last updates, and the front, from which the last update is filled up.
        """
        while self.read < stop and self.length is None:
            if self._keeps_states and self.read % self._update == 0:
                self.states[self.read] = copy.deepcopy(self._stream.state_dict())
            try:
                sample = next(self._iterator)
            except StopIteration:
                self.length = self.read
                return
            digest = hashlib.blake2b(digest_size=8)
            _hash(sample, digest.update)
            self.samples[self.read], self.digests[self.read] = sample, digest.digest()
            self.read += 1
            first = self.read - (_REMEMBERED_UPDATES + 1) * self._update
            for place in range(max(self._kept_from, self._update), first):
                del self.samples[place], self.digests[place]
                self.states.pop(place, None)
            self._kept_from = max(self._kept_from, first)

    def jump(self, place: int, state: Any) -> None:
        """Go on at a place, by the stream's state there."""
        # From the front, the last update is filled up.
        self.read_to(self._update)
        self._stream.load_state_dict(state)
        self._iterator = iter(self._stream)
        self.read = self._kept_from = place


class StreamOrder:
    """The samples of a stream by their place in it, dealt out as Accelerate does.

    An iteration takes the next samples for all workers of the launch, one worker's after the
    other's. What the last update of an epoch lacks is taken from the front of the stream. It is the
    dataset of its own items.
    """

    def __init__(
        self,
        stream: Any,
        *,
        num_samples: int,
        width: int,
        fills_up: bool,
        drop_last: bool,
        per_update: int,
        whole_updates: bool,
        keeps_states: bool = False,
    ) -> None:
        """``num_samples``: of all ``width`` workers in an iteration, of ``per_update`` a step.

        ``fills_up``: the last iteration is as large as the others, instead of a multiple of
        ``width``. ``whole_updates``: so is the last step of an epoch, instead of ending early.
        ``keeps_states``: for workers that come later.
        """
        self._stream = stream
        self._num_samples = num_samples
        self._width = width
        self._fills_up = fills_up
        self._drop_last = drop_last
        self._per_update = per_update
        self._keeps_states = keeps_states
        # The state before the first pass, to which a stream goes back that was given another one.
        self._initial: tuple[Any] | None = None
        self._multiple = per_update if whole_updates else 1
        # The fewest samples that an iteration reads.
        self._least = num_samples if drop_last else 1
        self._numbers: dict[int, int] = {}
        # The present pass and the one before it, by epoch.
        self._passes: dict[int, _Pass] = {}
        self._here: _Pass | None = None

    def iterations_of(self, epoch: int) -> int:
        """Iterations of an epoch, as far as its end is known."""
        there = self._passes.get(epoch)
        if there is None or there.length is None:
            return sys.maxsize
        whole, rest = divmod(there.length, self._num_samples)
        made = whole if self._drop_last else whole + bool(rest)
        return -(-made // self._multiple) * self._multiple

    @property
    def fewest_samples(self) -> int:
        """Samples of the smallest iteration that a stream may have."""
        return self._num_samples if self._fills_up or self._drop_last else self._width

    def set_epoch(self, epoch: int, number: int) -> None:
        """Set the number that the stream is told for an epoch."""
        self._numbers[epoch] = number

    def items(self, epoch: int, iteration: int) -> list[int]:
        """The places of all samples of an iteration; none behind the end of an epoch."""
        first = iteration * self._num_samples
        stop = first + self._num_samples
        here = self.be_at(epoch, first)
        # What comes behind tells whether it is the last one.
        here.read_to(stop + self._least)
        if here.length is None:
            return [*range(first, stop)]
        if iteration >= self.iterations_of(epoch):
            return []
        if first < here.length < stop and not self._fills_up:
            stop = first + -(-(here.length - first) // self._width) * self._width
        return [place % here.length for place in range(first, stop)]

    def ends_before(self, epoch: int, iteration: int) -> bool:
        """Return whether an epoch ends before an iteration."""
        first = iteration * self._num_samples
        self.be_at(epoch, first).read_to(first + self._least)
        return iteration >= self.iterations_of(epoch)

    def be_at(self, epoch: int, place: int) -> _Pass:
        """Have read up to a place of an epoch, from its beginning where that is behind."""
        here = self._passes.get(epoch)
        if here is None or here.has_forgotten(place):
            if self._initial is not None:
                self._stream.load_state_dict(copy.deepcopy(self._initial[0]))
            number = self._numbers.get(epoch, epoch)
            if hasattr(self._stream, "set_epoch"):
                self._stream.set_epoch(number)
            elif self._generator is not None:
                # As Accelerate does, and the Trainer's page on iterable datasets says.
                self._generator.manual_seed(number)
            here = _Pass(self._stream, update=self._update, keeps_states=self._keeps_states)
            self._passes = {
                number: one for number, one in self._passes.items() if number == epoch - 1
            }
            self._passes[epoch] = here
        here.read_to(place)
        self._here = here
        return here

    @property
    def _generator(self) -> torch.Generator | None:
        """The generator by which a stream shuffles its passes, if it has one."""
        found = getattr(self._stream, "generator", None)
        return found if isinstance(found, torch.Generator) else None

    def go_to(self, epoch: int) -> None:
        """Be where an epoch begins, which may follow from what the stream drew before.

        A stream that is told the number of its pass is there at once.
        """
        if hasattr(self._stream, "set_epoch") or self._generator is not None:
            return
        for number in range(epoch):
            self.be_at(number, 0).read_to(sys.maxsize)

    @property
    def _update(self) -> int:
        """Samples of a step."""
        return self._per_update * self._num_samples

    def tell(self, epoch: int, iteration: int) -> Told:
        """Return a place for one that comes later, where the others are in a step at an iteration.

        It is that of the step before, to which they may go back.
        """
        first = max(0, iteration - self._per_update)
        place, states = first * self._num_samples, self._passes[epoch].states
        if not place or place not in states:
            return Told(epoch, place, 0, "")
        return Told(epoch, place, self.digest(first, self._per_update), _as_text(states[place]))

    def take_up(self, told: Told) -> None:
        """Be where the others lately were; read from the front where the state leads elsewhere."""
        if told.state and _has_state(self._stream):
            self._initial = (copy.deepcopy(self._stream.state_dict()),)
            here = self.be_at(told.epoch, 0)
            here.jump(told.place, decode(base64.b64decode(told.state), "the state of the stream"))
            here.read_to(told.place + self._update)
            if self.digest(told.place // self._num_samples, self._per_update) != told.digest:
                # Streams that shuffle in a buffer do not keep what is in it.
                del self._passes[told.epoch]
        self.be_at(told.epoch, told.place)

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, item: int) -> Any:
        assert self._here is not None
        # A redo needs it again, as it was.
        return copy.deepcopy(self._here.samples[item])

    def digest(self, first: int, count: int) -> int:
        """A number of 62 bits by which workers compare iterations of the epoch read last."""
        assert self._here is not None
        found = hashlib.blake2b(digest_size=8)
        length = self._here.length or sys.maxsize
        for place in range(first * self._num_samples, (first + count) * self._num_samples):
            found.update(self._here.digests.get(place % length, b""))
        return int.from_bytes(found.digest(), "little") >> 2


def _has_state(stream: Any) -> bool:
    """Return whether a stream can tell where it is, and go there."""
    return hasattr(stream, "state_dict") and hasattr(stream, "load_state_dict")


def _as_text(state: Any) -> str:
    """Return a state as JSON has it; nothing for one that is too long, or of unknown classes."""
    try:
        text = base64.b64encode(encode(state)).decode()
    except ConfigurationError:
        return ""
    return text if len(text) <= _LONGEST_STATE else ""


def _hash(value: Any, update: Callable[[bytes], None]) -> None:
    """Hash numbers, texts and tensors; what is something else, by its type."""
    if isinstance(value, Mapping):
        for key in value:
            _hash(key, update)
            _hash(value[key], update)
    elif isinstance(value, list | tuple):
        for one in value:
            _hash(one, update)
    elif isinstance(value, torch.Tensor):
        update(row_of(value.cpu()).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, numpy.ndarray) and not value.dtype.hasobject:
        update(value.tobytes())
    elif isinstance(value, str | bytes | int | float | None):
        update(repr(value).encode())
    else:
        update(type(value).__name__.encode())


def stream_of(loader: Any, width: int) -> tuple[Any, int, bool, bool]:
    """Stream, batch size of a worker, whether the last iteration is filled up, or dropped.

    Raises ConfigurationError where the workers would read different streams.
    """
    if isinstance(loader, DataLoaderDispatcher):
        if loader.split_batches:
            raise ConfigurationError(
                "split_batches is True in Accelerate, and a batch cannot be split evenly after a "
                "loss; set it to False and divide the batch size by the processes"
            )
        return loader.dataset, loader.batch_size, False, bool(loader._drop_last)
    dealt = loader.dataset
    if isinstance(dealt, IterableDatasetShard) and not dealt.split_batches:
        return dealt.dataset, dealt.batch_size, True, bool(dealt.drop_last)
    if width == 1:
        return dealt, loader.batch_size, True, bool(loader.drop_last)
    raise ConfigurationError(
        f"dispatch_batches is False in Accelerate, so that each process reads other parts of the"
        f" stream ({type(dealt).__name__}), and those of a lost one would be left out; leave"
        " dispatch_batches out"
    )


def is_stream(loader: Any) -> bool:
    """Return whether a prepared loader has a dataset without places."""
    return isinstance(loader.dataset, IterableDataset)
