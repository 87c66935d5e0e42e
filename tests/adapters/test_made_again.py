"""Iterators of a script, made again for each replica: it has the batches that it reads natively."""

import itertools
import multiprocessing
import pickle
import random
from argparse import Namespace
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from elaswave_plugin.adapters.megatron.step import replica_stream
from elaswave_plugin.adapters.megatron.step.made_again import InMemory, Original
from elaswave_plugin.adapters.megatron.step.replica_stream import ReplicaStream, Streams
from elaswave_plugin.errors import ConfigurationError

SAMPLES = [torch.tensor(number) for number in range(24)]
REPLICAS = 3


def loader_of(replica: int, **settings: Any) -> Any:
    sampler = DistributedSampler(SAMPLES, num_replicas=REPLICAS, rank=replica, seed=5)
    return DataLoader(SAMPLES, batch_size=2, sampler=sampler, **settings)


def cyclic(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def by_epoch(loader: Any, sampler: Any) -> Iterator[Any]:
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def with_variables(loader: Any) -> Iterator[Any]:
    epoch = -1

    def batches() -> Iterator[Any]:
        nonlocal epoch
        while True:
            epoch += 1
            loader.sampler.set_epoch(epoch)
            yield from loader

    return batches()


class Endless:
    """A loader that counts its epochs by itself."""

    def __init__(self, loader: Any) -> None:
        self.loader, self.state = loader, {"epoch": 0}

    def __iter__(self) -> Iterator[Any]:
        while True:
            self.loader.sampler.set_epoch(self.state["epoch"])
            yield from self.loader
            self.state["epoch"] += 1


class Reader:
    """An iterator that is a plain object."""

    def __init__(self, loader: Any) -> None:
        self._batches = cyclic(loader)

    def __iter__(self) -> "Reader":
        return self

    def __next__(self) -> Any:
        return next(self._batches)


class Moved(DataLoader[Any]):
    """A loader of a class of the script's, which moves its batches."""

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield batch + 100


def filtered(loader: Any) -> Iterator[Any]:
    """Items that follow from what was read: nobody can pass over them unread."""
    for batch in cyclic(loader):
        if int(batch.sum()) % 3:
            yield batch * 2


def shuffled_buffer(loader: Any) -> Iterator[Any]:
    draws, kept = random.Random(3), []
    for batch in cyclic(loader):
        kept.append(batch)
        if len(kept) == 3:
            yield kept.pop(draws.randrange(3))


def refilled(loader: Any) -> Iterator[Any]:
    """A place that each batch is written to."""
    place = torch.zeros(2)
    for batch in loader:
        yield place.copy_(batch)


def moved(replica: int) -> Iterator[Any]:
    given = loader_of(replica)
    return cyclic(Moved(SAMPLES, batch_size=2, sampler=given.sampler))


def options(*given: Any, args: Any, **named: Any) -> Iterator[Any]:
    for _ in range(args.epochs):
        yield from itertools.chain(*given, named["more"])


MADE: dict[str, Callable[[int], Iterator[Any]]] = {
    "a loader": lambda replica: iter(loader_of(replica)),
    "a loader with processes": lambda replica: iter(loader_of(replica, num_workers=2)),
    "cyclic": lambda replica: cyclic(loader_of(replica)),
    "cyclic, processes": lambda replica: cyclic(loader_of(replica, num_workers=2)),
    "cyclic, processes that stay": lambda replica: cyclic(
        loader_of(replica, num_workers=1, persistent_workers=True)
    ),
    "by epoch": lambda replica: by_epoch(one := loader_of(replica), one.sampler),
    "a variable": lambda replica: with_variables(loader_of(replica)),
    "an object": lambda replica: iter(Endless(loader_of(replica))),
    "an iterator of its own": lambda replica: Reader(loader_of(replica)),
    "a loader of its own": moved,
    "an expression": lambda replica: (batch for batch in loader_of(replica)),
    "an expression that moves": lambda replica: (batch + 1 for batch in loader_of(replica)),
    "keys": lambda replica: ({"text": batch, "n": 1} for batch in loader_of(replica)),
    "cycle": lambda replica: itertools.cycle(loader_of(replica)),
    "chain": lambda replica: itertools.chain(loader_of(replica), loader_of(replica)),
    "map": lambda replica: map(partial(torch.add, other=7), cyclic(loader_of(replica))),
    "zip": lambda replica: zip(loader_of(replica), cyclic(loader_of(replica)), strict=False),
    "enumerate": lambda replica: enumerate(loader_of(replica)),
    "islice": lambda replica: itertools.islice(cyclic(loader_of(replica)), 1, 8),
    "arguments": lambda replica: options(
        loader_of(replica), args=Namespace(epochs=2), more=loader_of(replica)
    ),
    "filtered": lambda replica: filtered(loader_of(replica)),
    "filtered, processes": lambda replica: filtered(loader_of(replica, num_workers=2)),
    "refilled": lambda replica: refilled(loader_of(replica)),
    "a buffer": lambda replica: shuffled_buffer(loader_of(replica)),
}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_stream, "gathered", lambda mine: [mine])


