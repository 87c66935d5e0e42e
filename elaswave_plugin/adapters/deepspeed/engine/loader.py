"""The loader of an elastic job: the workers that are left read the samples of the step, in shares.

An iteration takes the micro-batches of all workers of the launch, in DeepSpeed's own order
(torch's DistributedSampler: replica d reads every D0-th sample from d on), one replica's after the
other's. While healthy every worker's share is its own replica's micro-batch; after a loss the same
samples are cut into fewer and larger shares.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NoReturn, Protocol

import torch

from elaswave_plugin.adapters.deepspeed.engine.cut_batches import Whole, of_wholes
from elaswave_plugin.adapters.deepspeed.engine.reads import BATCH, ITERATOR, Reads
from elaswave_plugin.adapters.host_draws import host_states, seed_host, undone_numbers
from elaswave_plugin.adapters.read_ahead import Key, ReadAhead
from elaswave_plugin.core.step.rng import draw_key
from elaswave_plugin.errors import ConfigurationError, ElasWaveError

# More iterations than an epoch has, so that places rise from one to the next.
_EPOCH = 1 << 40
# What a collator draws, beside the samples of its micro-batch.
_COLLATED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """A position in the data: epoch, iteration in it, samples that were served before."""

    epoch: int = 0
    iteration: int = 0
    served: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One worker's samples of an iteration: items of the dataset; ids number them over the job."""

    items: tuple[int, ...]
    ids: tuple[int, ...]


class Request(NamedTuple):
    """Items to read, of the iteration at ``place``, from its ``start`` on.

    ``wholes``: the same of each micro-batch of the launch that they are of, where they are no whole
    one.
    """

    place: int
    start: int
    items: tuple[int, ...]
    wholes: tuple["Request", ...] = ()


class Order(Protocol):
    """The order of a dataset over all epochs, alike on every worker."""

    def iterations_of(self, epoch: int) -> int:
        """Iterations of an epoch, as far as its end is known."""

    @property
    def fewest_samples(self) -> int:
        """Samples of the smallest iteration of an epoch."""

    def set_epoch(self, epoch: int, number: int) -> None:
        """Shuffle ``epoch`` of the loader as epoch ``number``."""

    def items(self, epoch: int, iteration: int) -> list[int]:
        """All samples of an iteration, one replica's after the other's; none behind the end."""


