"""Iterable datasets of a Trainer: every worker counts the samples, so a loss keeps the place."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

import torch
from accelerate.data_loader import DataLoaderDispatcher, IterableDatasetShard
from torch.utils.data import IterableDataset

from elaswave_plugin.adapters.deepspeed.accelerate.stream import StreamOrder, Told
from elaswave_plugin.adapters.deepspeed.engine.loader import ElasticLoader
from tests.deepspeed.conftest import Launch, Twin
from tests.deepspeed.harness import EngineSpec, check_recovered
from tests.deepspeed.hf_runs import check_newcomer, check_tapes, spec_of
from tests.deepspeed.test_join import entered
from tests.deepspeed.test_loader import Alone
from tests.faults.harness import Outcome
from tests.proofs import Kind, Promise, proves
from tests.sample import sampled

WIDTH, BATCH = 3, 2
READ = r"process (\d+) read (\d+) samples"


class Numbers(IterableDataset[int]):
    """Counts, and how often it was begun."""

    def __init__(self, count: int) -> None:
        self.count, self.passes = count, 0

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        return iter(range(self.count))


def native(count: int, rank: int, *, dispatches: bool, drop_last: bool) -> list[list[int]]:
    """The batches that Accelerate gives a process."""

    def cut(batch: Any, part: slice, **given: Any) -> Any:
        # The first process cuts for itself; but for the front, which fills the last batch up.
        size = part.stop
        return batch[part] if size == WIDTH else batch[rank * size : (rank + 1) * size]

    if dispatches:
        loader = DataLoaderDispatcher(
            Numbers(count),
            batch_size=BATCH,
            _drop_last=drop_last,
            drop_last=drop_last,
            slice_fn=cut,
        )
        loader.state = SimpleNamespace(
            process_index=0, num_processes=WIDTH, device=torch.device("cpu")
        )
        return [batch.tolist() for batch in loader]
    shard = IterableDatasetShard(
        Numbers(count),
        batch_size=BATCH,
        drop_last=drop_last,
        num_processes=WIDTH,
        process_index=rank,
    )
    given = [*shard]
    return [given[place : place + BATCH] for place in range(0, len(given), BATCH)]


def ours(count: int, *, dispatches: bool, drop_last: bool, **more: Any) -> StreamOrder:
    return StreamOrder(
        Numbers(count),
        num_samples=WIDTH * BATCH,
        width=WIDTH,
        fills_up=not dispatches,
        drop_last=drop_last,
        **{"per_update": 1, "whole_updates": True, **more},
    )


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("dispatches", [False, True])
# Where nothing is left, Accelerate fails or trains on nothing; here an update is filled up.
@pytest.mark.parametrize("count", [6, 7, 12, 13, 14, 16, 17, 30])
def test_samples_are_dealt_out_as_accelerate_does(
    count: int, dispatches: bool, drop_last: bool
) -> None:
    order = ours(count, dispatches=dispatches, drop_last=drop_last)
    dealt: list[list[list[int]]] = [[] for _ in range(WIDTH)]
    iteration = 0
    while iteration < order.iterations_of(0):
        items = order.items(0, iteration)
        assert [order[item] for item in items] == items
        share = len(items) // WIDTH
        for rank, batches in enumerate(dealt):
            batches.append(items[rank * share : (rank + 1) * share])
        iteration += 1
    expected = [
        native(count, rank, dispatches=dispatches, drop_last=drop_last) for rank in range(WIDTH)
    ]
    assert dealt == expected


def test_what_a_redo_needs_is_not_read_again() -> None:
    order = ours(100, dispatches=True, drop_last=False, per_update=2)
    for iteration in range(8):
        order.items(0, iteration)
    for iteration in (4, 5, 6, 7, 0, 1):
        items = order.items(0, iteration)
        assert [order[item] for item in items] == items
    assert len(order._passes[0].samples) <= 5 * WIDTH * BATCH * 2
    assert order._stream.passes == 1
    # The last step of the epoch before, of which all was read.
    for iteration in range(8, 18):
        order.items(0, iteration)
    assert order.iterations_of(0) == 18
    assert order.items(0, 17)[-1] == 7, "filled up from the front to a whole update"
    order.items(1, 0)
    order.items(1, 1)
    assert [order[item] for item in order.items(0, 16)][:4] == [96, 97, 98, 99]
    assert order._stream.passes == 2
    # One that comes later goes there from the beginning.
    order.items(1, 2)
    later = ours(100, dispatches=True, drop_last=False, per_update=2)
    assert [later[item] for item in later.items(1, 2)] == order.items(1, 2)


def test_the_end_is_known_before_an_update_begins() -> None:
    empty = ours(0, dispatches=True, drop_last=False)
    assert empty.ends_before(0, 0)
    order = ours(100, dispatches=True, drop_last=False, per_update=2)
    assert not order.ends_before(0, 0) and not order.ends_before(0, 16)
    assert order.ends_before(0, 18)
    # A job that is resumed behind the first pass, which natively gives it nothing.
    resumed = ours(100, dispatches=True, drop_last=False, per_update=2)
    assert resumed.ends_before(0, 30) and not resumed.ends_before(1, 0)


def test_a_collator_may_change_what_it_is_given() -> None:
    stream = [{"labels": [number]} for number in range(12)]
    orders = [ours(12, dispatches=True, drop_last=False) for _ in range(2)]
    for order in orders:
        order._stream = stream
        order.items(0, 0)
    orders[0][1].pop("labels")
    assert orders[0][1] == {"labels": [1]}
    assert orders[0].digest(0, 1) == orders[1].digest(0, 1)


def test_a_generator_is_seeded_in_each_pass_as_accelerate_does() -> None:
    class Shuffled(Numbers):
        generator = torch.Generator()

        def __iter__(self) -> Iterator[int]:
            return iter(torch.randperm(self.count, generator=self.generator).tolist())

    def read(epochs: list[int]) -> list[int]:
        order = ours(12, dispatches=True, drop_last=False)
        order._stream = Shuffled(12)
        for epoch in epochs:
            items = order.items(epoch, 1)
        return [order[item] for item in items]

    assert read([0, 1]) == read([1]) != read([0])


def test_a_stream_that_draws_on_is_read_to_where_a_pass_begins_and_others_go_there_at_once() -> (
    None
):
    class Turning(Numbers):
        draws = 0

        def __iter__(self) -> Iterator[int]:
            self.draws += 1
            return iter([100 * self.draws + one for one in super().__iter__()])

    order = ours(12, dispatches=True, drop_last=False)
    order._stream = Turning(12)
    order.go_to(2)
    items = order.items(2, 1)
    assert [order[item] for item in items] == [*range(306, 312)]
    numbered = ours(12, dispatches=True, drop_last=False)
    numbered._stream = Stateful(12)
    numbered.go_to(2)
    items = numbered.items(2, 1)
    assert [numbered[item] for item in items] == [*range(2006, 2012)]
    assert numbered._stream.read == 12


def test_tensors_of_any_layout_are_compared() -> None:
    table = torch.arange(12).view(6, 2)
    order = ours(6, dispatches=True, drop_last=False)
    order._stream = [table[:, 1], table[::2], table[0].expand(3, 2), torch.tensor(3.0), table, 1]
    order.items(0, 0)
    assert order.digest(0, 1)


def test_digests_differ_where_samples_do() -> None:
    orders = [ours(30, dispatches=True, drop_last=False) for _ in range(3)]
    orders[2]._stream = [*range(6), 7, 6, *range(8, 30)]
    for order in orders:
        order.items(0, 0)
    assert len({order.digest(0, 1) for order in orders}) == 1
    for order in orders:
        order.items(0, 1)
    assert len({order.digest(1, 1) for order in orders}) == 2


def test_a_redo_goes_back_over_the_end_of_an_epoch() -> None:
    """As a loop reads a stream, which ends its epochs early, with an empty one in between."""
    order = ours(16, dispatches=True, drop_last=False, per_update=2, whole_updates=False)
    loader = ElasticLoader(Alone(), order, order, collate=list)
    batches = iter(loader)
    first = [next(batches) for _ in range(3)]
    assert first == [[*range(6)], [*range(6, 12)], [12, 13, 14, 15, 0, 1]]
    assert loader.at_end and len(loader) == 3
    end = loader.position
    batches = iter(loader)
    assert next(batches) == first[0] and loader.position.epoch == 1
    # The first step of the second epoch is rolled back, and then the last one of the first.
    loader.position = end
    assert next(batches) == first[0] and loader.position.epoch == 1
    loader.position = replace(end, iteration=2)
    assert next(batches) == first[2] and loader.at_end
    assert next(batches) == first[0] and not loader.at_end
    assert [next(batches), next(batches)] == first[1:]
    assert next(batches, None) is None
    order._stream.count = 0
    assert [*map(list, loader)] == []
    order._stream.count = 6
    assert [*map(list, loader)] == first[:1]


class Stateful(Numbers):
    """Tells its place, and goes to another one where it is wrong; counts what was read of it."""

    def __init__(self, count: int, *, wrong_by: int = 0) -> None:
        super().__init__(count)
        self.wrong_by = wrong_by
        self.place = self.begins = self.read = self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begins, self.epoch = state["place"], state["epoch"]
        self.begins += self.wrong_by if self.begins else 0

    def __iter__(self) -> Iterator[int]:
        for place in range(self.begins, self.count):
            self.place = place + 1
            self.read += 1
            yield 1000 * self.epoch + place


def taken_up(stream: Any, there: Any, *, epoch: int, iteration: int) -> tuple[Any, StreamOrder]:
    """A worker that comes to where another one is in a stream, and what it was told."""
    more = {"dispatches": True, "drop_last": False, "per_update": 2, "keeps_states": True}
    order, later = ours(0, **more), ours(0, **more)
    order._stream, later._stream = there, stream
    for number in range(epoch + 1):
        for one in range(iteration + 2):
            order.items(number, one)
    told = Told(*json.loads(json.dumps(order.tell(epoch, iteration))))
    later.take_up(told)
    for one in (iteration - 2, iteration, iteration + 1):
        items = order.items(epoch, one)
        assert later.items(epoch, one) == items
        assert [later[item] for item in items] == [order[item] for item in items]
    return told, later


@pytest.mark.parametrize("wrong_by", [0, 3])
def test_a_later_worker_goes_by_the_state_of_the_stream_and_else_from_its_front(
    wrong_by: int,
) -> None:
    stream = Stateful(100, wrong_by=wrong_by)
    told, later = taken_up(stream, Stateful(100), epoch=1, iteration=12)
    assert told[:2] == (1, 60) and told.state
    # The front, from which the last step is filled up, the step before the present one, and it.
    assert stream.read == (12 + 24 + 1 if not wrong_by else 12 + 12 + 84 + 1)
    assert later.iterations_of(1) > 18
    assert later.items(1, 17)[-2:] == [6, 7] and later[7] == 1007
    # The passes that follow begin at the front.
    assert [later[item] for item in later.items(2, 0)] == [2000 + one for one in range(6)]


def test_without_a_state_a_later_worker_counts() -> None:
    stream = Numbers(100)
    told, _ = taken_up(stream, Numbers(100), epoch=0, iteration=8)
    assert told == (0, 36, 0, "")
    odd = Stateful(100)
    odd.state_dict = lambda: {"place": object()}  # type: ignore[method-assign, assignment]
    told, _ = taken_up(Stateful(100), odd, epoch=0, iteration=8)
    assert told[:2] == (0, 36) and told.state == ""
    order = ours(100, dispatches=True, drop_last=False, per_update=2, keeps_states=True)
    order.items(0, 0)
    assert order.tell(0, 0) == (0, 0, 0, "")


@pytest.mark.parametrize("shuffles", [False, True])
def test_a_dataset_of_datasets_tells_its_state(shuffles: bool) -> None:
    """The buffer from which it shuffles is not in its state."""
    datasets = pytest.importorskip("datasets")

    def made(read: list[int]) -> Any:
        rows = datasets.Dataset.from_list([{"value": one} for one in range(100)])
        stream = rows.to_iterable_dataset(num_shards=5)
        stream = stream.shuffle(seed=3, buffer_size=10) if shuffles else stream
        return stream.map(lambda row: read.append(row["value"]) or row)

    read: list[int] = []
    told, _ = taken_up(made(read), made([]), epoch=1, iteration=12)
    assert told.state
    assert len(read) > 100 if shuffles else 37 <= len(read) < 60


def streaming(*kills: str, kind: str = "plain", options: tuple[str, ...] = (), **more: Any) -> Any:
    """A job that trains on a stream of 40 samples, so of five steps in an epoch."""
    given = (f"--stream={kind}", "--limit=40", *options)
    return spec_of(*kills, options=given, **{"steps": 8, **more})


def check(run: Outcome, twin: Twin, reference: Launch) -> None:
    assert isinstance(run.spec, EngineSpec)
    assert run.returncode == 0, run.output[-4000:]
    check_recovered(run, twin=twin(run), reference=reference(run.spec))
    check_tapes(run, reference(run.spec), survivors=3)


@proves(Kind.KILL, Promise.PLANNED)
@pytest.mark.parametrize(
    ("kill", "kind", "options"),
    sampled(
        [
            ("1@2:backward", "plain", ()),
            # The first step of the second epoch, after some have completed the one before.
            ("0@5:forward", "plain", ("--evaluate=3",)),
            ("2@4:snapshot", "plain", ("--no-dispatch",)),
            ("0@3:data", "shuffled", ()),
            ("3@3:evaluation", "plain", ("--evaluate=3",)),
        ]
    ),
)
def test_a_kill_keeps_the_place(
    run: Launch, twin: Twin, reference: Launch, kill: str, kind: str, options: tuple[str, ...]
) -> None:
    if kind == "shuffled":
        pytest.importorskip("datasets")
    check(run(streaming(kill, kind=kind, options=options)), twin, reference)


@proves(Kind.RETURN, Promise.PLANNED)
@pytest.mark.parametrize(("kill", "back"), sampled([("1@1:backward", 3), ("0@2:forward", 6)]))
def test_a_lost_worker_reads_up_to_the_others(
    run: Launch, twin: Twin, reference: Launch, kill: str, back: int
) -> None:
    spec = streaming(kill, respawn=5, changes=(f"+{kill[0]}@{back}",), stage=3)
    returned = run(spec)
    check(returned, twin, reference)
    assert entered(returned) == [(int(kill[0]), 1, back)]
    check_newcomer(returned, reference(spec), first=back)


# The place is told in each step.
TOLD = """
from elaswave_plugin.adapters.deepspeed.accelerate import accelerate
accelerate._TELL_PLACE_S = 0.0
"""


@proves(Kind.RETURN, Promise.PLANNED, victim="1", moment="8:backward")
@pytest.mark.parametrize("kind", sampled(["stateful", "forgetful"]))
def test_a_lost_worker_goes_to_the_others_by_the_state_of_the_stream(
    run: Launch, twin: Twin, reference: Launch, kind: str
) -> None:
    options = (f"--stream={kind}", "--limit=160")
    more = {"steps": 14, "respawn": 5, "changes": ("+1@11",), "sabotage": TOLD}
    spec = spec_of("1@8:backward", options=options, **more)
    returned = run(spec)
    check(returned, twin, reference)
    assert entered(returned) == [(1, 1, 11)]
    check_newcomer(returned, reference(spec), first=11)
    read = {int(pid): int(count) for pid, count in re.findall(READ, returned.output)}
    started = {one["pid"]: one["incarnation"] for one in returned.events("worker_started")}
    (later,) = (count for pid, count in read.items() if started[pid])
    others = {count for pid, count in read.items() if not started[pid]}
    # All samples, and one more that tells whether it goes on.
    assert others == {14 * 8 + 1}
    # The front, and what comes after the sixth step at least; or that and all.
    assert later <= 8 + 8 * 8 + 1 if kind == "stateful" else later > 14 * 8 + 1


@proves(Kind.WRONG_SCRIPT, Promise.REFUSED)
def test_a_stream_that_differs_between_the_workers_is_refused(run: Launch) -> None:
    refused = run(streaming(kind="drawn"))
    assert refused.returncode == 2, refused.output[-4000:]
    assert refused.output.count("gave the workers different samples") == 1
