"""Native sums in rank order: the bits of the links, with gloo in NCCL's place, and the calls."""

from collections.abc import Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp
from torch.distributed import _functional_collectives as funcol
from torch.distributed.distributed_c10d import _coalescing_manager as coalescing

from elaswave_plugin.communicator.device import communicator, nccl, ordered_sums
from elaswave_plugin.communicator.device.calls import DeviceProcessGroup, OrderedProcessGroup
from elaswave_plugin.communicator.groups import c10d_tables
from elaswave_plugin.communicator.process_group import GroupTable
from elaswave_plugin.errors import ConfigurationError, EpochChanged
from tests.communicator.forked import Peer, Workers
from tests.communicator.native_groups import GlooMaker, StartDetached
from tests.communicator.samples import WORLD, folded, made, sample
from tests.communicator.test_process_group import same_bits

SIZES = (0, 1, 3, 1000, 40_003, 150_012)
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
OPS = {"SUM": ReduceOp.SUM, "PRODUCT": ReduceOp.PRODUCT}
LIMIT_S = 20.0
# So that sizes above take both ways, and several chunks.
SMALL = {"EXCHANGE_BYTES": 10_000, "CHUNK_BYTES": 70_000}


def _native(peer: Peer, *, exact: bool) -> None:
    peer.groups = GroupTable(peer.links, maker=GlooMaker(), exact=exact)
    peer.install()
    for name, size in SMALL.items():
        setattr(ordered_sums, name, size)


def _whole(rank: int, salt: int, numel: int, dtype: torch.dtype, op: str) -> None:
    expected, how = folded(numel, dtype, op, salt), OPS[op]
    data = sample(rank, numel, dtype, salt)
    dist.all_reduce(data, how)
    assert same_bits(data, expected)
    data = sample(rank, numel, dtype, salt)
    dist.reduce(data, 2, how)
    assert same_bits(data, expected if rank == 2 else sample(rank, numel, dtype, salt))
    if numel < 2:
        return
    wide = torch.zeros(numel, 2, dtype=dtype)
    wide[:, 0] = sample(rank, numel, dtype, salt)
    work = dist.all_reduce(wide[:, 0], how, async_op=True)
    assert work is not None and work.wait()
    assert same_bits(wide[:, 0].clone(), expected) and not wide[:, 1].any()