class GlobalOrder:
    """The order of a map-style dataset over all epochs, as torch's DistributedSampler has it."""

    def __init__(
        self,
        num_items: int,
        *,
        num_replicas: int,
        micro_batch_size: int,
        shuffle: bool,
        seed: int,
        drop_last: bool,
        reshuffles: bool = False,
    ) -> None:
        """``micro_batch_size``: samples of one replica in an iteration.

        ``reshuffles``: each epoch in another order by itself, as torch's RandomSampler has it.
        """
        if num_items < num_replicas:
            raise ConfigurationError(
                f"the dataset has {num_items} samples, wanted at least {num_replicas}: one a worker"
            )
        self._num_items = num_items
        self._num_replicas = num_replicas
        self._micro_batch_size = micro_batch_size
        self._shuffle = shuffle
        self._seed = seed
        self._per_replica = -(-num_items // num_replicas)
        whole, rest = divmod(self._per_replica, micro_batch_size)
        self._iterations = whole if drop_last else whole + bool(rest)
        self._reshuffles = reshuffles
        # What ``set_epoch`` said, by epoch of the loader; DeepSpeed itself never calls it.
        self._shuffled_as: dict[int, int] = {}
        self._cached: tuple[int, torch.Tensor] | None = None

    @property
    def fewest_samples(self) -> int:
        """Samples of the last iteration."""
        return len(self.items(0, self._iterations - 1))

    def iterations_of(self, epoch: int) -> int:
        """Iterations of any epoch."""
        return self._iterations

    def set_epoch(self, epoch: int, number: int) -> None:
        """Shuffle ``epoch`` of the loader as torch's sampler shuffles epoch ``number``."""
        self._shuffled_as[epoch] = number

    def items(self, epoch: int, iteration: int) -> list[int]:
        """All samples of an iteration, one replica's after the other's."""
        number = epoch if self._reshuffles else 0
        order = self._order(self._shuffled_as.get(epoch, number))
        first = iteration * self._micro_batch_size
        stop = min(first + self._micro_batch_size, self._per_replica)
        columns = order.view(self._per_replica, self._num_replicas)[first:stop]
        return [int(one) for one in columns.t().reshape(-1)]

    def _order(self, number: int) -> torch.Tensor:
        if self._cached is None or self._cached[0] != number:
            order = torch.arange(self._num_items)
            if self._shuffle:
                generator = torch.Generator().manual_seed(self._seed + number)
                order = torch.randperm(self._num_items, generator=generator)
            padding = self._per_replica * self._num_replicas - self._num_items
            self._cached = (number, torch.cat([order, order[:padding]]))
        return self._cached[1]


class Reader(Protocol):
    """The job, as the loader sees it."""

    def next_batch(self, loader: "ElasticLoader") -> Any:
        """The next batch of this worker; StopIteration at the end of the loader's epoch."""


class ElasticLoader:
    """Serves this worker's batches; iterating again begins the next epoch.

    In the script of a worker that comes later, the epochs that the others have behind them are
    empty.
    """

    def __init__(
        self,
        reader: Reader,
        dataset: Any,
        order: Order,
        *,
        collate: Callable[[Sequence[Any]], Any] | None,
        reads: Reads | None = None,
        sampler: "torch.utils.data.DistributedSampler[Any] | None" = None,
        like: "torch.utils.data.DataLoader[Any] | None" = None,
        seed: int = 0,
    ) -> None:
        """``reads``: what the script has asked of it; None where it does not ask by itself.

        ``sampler``: the script's own, whose ``set_epoch`` is followed; ``like``: the script's
        loader, whose processes, if it has any, read ahead; ``seed``: of the job, for draws.
        """
        self.reads = Reads(counts=False) if reads is None else reads
        self._reader = reader
        self.dataset = dataset
        self._order = order
        self._sampler = sampler
        self._collate = collate or torch.utils.data.default_collate
        self._seed = seed
        self._ahead: ReadAhead | None = None
        if like is not None and like.num_workers:
            self._ahead = ReadAhead(self.batch, self._following, like=like)
        self.position = Position()
        self._epoch = -1
        # Where an epoch was left before its end, so that a redo leaves it there again.
        self._left_at: dict[int, int] = {}
        # The iteration with which an epoch begins whose first ones the script skips.
        self._begins_at: dict[int, int] = {}
        self._has_read = False
        # Batches that the script took since it began to iterate, void and skipped ones too, and how
        # it had taken of the last epoch that it left before its end.
        self._taken = 0
        self._usual: int | None = None
        # Told where the script leaves its first epoch, so that nobody knows whether it counts them.
        self.on_void: Callable[[int, int], None] = lambda taken, void: None
        # Places of the launch's micro-batches, by the number of all samples; None: none are cut.
        self.launch: Callable[[int], Sequence[tuple[int, int]]] | None = None
        # Told where a collator draws, and its batches have the shape of no whole micro-batch.
        self.on_collated: Callable[[], None] = lambda: None
        # Told what keys samples of one batch have, where these differ.
        self.on_mixed: Callable[[Sequence[str]], None] = lambda keys: None
        # The epoch that the others iterate over, as far as a worker that comes later knows.
        self.epoch_of_others = 0
        self._has_skipped = False

    def __len__(self) -> int:
        return self._order.iterations_of(max(self._epoch, 0))

    @property
    def at_end(self) -> bool:
        """True if the last batch was the last one of its epoch."""
        return self.position.iteration == self._order.iterations_of(self.position.epoch)

    @property
    def fewest_samples(self) -> int:
        """Samples of the smallest iteration of an epoch."""
        return self._order.fewest_samples

    @property
    def streams(self) -> bool:
        """True if the data has no places: an epoch of it ends where it is read to."""
        return self.dataset is self._order

    def items_at(self, epoch: int, iteration: int) -> list[int]:
        """All samples of an iteration; not of a stream."""
        return self._order.items(epoch, iteration)

    def __iter__(self) -> "ElasticLoader":
        if self._sampler is not None:
            self._order.set_epoch(self._epoch + 1, self._sampler.epoch)
        if self.lagging:
            self._epoch += self._has_skipped
            self._has_skipped = False
            return self
        if self.reads.due == ITERATOR:
            self.took(ITERATOR)
            return self
        here = self._normal(self.position)
        if here.iteration and self._has_read:
            self._left_at[here.epoch] = self._end_of_left(here.iteration)
            self._epoch = max(self._epoch, here.epoch + 1)
        self.position = self._normal(here)
        self._epoch = max(self._epoch, self.position.epoch)
        self._has_read = False
        self.took(ITERATOR)
        return self

    def __next__(self) -> Any:
        return self._reader.next_batch(self)

    def _end_of_left(self, iteration: int) -> int:
        """Return where an epoch ends that the script leaves with ``iteration`` as the next one.

        A script that leaves each after a fixed count has counted batches that a loss made void: it
        is given the rest of them before the next epoch.
        """
        usual, self._usual = self._usual, self._taken
        if usual is None and self._taken > iteration:
            self.on_void(self._taken, self._taken - iteration)
        return iteration if self._taken != usual else max(usual, iteration)

    # ---- a script that is behind another one ----------------------------------------------------

    @property
    def place(self) -> tuple[int, dict[int, int], bool, int | None]:
        """The loader's state beside its position, which is sealed."""
        return self._epoch, self._left_at, self._has_read, self._usual

    def took(self, kind: str) -> None:
        """The script was given an iterator, a batch or the end of an epoch."""
        there = self.reads.made(kind)
        if there is not None:
            self._stand(*there)
        self._taken = self.skipped if kind == ITERATOR else self._taken + (kind == BATCH)

    def _stand(
        self, epoch: int, left_at: dict[int, int], has_read: bool, usual: int | None
    ) -> None:
        self._epoch, self._left_at, self._has_read, self._usual = epoch, left_at, has_read, usual

    def void_batch(self, interval: Callable[[int], tuple[int, int]]) -> Any:
        """Return a batch like those of an iteration, on which no worker trains.

        ``interval(count)``: the place of this worker's samples among that number.
        """
        here = self.position
        last = self._order.iterations_of(here.epoch) - 1
        items = self._order.items(here.epoch, min(here.iteration, last))
        return self.batch(self.request(items, interval(len(items))))

    # ---- a worker that comes later --------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch that the script iterates over."""
        return self._epoch

    @property
    def lagging(self) -> bool:
        """True if the others have completed the epoch that the script iterates over."""
        return 0 <= self._epoch < self.epoch_of_others

    def skip_epoch(self) -> NoReturn:
        """End an epoch that the others have behind them; raises StopIteration."""
        self._has_skipped = True
        raise StopIteration

    def expect(self, epoch: int) -> None:
        """The others have come to this epoch at least."""
        self.epoch_of_others = epoch

    def tell(self) -> tuple[int, dict[int, int]]:
        """Return what `follow` needs to know on a worker that comes later."""
        return self._epoch, self._left_at

    def follow(self, told: tuple[int, dict[int, int]]) -> None:
        """Go where the others are; raises ElasWaveError for a script that is past them."""
        self.epoch_of_others, self._left_at = told
        if self._epoch > self.epoch_of_others:
            raise ElasWaveError(
                f"the script is in epoch {self._epoch} of the data and the job in epoch "
                f"{self.epoch_of_others}; this worker is started again"
            )

    def tell_all(self) -> tuple[Any, ...]:
        """Return what `follow_all` needs to know on a worker that comes later."""
        return self.place, self._taken, self.reads.tell()

    def follow_all(self, told: tuple[Any, ...]) -> None:
        """Be where another worker is; for a script that passes over every call by itself."""
        place, self._taken, reads = told
        self._stand(*place)
        self.reads.follow(reads)

    def take_up(self, told: tuple[int, dict[int, int]]) -> None:
        """Be where the others are; for a script that passes over every step by itself."""
        self._epoch, self._left_at = told

    def seek(self, epoch: int, iteration: int) -> None:
        """Be at this iteration; for a loop that says itself where it is."""
        self._epoch = epoch
        self.position = replace(self.position, epoch=epoch, iteration=iteration)

    # ---- the samples ----------------------------------------------------------------------------

    def set_epoch(self, number: int) -> None:
        """As torch's DistributedSampler: how the epoch that begins next is shuffled."""
        if self._sampler is not None:
            self._sampler.set_epoch(number)
        self._order.set_epoch(self._epoch + 1, number)

    def prepare_epoch(self, epoch: int, *, number: int, skipped: int) -> None:
        """Set the number by which an epoch is shuffled; its first ``skipped`` are left out."""
        self._order.set_epoch(epoch, number)
        if skipped:
            self._begins_at[epoch] = skipped

    @property
    def skipped(self) -> int:
        """Iterations that the script skips in its present epoch, before the first one."""
        return self._begins_at.get(self._epoch, 0)

    def _normal(self, position: Position) -> Position:
        """The position itself, or the start of an epoch where it is before it, or of the next."""
        epoch = position.epoch
        end = self._left_at.get(epoch, self._order.iterations_of(epoch))
        if position.iteration >= end:
            epoch, position = epoch + 1, Position(epoch=epoch + 1, served=position.served)
        first = self._begins_at.get(epoch, 0)
        return replace(position, iteration=max(first, position.iteration))

    def items(self) -> list[int]:
        """All samples of the next iteration; raises StopIteration at the end of the epoch."""
        self.position = self._normal(self.position)
        if self.position.epoch > self._epoch:
            raise StopIteration
        items = self._order.items(self.position.epoch, self.position.iteration)
        if not items:
            # Nobody knew before that this epoch of a stream has no iteration.
            self.position = self._normal(self.position)
            raise StopIteration
        return items

    def read(self, items: Sequence[int], interval: tuple[int, int]) -> tuple[Share, Any]:
        """The share [start, stop) of an iteration's ``items``, and its batch; moves on."""
        start, stop = interval
        first = self.position.served
        request = self.request(items, interval)
        share = Share(items=request.items, ids=tuple(range(first + start, first + stop)))
        if self._ahead is None:
            batch = self.batch(request)
        else:
            batch = self._ahead.take(Key(request.place, interval), request)
        self.advance(len(items))
        return share, batch

    def request(self, items: Sequence[int], interval: tuple[int, int]) -> Request:
        """Return what to read for a part of the ``items`` of the iteration that is next."""
        here = self.position
        return self._request(here.epoch * _EPOCH + here.iteration, items, interval)

    def _request(self, place: int, items: Sequence[int], interval: tuple[int, int]) -> Request:
        (start, stop), wholes = interval, () if self.launch is None else self.launch(len(items))
        cut = [one for one in wholes if one[0] < stop and start < one[1]]
        return Request(
            *(place, start, tuple(items[start:stop])),
            ()
            if cut == [interval]
            else tuple(Request(place, a, tuple(items[a:b])) for a, b in cut),
        )

    def _following(self, key: Key) -> Request | None:
        """Return what to read for a share of an iteration; None behind the end of its epoch."""
        epoch, iteration = divmod(key.place, _EPOCH)
        if iteration >= self._order.iterations_of(epoch):
            return None
        assert isinstance(key.part, tuple)
        return self._request(key.place, self._order.items(epoch, iteration), key.part)

    def batch(self, request: Request) -> Any:
        """These items of the dataset, collated.

        What an item draws follows from its place in the data, in any share and any process, and
        the script's own generators do not notice. A collator that draws does so for whole
        micro-batches.
        """
        with undone_numbers():
            samples = self._samples(request)
            keys = {", ".join(map(str, one)) for one in samples if isinstance(one, Mapping)}
            # A process that reads ahead knows of no loss.
            if len(keys) > 1 and self._ahead is None:
                self.on_mixed(sorted(keys))
            before, batch, after = self._collated(request, samples)
            if not request.wholes or _are_same(before, after):
                return batch
            whole = of_wholes(batch, self._wholes(request))
            if whole is None and self._ahead is None:
                self.on_collated()
            return batch if whole is None else whole

    def _samples(self, request: Request) -> list[Any]:
        samples = []
        for number, item in enumerate(request.items, request.start):
            seed_host(draw_key(self._seed, request.place, number))
            samples.append(self.dataset[item])
        return samples

    def _collated(self, request: Request, samples: list[Any]) -> tuple[Any, Any, Any]:
        """Return a batch between the generators' states before and after it; of a share alone."""
        seed_host(draw_key(self._seed, request.place, request.start, _COLLATED))
        before = host_states() if request.wholes else None
        batch = self._collate(samples)
        return before, batch, host_states() if request.wholes else None

    def _wholes(self, request: Request) -> list[Whole]:
        """Read the micro-batches that a request is of."""
        made, stop = [], request.start + len(request.items)
        for one in request.wholes:
            _, batch, _ = self._collated(one, self._samples(one))
            start, size = one.start, len(one.items)
            first, last = max(request.start - start, 0), min(stop - start, size)
            made.append(Whole(batch, size, first, last))
        return made

    def advance(self, count: int) -> None:
        """Advance past a served iteration of ``count`` samples."""
        here = self.position
        self._has_read = True
        self.position = Position(
            epoch=here.epoch, iteration=here.iteration + 1, served=here.served + count
        )


def _are_same(before: tuple[Any, ...], after: tuple[Any, ...]) -> bool:
    """Return whether nothing was drawn between two states of the host's generators."""
    return (
        torch.equal(before[0], after[0])
        and before[1][2:] == after[1][2:]
        and bool((before[1][1] == after[1][1]).all())
        and before[2] == after[2]
    )


def tokens_of(batch: Any, num_samples: int) -> int:
    """Elements of the first tensor of integers, as of token ids; else the number of samples."""
    values = list(batch.values()) if isinstance(batch, dict) else batch
    tensors = [values] if torch.is_tensor(values) else [v for v in values if torch.is_tensor(v)]
    first = next((t for t in tensors if not t.is_floating_point() and t.dim() > 1), None)
    return num_samples if first is None else first.numel()