def stream_of(iterator: Any, *, mine: int = 1, num_replicas: int = REPLICAS) -> ReplicaStream:
    original = Original(iterator, mine={mine}, num_replicas=num_replicas)
    return ReplicaStream(
        original,
        digests=original.digests(iterator),
        number=0,
        seed=9,
        life=lambda: 0,
        passed=lambda: None,
    )


def read(stream: ReplicaStream, replica: int, *, first: int, count: int) -> list[str]:
    found = []
    for number in range(count):
        stream.deliver(first, replica, number)
        try:
            found.append(str(next(stream)))
        except StopIteration:
            found.append("end")
    return found


@pytest.mark.parametrize("name", MADE)
def test_each_replica_has_what_it_reads_natively(name: str) -> None:
    stream = stream_of(MADE[name](1))
    wanted = {
        replica: [str(one) for one in itertools.islice(MADE[name](replica), 14)]
        for replica in range(REPLICAS)
    }
    for one in wanted.values():
        one += ["end"] * (14 - len(one))
    # The own ones step by step, and again; those of another one later, and what lay before.
    for first in range(0, 14, 2):
        assert stream.take(2) == first
        assert read(stream, 1, first=first, count=2) == wanted[1][first : first + 2]
        assert read(stream, 1, first=first, count=2) == wanted[1][first : first + 2]
    for replica in (0, 2):
        for first in (6, 8, 0):
            assert read(stream, replica, first=first, count=2) == wanted[replica][first : first + 2]
    stream.close()
    assert not multiprocessing.active_children()


def test_a_stream_has_an_end_and_one_batch_for_each_pass() -> None:
    stream = stream_of(iter(loader_of(1)))
    assert (stream.take(3), stream.position) == (0, 3)
    assert read(stream, 0, first=4, count=1) == ["end"]
    with pytest.raises(ConfigurationError, match="called twice"):
        next(stream)


def test_one_that_has_begun_goes_on() -> None:
    iterator = iter(loader_of(1))
    next(iterator)
    stream = stream_of(iterator)
    assert stream.take(2) == 1
    assert read(stream, 2, first=1, count=3) == [str(one) for one in loader_of(2)][1:]


