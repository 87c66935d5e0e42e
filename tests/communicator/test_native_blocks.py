"""Blocks of coalesced calls and batches of sends and receives, against a stand-in for NCCL."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elaswave_plugin.communicator.groups import c10d_tables
from elaswave_plugin.communicator.process_group import GroupTable
from elaswave_plugin.errors import EpochChanged, LinkError
from tests.communicator.native_groups import RecordedGroup, StartDetached, reduce

LIMIT_S = 20.0


@pytest.fixture
def detached() -> Iterator[StartDetached]:
    one = StartDetached()
    yield one
    one.links.close()


def test_a_coalesced_block_is_one_native_work(detached: StartDetached) -> None:
    group = detached.group("dp")
    device = torch.device("cpu")
    group._start_coalescing(device)
    reduce(group), reduce(group)
    group._end_coalescing(device).wait()
    assert detached.maker.take() == [
        "make dp@1 0/3",
        "dp@1.connect",
        "dp@1._start_coalescing",
        "dp@1.allreduce",
        "dp@1.allreduce",
        "dp@1._end_coalescing",
        "dp@1._end_coalescing.wait",
    ]
    assert detached.table.device_facts()["dp@1"].collectives == 2


def test_a_group_that_has_connected_is_not_connected_for_a_block(detached: StartDetached) -> None:
    """NCCL would make a second communicator."""
    group = detached.group("dp")
    device = torch.device("cpu")
    reduce(group)
    for _ in range(2):
        group._start_coalescing(device)
        group._end_coalescing(device)
    assert "dp@1.connect" not in detached.maker.log


def test_an_open_block_is_aborted_and_its_end_raises(detached: StartDetached) -> None:
    group = detached.group("dp")
    device = torch.device("cpu")
    group._start_coalescing(device)
    detached.change(2, (0, 1, 2), set())
    assert detached.maker.take()[-2:] == ["dp@1._end_coalescing", "dp@1.abort"]
    with pytest.raises(EpochChanged):
        group._end_coalescing(device)
    reduce(group)
    assert detached.maker.take() == ["make dp@2 0/3", "dp@2.allreduce"]


def batch_of(tensor: torch.Tensor) -> Any:
    return [
        SimpleNamespace(op=op, tensor=tensor, group_peer=peer, tag=0)
        for op, peer in ((dist.isend, 1), (dist.irecv, 2))
    ]


@pytest.mark.parametrize(
    "call", ["connect", "_start_coalescing", "send", "recv", "_end_coalescing"]
)
def test_a_batch_that_the_doorbell_cuts_leaves_no_block_open(
    detached: StartDetached, call: str
) -> None:
    """NCCL counts open blocks by thread: in one, the calls of the next epoch are never launched."""

    def ring(native: RecordedGroup, now: str) -> None:
        if now == call:
            detached.links.interrupt(2, "test")

    detached.maker.on_call = ring
    with pytest.raises(EpochChanged):
        detached.group("pp").batch(batch_of(torch.ones(1)))
    assert detached.maker.groups["pp@1"].aborted.wait(LIMIT_S)
    calls = [entry.partition(".")[2] for entry in detached.maker.take()]
    assert calls.count("_start_coalescing") == calls.count("_end_coalescing") == (call != "connect")
    assert calls[-1] == "abort"


def test_a_block_whose_end_fails_ends_the_worker(detached: StartDetached) -> None:
    def failing(native: RecordedGroup, call: str) -> None:
        if call == "_end_coalescing":
            detached.links.interrupt(2, "test")
            raise RuntimeError("NCCL communicator was aborted")

    detached.maker.on_call = failing
    with pytest.raises(EpochChanged):
        detached.group("pp").batch(batch_of(torch.ones(1)))
    with pytest.raises(LinkError, match=r"'pp@1' failed: .*; this worker cannot go on"):
        detached.change(2, (0, 1, 2), set())


def test_a_batch_of_sends_and_receives_is_one_native_block(detached: StartDetached) -> None:
    group = detached.group("pp")
    works = group.batch(batch_of(torch.ones(1)))
    assert len(works) == 1
    assert [entry.partition(".")[2] for entry in detached.maker.take()[1:]] == [
        "connect",
        "_start_coalescing",
        "send",
        "recv",
        "_end_coalescing",
    ]


def test_torch_hands_a_batch_to_the_group_only_while_installed(detached: StartDetached) -> None:
    original = dist.batch_isend_irecv
    detached.table.install((0, 1, 2))
    try:
        assert dist.batch_isend_irecv is not original
        assert c10d_tables.c10d.batch_isend_irecv is dist.batch_isend_irecv
    finally:
        detached.table.uninstall()
    assert dist.batch_isend_irecv is original
    plain = GroupTable(detached.links)
    plain.install((0, 1, 2))
    try:
        assert dist.batch_isend_irecv is original
    finally:
        plain.uninstall()
