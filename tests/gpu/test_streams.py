"""Streams that run later, under native groups and seals: a missing wait is seen as wrong bytes.

Each behaviour is tested as it is, and again with the line taken out that keeps it.
"""

import mmap
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import AllreduceOptions, BroadcastOptions

from elaswave_plugin.communicator.device import calls, nccl
from elaswave_plugin.communicator.device.engine import DeviceWork
from elaswave_plugin.errors import EpochChanged, SnapshotUnreadableError
from elaswave_plugin.snapshot import host_copies
from elaswave_plugin.snapshot.host_copies import HostCopies, PinnedBlocks
from elaswave_plugin.snapshot.snapshot_pool import SnapshotPool, VerifiedReader, capacity_of
from tests.gpu import streams
from tests.gpu.sabotage import sabotage
from tests.gpu.stream_groups import Worker, worker

GARBAGE = 1 << 40
ABORT_S = 0.3


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    """A group whose sums are NCCL's own."""
    with worker(monkeypatch) as one:
        yield one


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    """A group whose sums are made in rank order, apart from the current stream."""
    with worker(monkeypatch, exact=True) as one:
        yield one


def computed(kernels: int = 1) -> Any:
    """Four threes that so many kernels of the current stream make later."""
    made: Any = streams.on_device(torch.full((4,), 3.0 - kernels))
    for _ in range(kernels):
        made = made + 1.0
    return made


# Until they have run, a collective that did not wait for them has long been done.
MANY = 12


# ---- the device itself ---------------------------------------------------------------------------


def test_work_is_done_later_and_the_host_sees_it_when_it_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with streams.installed(monkeypatch) as cuda:
        target = torch.zeros(4)
        with cuda.current_stream().held():
            made = computed()
            assert made.device.type == "cuda"
            assert made.host.tolist() != [3.0] * 4
            target.copy_(computed(), non_blocking=True)
            assert target.tolist() == [0.0] * 4
        assert made.cpu().tolist() == [3.0] * 4
        cuda.synchronize()
        assert target.tolist() == [3.0] * 4


def test_two_streams_know_nothing_of_each_other_without_an_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with streams.installed(monkeypatch) as cuda:
        for waits in (False, True):
            other = cuda.make_stream()
            with cuda.current_stream().held():
                made = computed()
                if waits:
                    other.wait_stream(cuda.current_stream())
                with cuda.stream(other):
                    seen = made + 0.0
                if not waits:
                    other.synchronize()
            other.synchronize()
            assert (seen.host.tolist() == [3.0] * 4) == waits


# ---- wait(), events, aborts ----------------------------------------------------------------------


def test_wait_orders_the_stream_and_not_the_host(fast: Worker) -> None:
    fast.maker.others.clear()
    data = computed()
    work = fast.group.allreduce([data])
    began_s = time.monotonic()
    work.wait()
    after = data + 1.0
    assert time.monotonic() - began_s < streams.LIMIT_S / 2
    assert not work.is_completed()
    fast.maker.others.set()
    assert after.cpu().tolist() == [10.0] * 4
    assert work.is_completed()