def drawn(batch: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(batch) + torch.rand(()) + random.random()


class Drawing(list[torch.Tensor]):
    """Samples with noise."""

    def __getitem__(self, number: Any) -> Any:
        return super().__getitem__(number) + torch.rand(())


@pytest.mark.parametrize("form", [iter, cyclic])
def test_what_is_drawn_is_the_same_on_every_worker(form: Callable[[Any], Any]) -> None:
    """The order of each epoch, the noise of samples, and what collates them."""
    loader = DataLoader(Drawing(SAMPLES), batch_size=4, shuffle=True, collate_fn=drawn)  # type: ignore[arg-type]
    streams = [stream_of(form(loader), mine=mine, num_replicas=2) for mine in (0, 1)]
    seen = []
    for replica in (0, 1):
        first, second = (read(one, replica, first=0, count=12) for one in streams)
        assert first == second
        seen += first[:6] if form is iter else [str(first[:6]), str(first[6:])]
    assert len({*seen}) == len(seen)


class Counted(list[torch.Tensor]):
    """Samples that count who reads them."""

    read = 0

    def __getitem__(self, number: Any) -> Any:
        self.read += 1
        return super().__getitem__(number)


def test_processes_may_be_spawned() -> None:
    loader = loader_of(1, num_workers=1, multiprocessing_context="spawn")
    stream = stream_of(cyclic(loader))
    assert stream._ahead._loader is not None
    started: Any = stream._ahead._loader.multiprocessing_context
    assert started.get_start_method() == "spawn"
    pickle.dumps(stream._ahead._loader.dataset)
    for source in stream.original.sources:
        pickle.dumps(source.read)


def test_what_is_passed_over_is_not_read() -> None:
    dataset = Counted(SAMPLES)
    loader = DataLoader(dataset, batch_size=2, shuffle=True)  # type: ignore[arg-type]
    stream = stream_of(cyclic(loader))
    read(stream, 0, first=500, count=2)
    assert dataset.read == 4


def test_a_replica_that_nobody_asks_for_is_forgotten() -> None:
    stream = stream_of(filtered(loader_of(1)))
    wanted = {}
    for first in range(12):
        stream.take(1)
        for replica in (0, 1) if first < 2 else (1,):
            wanted[replica, first] = read(stream, replica, first=first, count=1)
    assert [*stream._runs] == [1]
    assert read(stream, 0, first=1, count=1) == wanted[0, 1]


class Curriculum:
    """A sampler that knows no replica."""

    def __iter__(self) -> Any:
        return iter(range(24))

    def __len__(self) -> int:
        return 24


def begun(loader: Any) -> Iterator[Any]:
    made = cyclic(loader)
    next(made)
    return made


def begun_below(loader: Any) -> Iterator[Any]:
    iterator = iter(loader)
    next(iterator)
    return map(torch.neg, iterator)


class Held:
    """An iterator over a loader with something that has no copy."""

    def __init__(self, loader: Any) -> None:
        self._loader, self._file = iter(loader), open(__file__)  # noqa: SIM115

    def __next__(self) -> Any:
        return next(self._loader)


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "begun": (begun, r"data_iterator is a generator, .*\(something was read from it before"),
    "begun below": (begun_below, r"data_iterator is a map, .*\(something was read from it before"),
    "no copy": (Held, r"data_iterator is a Held, .*cannot be copied: cannot pickle"),
    "a loader that stays": (
        lambda _: iter(loader_of(1, num_workers=1, persistent_workers=True)),
        "persistent_workers is True",
    ),
    "a sampler": (
        lambda _: cyclic(DataLoader(SAMPLES, sampler=Curriculum())),  # type: ignore[arg-type]
        "draws from a Curriculum",
    ),
    "batches": (
        lambda _: iter(DataLoader(SAMPLES, batch_sampler=BatchSampler(Curriculum(), 2, False))),  # type: ignore[arg-type]
        "draws from a Curriculum",
    ),
    "another's": (lambda _: cyclic(loader_of(2)), "whose rank is 2, not 1"),
    "another number": (
        lambda _: iter(
            DataLoader(SAMPLES, sampler=DistributedSampler(SAMPLES, num_replicas=2, rank=1))
        ),
        "num_replicas is 2, and there are 3",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_made_again_is_refused(name: str) -> None:
    make, said = REFUSED[name]
    with pytest.raises(ConfigurationError, match=said):
        stream_of(make(loader_of(1)))


@pytest.mark.parametrize("made", [iter([1]), (one for one in [1]), map(abs, [1])])
def test_batches_that_no_loader_reads_are_in_memory(made: Iterator[Any]) -> None:
    with pytest.raises(InMemory):
        stream_of(made)


def out_of_reach(loader: Any) -> Iterator[Any]:
    def read() -> Any:
        return iter(loader)

    return calling(read, loader.batch_sampler, cyclic(loader))


def calling(read: Any, *_: Any) -> Iterator[Any]:
    yield from read()


def in_a_thread(loader: Any) -> Iterator[Any]:
    with ThreadPoolExecutor(1) as pool:
        yield from pool.submit(iter, loader).result()


def of_memory(loader: Any) -> Iterator[Any]:
    yield from (torch.zeros(2), torch.ones(2))
    yield from loader


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (out_of_reach, "reads a DataLoader that it finds neither"),
        (in_a_thread, "reads its DataLoader in a thread"),
        (of_memory, "first batch comes from no DataLoader"),
    ],
)
def test_a_first_batch_that_only_one_worker_has_is_refused(make: Any, said: str) -> None:
    stream = stream_of(make(loader_of(1)))
    with pytest.raises(ConfigurationError, match=said):
        read(stream, 1, first=0, count=1)