def _cut(rank: int, salt: int, numel: int, dtype: torch.dtype, op: str) -> None:
    expected, how = folded(numel, dtype, op, salt), OPS[op]
    if numel % WORLD == 0 and numel:
        piece = torch.empty(numel // WORLD, dtype=dtype)
        dist.reduce_scatter_tensor(piece, sample(rank, numel, dtype, salt), how)
        assert same_bits(piece, expected.chunk(WORLD)[rank])
        # As Megatron-Core: into the own part of the buffer, whose other parts are left as they are.
        several = [sample(rank, numel, dtype, salt) for _ in range(2)]
        with coalescing(async_ops=True) as block:
            for one in several:
                dist.reduce_scatter_tensor(one.chunk(WORLD)[rank], one, how, async_op=True)
        block.wait()
        for one, (place, part) in product(several, enumerate(expected.chunk(WORLD))):
            left = made(rank, numel, dtype, salt).chunk(WORLD)[place]
            assert same_bits(one.chunk(WORLD)[place], part if place == rank else left)
    if numel > WORLD:
        inputs = list(sample(rank, numel, dtype, salt).tensor_split(WORLD))
        piece = torch.empty_like(inputs[rank])
        dist.reduce_scatter(piece, inputs, how)
        assert same_bits(piece, expected.tensor_split(WORLD)[rank])


def _ordered(peer: Peer) -> None:
    _native(peer, exact=True)
    assert type(dist.group.WORLD) is OrderedProcessGroup
    for (salt, numel), dtype, op in product(enumerate(SIZES), FLOATS, OPS):
        _whole(peer.slot, salt, numel, dtype, op)
        _cut(peer.slot, salt, numel, dtype, op)
    data = sample(peer.slot, 1000, torch.float32)
    dist.all_reduce(data, ReduceOp.AVG)
    assert same_bits(data, folded(1000, torch.float32, "SUM") / WORLD)
    mine = sample(peer.slot, 1000, torch.float32)
    total = funcol.wait_tensor(funcol.all_reduce(mine, "sum", dist.group.WORLD))
    assert same_bits(total, folded(1000, torch.float32, "SUM"))
    with pytest.raises(ConfigurationError, match=r"got \[2, 1, 1, 1\] elements in and 3 out"):
        dist.reduce_scatter_tensor(torch.zeros(3), torch.zeros(5))
    with pytest.raises(ConfigurationError, match=r"PREMUL_SUM of torch\.float32 is not supported"):
        dist.all_reduce(data, dist._make_nccl_premul_sum(2.0))


@pytest.fixture
def made_before_the_fork() -> Iterator[None]:
    """Make what all workers share before the fork; it is let go at the end."""
    for (salt, numel), dtype, op in product(enumerate(SIZES), FLOATS, OPS):
        folded(numel, dtype, op, salt)
    yield
    made.cache_clear()
    folded.cache_clear()


@pytest.mark.timeout(120)
def test_native_sums_of_floats_are_made_in_rank_order(made_before_the_fork: None) -> None:
    with Workers(WORLD, _ordered) as workers:
        workers.commit(1, range(WORLD))
        workers.join()


def _unordered(peer: Peer) -> None:
    _native(peer, exact=False)
    assert type(dist.group.WORLD) is DeviceProcessGroup
    data = sample(peer.slot, 1000, torch.float32)
    dist.all_reduce(data)
    peer.tell(same_bits(data, folded(1000, torch.float32, "SUM")))


def test_native_groups_themselves_have_another_order() -> None:
    """A control of the test above, which could see no difference otherwise."""
    with Workers(WORLD, _unordered) as workers:
        workers.commit(1, range(WORLD))
        assert list(workers.hear_all().values()) == [False] * WORLD
        workers.join()


# ---- the calls -----------------------------------------------------------------------------------


@pytest.fixture
def exact() -> Iterator[StartDetached]:
    """Slot 0 of three, whose native sums have to be in order."""
    one = StartDetached()
    one.table = GroupTable(one.links, maker=one.maker, exact=True)
    yield one
    one.links.close()


def _options(**values: Any) -> Any:
    return SimpleNamespace(reduceOp=ReduceOp.SUM, **values)


def test_a_synchronous_sum_stays_on_the_current_stream(exact: StartDetached) -> None:
    exact.maker.runs_on_the_current_stream = True
    work = exact.group("tp").allreduce([torch.ones(2)], _options(asyncOp=False))
    assert exact.maker.take() == ["make tp@1 0/3", "tp@1.alltoall", "tp@1.mark.wait"]
    work.wait()
    assert exact.maker.take() == ["tp@1.mark.wait"]


def test_an_asynchronous_one_runs_apart_and_its_wait_is_for_its_end(exact: StartDetached) -> None:
    exact.maker.runs_on_the_current_stream = True
    exact.maker.done = False
    group = exact.group("dp")
    work = group._reduce_scatter_base(torch.ones(2), torch.ones(6), _options(asyncOp=True))
    calls = ["tp@1.apart 2", "tp@1.alltoall", "tp@1.mark.wait", "tp@1.back"]
    assert exact.maker.take()[1:] == [call.replace("tp", "dp") for call in calls]
    assert not work.is_completed()
    exact.maker.groups["dp@1"].works[0].done = True  # the copies are there, and are being added
    assert not work.is_completed() and not exact.table.device_facts()


def test_an_abort_waits_until_all_of_a_sum_is_launched(exact: StartDetached) -> None:
    """It ends with what is on the stream then: later additions would write into what is redone."""
    group = exact.group("dp")
    assert isinstance(group, OrderedProcessGroup)

    def calls() -> None:
        exact.links.interrupt(2, "test")
        assert not exact.maker.groups["dp@1"].abort_began.wait(communicator.LAUNCH_LIMIT_S / 4)

    work = group.engine.run(group, "allreduce", calls, [torch.ones(1)], asynchronous=True)
    assert exact.maker.groups["dp@1"].aborted.wait(LIMIT_S)
    assert exact.maker.take()[1:] == ["dp@1.apart 1", "dp@1.back", "dp@1.abort"]
    with pytest.raises(EpochChanged):
        work.wait()


@pytest.mark.parametrize("call", ["alltoall", "alltoall again"])
def test_a_sum_that_the_doorbell_cuts_raises(
    exact: StartDetached, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, size in SMALL.items():
        monkeypatch.setattr(ordered_sums, name, size)
    heard: list[str] = []

    def ring(native: Any, now: str) -> None:
        heard.append(now if not heard else f"{now} again")
        if heard[-1] == call:
            exact.links.interrupt(2, "test")

    exact.maker.on_call = ring
    with pytest.raises(EpochChanged):
        exact.group("dp").allreduce([torch.ones(10_000)])
    assert heard[-1] == call
    assert exact.maker.groups["dp@1"].aborted.wait(LIMIT_S)
    assert exact.maker.take()[-2:] == ["dp@1.back", "dp@1.abort"]


@pytest.mark.parametrize("members", [(0, 1), (0, 1, 2)])
def test_what_has_one_order_is_native(exact: StartDetached, members: tuple[int, ...]) -> None:
    group = exact.group("tp", members)
    many = len(members) > 2
    data = torch.ones(6, dtype=torch.int64 if many else torch.float32)
    group.allreduce([data])
    group._reduce_scatter_base(data[: 6 // len(members)], data)
    group.allreduce([torch.ones(2)], ReduceOp.MAX)
    called = ["allreduce", "_reduce_scatter_base", "allreduce"]
    assert exact.maker.take()[1:] == [f"tp@1.{call}" for call in called]


def test_a_large_sum_goes_to_the_owners_and_back_chunk_by_chunk(
    exact: StartDetached, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, size in SMALL.items():
        monkeypatch.setattr(ordered_sums, name, size)
    exact.group("dp").allreduce([torch.ones(40_000)], _options(asyncOp=False))
    calls = [one for one in exact.maker.take() if one.endswith("alltoall")]
    assert len(calls) == 2 * 3  # 160,000 bytes, 70,000 at a time
    (facts,) = exact.table.device_facts().values()
    assert facts.collectives == 6 and facts.idle


def test_a_communicator_of_ordered_sums_outlives_a_loss_elsewhere(exact: StartDetached) -> None:
    exact.open(2, (0, 1, 2, 3))
    group, whole = exact.group("tp"), exact.group("dp", (0, 1, 2, 3))
    for one in (group, whole, group):
        one.allreduce([torch.ones(2)], _options(asyncOp=False))
    exact.maker.take()
    exact.change(3, (0, 1, 2), {3})
    for one in (group, whole):
        one.allreduce([torch.ones(2)], _options(asyncOp=False))
    made_anew = [entry for entry in exact.maker.take() if entry.startswith("make")]
    assert made_anew == ["make dp@3 0/3"]
    exact.links.interrupt(4, "test")
    answers = exact.answers((0, 1, 2), collectives=2)  # another member was one sum short
    assert answers[0]["tp@2"].collectives == 3
    exact.open(4, (0, 1, 2))
    exact.table.settle(answers)
    group.allreduce([torch.ones(2)], _options(asyncOp=False))
    assert "make tp@4 0/3" in exact.maker.take()


def test_a_sum_within_a_block_is_refused(exact: StartDetached) -> None:
    group, device = exact.group("dp"), torch.device("cpu")
    group._start_coalescing(device)
    with pytest.raises(ConfigurationError, match=r"within a coalescing block.*consistency to fast"):
        group.allreduce([torch.ones(2)])
    group.allreduce([torch.ones(2)], ReduceOp.MAX)
    group._end_coalescing(device).wait()


def test_who_builds_beside_the_job_sums_alone(exact: StartDetached) -> None:
    exact.links.detached = True
    data = torch.ones(2)
    exact.group("dp").allreduce([data]).wait()
    assert data.tolist() == [3.0, 3.0] and exact.maker.log == []


class RecordedStream:
    """The calls that NcclGroup makes of its own stream, and of torch.cuda about it, recorded."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def __enter__(self) -> None:
        self.log.append("in")

    def __exit__(self, *_: object) -> None:
        self.log.append("out")

    def wait_stream(self, other: str) -> None:
        self.log.append(f"behind {other}")

    def synchronize(self) -> None:
        self.log.append("synchronize")


def test_an_abort_ends_with_what_follows_the_kernels_on_the_stream_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(c10d_tables, "wrap_backend", lambda *args, **kwargs: None)
    log: list[str] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda: RecordedStream(log))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "the current one")
    backend = SimpleNamespace(abort=lambda: log.append("abort"))
    used = SimpleNamespace(record_stream=lambda stream: log.append("recorded"))
    group, unused = (nccl.NcclGroup(backend, None, 0, 3) for _ in range(2))
    for _ in range(2):
        with group.apart([used]):
            log.append("calls")
    group.abort()
    once = ["behind the current one", "recorded", "in", "calls", "out"]
    assert log == [*once, *once, "abort", "synchronize"]
    unused.abort()
    assert log[-2:] == ["synchronize", "abort"]
