"""Batches of scripts' memory: drawn as a forward step reads them, and copied to other workers."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elaswave_plugin.adapters.megatron.batch_values import BatchValues
from elaswave_plugin.adapters.megatron.input_seal import (
    Batches,
    InputSeal,
    SealedCall,
    drawn,
)
from elaswave_plugin.core.step.dataflow import Dataflow, deal
from elaswave_plugin.errors import ConfigurationError
from tests.adapters.one_process import OneProcess, Seat

SLOTS = (0, 1, 2, 3)


class Reader:
    """Samples by key, from an offset on."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers, self.offset = numbers, 0

    def get_next(self, keys: list[str], *, scale: int = 1) -> dict[str, Any]:
        self.offset += 1
        number = self.numbers[self.offset - 1]
        return {key: [torch.tensor([number * scale, -1]), (number, None)] for key in keys}


def forward_step(reader: Any, model: Any) -> Any:
    torch.rand(3)
    found = reader.get_next(["tokens"]), reader.get_next(["labels"], scale=2)
    return found, model(torch.ones(1))


class Model(torch.nn.Module):
    """A model that is not to run."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        raise AssertionError("the model ran")


def batches_of(numbers: list[int]) -> Batches:
    count = len(numbers) // 2
    return drawn(
        Reader(numbers), count, forward_step=forward_step, chunk=Model(), values=BatchValues()
    )


def read(batch: bytes) -> list[Any]:
    """Read a batch as the forward step does."""
    call = call_of([batch])
    found = [call.get_next(["tokens"])["tokens"], call.get_next(["labels"], scale=2)["labels"]]
    return [(one.tolist(), more) for one, more in found]


def call_of(batches: Batches) -> Any:
    healthy = deal(num_microbatches=len(SLOTS), launch_slots=SLOTS, live=SLOTS)
    call = SealedCall(
        InputSeal(worker_of(0), replica=0, num_replicas=4),
        batches,
        trains=False,
        flow=lambda left_out: healthy,
        is_rehearsed=lambda: True,
    )
    call.deliver(call.take(len(batches)), 0, 0)
    return call


def test_a_forward_step_shows_what_a_micro_batch_reads() -> None:
    before = torch.get_rng_state()
    first, second = batches_of([1, 2, 3, 4])
    assert torch.equal(torch.get_rng_state(), before)
    assert read(first) == [([1, -1], (1, None)), ([4, -1], (2, None))]
    assert read(second) == [([3, -1], (3, None)), ([8, -1], (4, None))]


def test_an_iterator_is_read_once_a_micro_batch() -> None:
    iterator = iter([1, 2, 3])
    first, _ = drawn(iterator, 2, forward_step=forward_step, chunk=Model(), values=BatchValues())
    assert next(iterator) == 3
    call = call_of([first])
    assert next(call) == 1 and not hasattr(call, "get_next")
    with pytest.raises(ConfigurationError, match="once more"):
        next(call)
    with pytest.raises(StopIteration):
        drawn(iterator, 1, forward_step=forward_step, chunk=Model(), values=BatchValues())


def test_each_pass_has_the_batch_as_it_was() -> None:
    """A script may change what it is given."""
    (batch,) = drawn(
        iter([{"x": [1]}]), 1, forward_step=forward_step, chunk=Model(), values=BatchValues()
    )
    for _ in range(2):
        given = next(call_of([batch]))
        assert given == {"x": [1]}
        given["x"].append(2)


REFUSED = {
    "no plain value": (iter([object()]), "a batch of data_iterator is of the class"),
    "an attribute": (SimpleNamespace(get_next=3), "forward_step reads get_next"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_others_cannot_be_given_is_refused(what: str) -> None:
    iterator, said = REFUSED[what]
    with pytest.raises(ConfigurationError, match=said):
        drawn(iterator, 1, forward_step=forward_step, chunk=Model(), values=BatchValues())


def worker_of(slot: int, *, nodes: tuple[int, ...] = (0, 0, 1, 1), copies: int = 1) -> Any:
    return SimpleNamespace(
        slot=slot,
        ranks=SLOTS,
        completed=3,
        owns_rank_0=slot == 0,
        view=SimpleNamespace(ranks=SLOTS, nodes=nodes),
        placement=SimpleNamespace(shard_group_of=lambda slot: SimpleNamespace(ranks=SLOTS)),
        config=SimpleNamespace(snapshot_copies=copies, input_seal_mib=1),
        state=SimpleNamespace(remembered_steps=2),
    )


@pytest.fixture(scope="module")
def process() -> Iterator[OneProcess]:
    """This process, whose servers go on to its end."""
    with pytest.MonkeyPatch.context() as patch:
        made = OneProcess(patch, [])
        yield made
        made.close()


@pytest.fixture
def job(process: OneProcess) -> OneProcess:
    """Four workers on two nodes."""
    process.start(
        len(SLOTS), lambda seat: InputSeal(worker_of(seat.slot), replica=seat.slot, num_replicas=4)
    )
    return process


def lie(seat: Seat) -> dict[int, Batches]:
    laid: dict[int, Batches] = seat.framework.lay(0, batches_of([seat.slot, 5]))
    return laid


def test_each_worker_has_the_copy_of_one_of_another_node(job: OneProcess) -> None:
    held = {slot: sorted(laid) for slot, laid in job.each(SLOTS, lie).items()}
    assert held == {0: [0, 2], 1: [1, 3], 2: [0, 2], 3: [1, 3]}


def after_losing(seat: Seat, lost: set[int]) -> tuple[dict[int, Batches], frozenset[int]]:
    """Give each worker its batches where some have nothing of the call, as new ones."""
    here = lie(seat)
    flow = deal(num_microbatches=4, launch_slots=SLOTS, live=[0, 2])
    flow = Dataflow(
        num_microbatches=4, num_replicas=4, placement=(*flow.placement, (1, ()), (3, ()))
    )
    shared = seat.framework.share({} if seat.slot in lost else here, flow.without, with_all=False)
    return shared, seat.framework.left_out


def test_batches_of_a_lost_worker_come_from_the_copy(job: OneProcess) -> None:
    found = job.each(SLOTS, lambda seat: after_losing(seat, {1}))
    assert all(read(shared[1][0])[0] == ([1, -1], (1, None)) for shared, _ in found.values())
    assert {left for _, left in found.values()} == {frozenset()}


def test_those_in_no_copy_are_left_out(job: OneProcess) -> None:
    found = job.each(SLOTS, lambda seat: after_losing(seat, {1, 3}))
    assert {left for _, left in found.values()} == {frozenset({1, 3})}
    assert all(not {1, 3} & {*shared} for slot, (shared, _) in found.items())


def test_what_is_two_steps_old_is_forgotten(job: OneProcess) -> None:
    def lay(seat: Seat) -> list[int]:
        for call, step in enumerate((3, 3, 4, 5)):
            seat.framework.worker.completed = step
            seat.framework.lay(call, batches_of([seat.slot, call]))
        return sorted(seat.framework._laid)

    assert job.each(SLOTS, lay) == {slot: [2, 3] for slot in SLOTS}


LARGE = torch.zeros(1 << 18, dtype=torch.float64)
UNFIT = {
    "a larger one": (lambda slot: [LARGE] * (slot == 2) + [0], 1, "2.0 MiB on rank 2, and input"),
    "more of them": (lambda slot: [0, 0], 2, "num_microbatches is 2 on rank 3 and 1 on rank 0"),
}


@pytest.mark.parametrize("what", UNFIT)
def test_all_refuse_what_one_has(job: OneProcess, what: str) -> None:
    values, most, said = UNFIT[what]

    def refused(seat: Seat) -> None:
        count = most if seat.slot == 3 else 1
        batches = drawn(
            iter(values(seat.slot)),
            count,
            forward_step=forward_step,
            chunk=Model(),
            values=BatchValues(),
        )
        with pytest.raises(ConfigurationError, match=said):
            seat.framework.lay(0, batches)

    job.each(SLOTS, refused)