def test_other_things_on_another_worker_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(replica: int, number: int, more: Any) -> dict[str, str]:
        made = options(loader_of(replica), args=Namespace(epochs=number), more=more)
        return Original(made, mine={replica}, num_replicas=REPLICAS).digests(made)

    one = of(0, 1, torch.ones(2))
    device = [torch.device("cpu", 3)]
    assert one == of(1, 1, torch.ones(2)) and of(0, 1, [torch.device("cpu", 1)]) == of(0, 1, device)
    for other, names in ((of(1, 2, torch.ones(2)), "args"), (of(1, 1, torch.zeros(2)), "named")):
        monkeypatch.setattr(replica_stream, "gathered", lambda _, other=other: [one, one, other])
        said = rf"made of other things on rank 2 than on rank 0 \({names}\)"
        with pytest.raises(ConfigurationError, match=said):
            stream_of(cyclic(loader_of(1))).take(1)


def test_a_forward_step_ends_with_its_data() -> None:
    stream = stream_of(iter(loader_of(1)))

    def read_one(number: int, step: Callable[..., Any]) -> Any:
        stream.take(1)
        stream.deliver(0, 1, number)
        return stream.read_by(step)(stream)

    with pytest.raises(ConfigurationError, match="goes on where its data_iterator has ended"):
        read_one(4, lambda items: next(items, None))
    assert read_one(3, lambda items: next(items, None)) is not None
    with pytest.raises(StopIteration):
        read_one(4, next)


def added(streams: Streams, iterator: Any) -> Any:
    streams.add(iterator, stream_of(iterator))
    return iterator


def test_streams_go_with_their_iterators() -> None:
    streams, loader = Streams(), loader_of(1)
    kept = added(streams, map(torch.neg, loader))
    for make in (iter, cyclic, itertools.cycle):
        added(streams, make(loader))
    assert len(streams._known) == 2
    assert streams.of(kept) is not None
    assert streams.of(iter(loader)) is None


def test_what_the_script_does_with_an_iterator_is_seen() -> None:
    streams, loader = Streams(), loader_of(1)
    state = Namespace(epochs=1)
    one = added(streams, cyclic(loader))
    two = added(streams, options(loader, args=state, more=[]))
    three = added(streams, iter(loader))
    four = added(streams, map(torch.neg, three_below := iter(loader)))
    for iterator in (one, two, three, four):
        assert streams.of(iterator) is not None
    with pytest.raises(ConfigurationError, match="goes on with an iterator which an earlier call"):
        added(streams, map(torch.neg, three_below))
    next(four)
    state.epochs = 2
    next(three)
    next(one)
    reads = "the script reads from an iterator between calls"
    for iterator, said in (
        (one, reads),
        (two, "script changes what"),
        (three, reads),
        (four, reads),
    ):
        with pytest.raises(ConfigurationError, match=said):
            streams.of(iterator)
    five = added(streams, with_variables(loader))
    loader.sampler.set_epoch(3)
    with pytest.raises(ConfigurationError, match="the epoch of a sampler"):
        streams.of(five)