def test_without_the_wait_of_the_stream_other_bytes_are_seen(
    fast: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    sabotage(monkeypatch, DeviceWork, "wait", "self._inner.wait)")
    fast.maker.others.clear()
    data = computed()
    fast.group.allreduce([data]).wait()
    assert (data + 1.0).cpu().tolist() != [10.0] * 4
    fast.maker.others.set()


def test_a_call_on_the_current_stream_is_in_flight_until_its_mark(fast: Worker) -> None:
    options = AllreduceOptions()
    options.asyncOp = False
    data = computed()
    fast.maker.others.clear()
    work = fast.group.allreduce([data], options)
    assert not work.is_completed()
    fast.lose_one()
    with pytest.raises(EpochChanged):
        work.wait()
    assert fast.maker.backends[0].aborted.is_set()


def test_without_the_record_of_the_mark_it_counts_as_done(
    fast: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    sabotage(monkeypatch, nccl.StreamMark, "__init__", "self._event.record()")
    options = AllreduceOptions()
    options.asyncOp = False
    fast.maker.others.clear()
    assert fast.group.allreduce([computed()], options).is_completed()


def test_sums_in_rank_order_come_behind_what_makes_their_terms(exact: Worker) -> None:
    data = computed(MANY)
    work = exact.group.allreduce([data])
    work.wait()
    assert (data + 1.0).cpu().tolist() == [10.0] * 4


def test_without_the_wait_of_the_stream_apart_sums_are_of_other_bytes(
    exact: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    sabotage(monkeypatch, nccl.NcclGroup, "apart", "self._apart.wait_stream(")
    data = computed(MANY)
    exact.group.allreduce([data]).wait()
    assert (data + 1.0).cpu().tolist() != [10.0] * 4


def _aborted_sum(one: Worker) -> Any:
    """The memory of a sum whose kernels are on the device and do not end before `may_end`."""
    data = computed()
    one.cuda.current_stream().synchronize()
    one.maker.others.clear()
    one.group.allreduce([data])
    one.maker.backends[0].may_end.clear()
    return data


def _filled_with_sevens(one: Worker, data: Any) -> bool:
    """Use the memory for something else, let all kernels end, and look what is there."""
    data.fill_(7.0)
    one.cuda.current_stream().synchronize()
    one.maker.backends[0].may_end.set()
    one.cuda.synchronize()
    found: list[float] = data.host.tolist()
    return found == [7.0] * 4


def test_what_is_aborted_writes_nothing_any_more(exact: Worker) -> None:
    data = _aborted_sum(exact)
    threading.Timer(ABORT_S, exact.maker.backends[0].may_end.set).start()
    exact.lose_one()
    assert _filled_with_sevens(exact, data)


def test_without_the_wait_of_the_abort_it_writes_into_memory_of_others(
    exact: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    sabotage(monkeypatch, nccl.NcclGroup, "abort", "self._apart.synchronize()")
    data = _aborted_sum(exact)
    exact.lose_one()
    assert not _filled_with_sevens(exact, data)


def _looked_up_behind_an_abort(one: Worker) -> None:
    """Queue a look-up behind a broadcast of its ids, which a loss ends; raises as a device does."""
    table = streams.on_device(torch.zeros(8, 2))
    ids: Any = streams.on_device(torch.full((4,), GARBAGE))
    options = BroadcastOptions()
    options.rootRank = 2
    one.maker.others.clear()
    one.group.broadcast([ids], options).wait()
    torch.embedding(table, ids)
    one.lose_one()
    one.cuda.synchronize()


def test_a_look_up_behind_an_abort_finds_ids(fast: Worker) -> None:
    _looked_up_behind_an_abort(fast)


def test_without_blank_ids_it_is_an_error_of_the_device(
    fast: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "blank_ids", lambda *_: None)
    with pytest.raises(AssertionError, match="index out of range"):
        _looked_up_behind_an_abort(fast)


# ---- snapshots -----------------------------------------------------------------------------------


def _sealed_and_read(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A seal of what a kernel still makes, read back; raises SnapshotUnreadableError."""
    fds = os.memfd_create("a"), os.memfd_create("b")
    with streams.installed(monkeypatch):
        pool = SnapshotPool(
            fds,
            slot=0,
            capacity_bytes=capacity_of(mmap.PAGESIZE),
            needed_bytes=0,
            available_bytes=mmap.PAGESIZE,
        )
        sealed = pool.begin_seal(
            step=1,
            epoch=1,
            ranks=[0],
            parts=[computed(), computed() + 1.0],
            capsule=b"capsule",
            before_seal=lambda: None,
        )()
        # What comes next overwrites the state on the device: the seal has its own bytes by now.
        found = torch.empty(8)
        reader = VerifiedReader(sealed, pool.reader(sealed.buffer))
        torch.cuda.synchronize()
        reader.read_ranges([(0, found.numpy().data.cast("B"))])
    for fd in fds:
        os.close(fd)
    values: list[float] = found.tolist()
    return values


def test_a_seal_has_the_bytes_that_the_device_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _sealed_and_read(monkeypatch) == [3.0] * 4 + [4.0] * 4


def test_without_the_wait_of_its_copies_a_seal_does_not_match(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sabotage(monkeypatch, HostCopies, "_from_device", "copied.synchronize()")
    with pytest.raises(SnapshotUnreadableError):
        _sealed_and_read(monkeypatch)


def test_without_the_wait_for_what_was_queued_a_seal_is_of_older_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sabotage(monkeypatch, HostCopies, "_copy", "event.synchronize()")
    assert _sealed_and_read(monkeypatch) != [3.0] * 4 + [4.0] * 4


def test_a_state_that_an_aborted_collective_may_have_spoiled_is_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is known once the kernels before the seal have run."""

    def interrupted() -> None:
        assert part.host.tolist() == [3.0] * 4
        raise EpochChanged(2, "a worker was lost")

    with streams.installed(monkeypatch):
        part = computed(MANY)
        with pytest.raises(EpochChanged):
            next(HostCopies().of([part], settled=interrupted)(np.zeros(4, np.float32)))


def test_a_part_is_in_place_up_to_what_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    found, told = np.zeros(9, np.float32), []
    with streams.installed(monkeypatch):
        parts = [torch.tensor([1.0]), streams.on_device(torch.arange(8.0)) + 2.0]
        for stop in HostCopies(piece_elements=4).of(parts)(found):
            assert found[:stop].tolist() == [float(one) for one in range(1, stop + 1)]
            told.append(stop)
    assert told == [1, 4, 8, 9]


# ---- pinned memory -------------------------------------------------------------------------------


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[streams.Runtime]:
    """A runtime that pins, in blocks of four pages."""
    monkeypatch.setattr(host_copies, "BLOCK_BYTES", 16384)
    with streams.installed(monkeypatch) as cuda:
        yield cuda.runtime


def test_what_is_used_is_pinned_and_no_more(runtime: streams.Runtime) -> None:
    memory = mmap.mmap(-1, 100_000)
    blocks = PinnedBlocks(memoryview(memory))
    begin = np.frombuffer(memory, np.uint8).ctypes.data
    for used, lengths in (
        (20_000, [16_384, 3_616]),
        (10_000, [16_384, 3_616]),
        (32_768, [16_384, 16_384]),
        (50_000, [16_384, 16_384, 16_384, 848]),
    ):
        blocks.pin(used)
        assert list(runtime.pinned.values()) == lengths
        assert list(runtime.pinned) == [begin + 16_384 * number for number in range(len(lengths))]
    blocks.free(33_000)
    assert list(runtime.pinned.values()) == [16_384, 16_384]
    blocks.free(0)
    assert not runtime.pinned


def test_what_cuda_refuses_stays_as_it_is(
    runtime: streams.Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[str] = []
    monkeypatch.setattr(host_copies, "_take_error", lambda: taken.append("error"))
    runtime.limit_bytes = 20_000
    blocks = PinnedBlocks(memoryview(mmap.mmap(-1, 100_000)))
    for _ in range(2):
        blocks.pin(60_000)
        assert list(runtime.pinned.values()) == [16_384]
        assert (blocks.refused, taken) == ("out of memory", ["error"])
    blocks.free(0)
    assert not runtime.pinned


def test_memory_is_given_back_once_no_gpu_writes_to_it(
    monkeypatch: pytest.MonkeyPatch, runtime: streams.Runtime
) -> None:
    """A smaller shard frees pages of the larger one before it, which must not be pinned."""
    given_back: list[int] = []

    class Map(mmap.mmap):
        def madvise(self, how: int, start: int, length: int) -> None:
            begin = np.frombuffer(self, np.uint8).ctypes.data
            pinned = [(one - begin, taken) for one, taken in runtime.pinned.items()]
            ours = [at + taken for at, taken in pinned if 0 <= at < len(self)]
            assert max(ours) <= start
            given_back.append(length)

    monkeypatch.setattr(mmap, "mmap", Map)
    fds = os.memfd_create("a"), os.memfd_create("b")
    room = capacity_of(1 << 17)
    pool = SnapshotPool(fds, slot=0, capacity_bytes=room, needed_bytes=0, available_bytes=room)
    for numel in (30_000, 30_000, 9_000):
        part = streams.on_device(torch.ones(numel)) + 1.0
        asked = {"epoch": 1, "ranks": [0], "capsule": b"", "before_seal": lambda: None}
        pool.begin_seal(step=1, parts=[part], **asked)()
        torch.cuda.synchronize()
    assert len(given_back) == 3
    assert runtime.pinned
    pool.close()
    assert not runtime.pinned
    for fd in fds:
        os.close(fd)
