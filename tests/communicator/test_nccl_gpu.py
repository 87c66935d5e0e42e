"""The NCCL engine on real GPUs: one process each, a loss, and what goes on after it."""

import os
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elaswave_plugin.communicator.device.calls import DeviceProcessGroup
from elaswave_plugin.communicator.process_group import GroupTable
from elaswave_plugin.errors import EpochChanged
from tests.communicator.forked import Peer, Workers

# device_count() asks the driver and leaves CUDA uninitialised: the workers are forked from here.
GPUS = torch.cuda.device_count() if dist.is_nccl_available() else 0
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS < 1, reason="no CUDA device with NCCL on this machine"),
]
three_gpus = pytest.mark.skipif(GPUS < 3, reason=f"needs 3 CUDA devices, this machine has {GPUS}")


def _native(peer: Peer, count: int, *, exact: bool = False) -> Any:
    torch.cuda.set_device(peer.slot % count)
    peer.groups = GroupTable(peer.links, gpu_engine="auto", exact=exact)
    peer.install()
    return dist.group.WORLD


def _one(peer: Peer) -> None:
    world = _native(peer, 1)
    assert type(world) is DeviceProcessGroup
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    data = torch.arange(8.0, device="cuda")
    dist.all_reduce(data)
    assert data.tolist() == list(range(8))
    (held,) = peer.groups.device_facts().values()
    assert held.collectives == 1


def test_a_world_of_one_runs_on_nccl() -> None:
    with Workers(1, _one) as workers:
        workers.commit(1, (0,))
        workers.join()


def _shared(peer: Peer) -> None:
    world = _native(peer, 1)
    assert type(world) is not DeviceProcessGroup
    data = torch.ones(1000, device="cuda")
    dist.all_reduce(data)
    assert torch.all(data == 2.0)


def test_two_workers_on_one_gpu_stay_with_host_memory() -> None:
    with Workers(2, _shared) as workers:
        workers.commit(1, (0, 1))
        workers.join()


def _kept_and_made_anew(peer: Peer) -> None:
    _native(peer, 1)
    data = torch.ones(4, device="cuda")
    dist.all_reduce(data)
    torch.cuda.synchronize()
    names: list[str] = []
    for epoch in (2, 3):
        peer.links.interrupt(epoch, "test")
        facts = peer.groups.device_facts()
        names += facts
        peer.tell("quiesced")
        peer.groups.edit_all(peer.open(), set())
        peer.groups.settle({0: facts} if epoch == 2 else {})  # without facts it is aborted
        dist.all_reduce(data)
        torch.cuda.synchronize()
    (held,) = peer.groups.device_facts().values()
    assert [*names, held.name] == ["0@1", "0@1", "0@3"]
    assert data.tolist() == [1.0] * 4


def test_a_communicator_is_kept_then_aborted_and_made_anew() -> None:
    with Workers(1, _kept_and_made_anew) as workers:
        workers.commit(1, (0,))
        for epoch in (2, 3):
            assert workers.hear(0) == "quiesced"
            workers.commit(epoch, (0,))
        workers.join()


def _lossy(exact: bool, peer: Peer) -> None:
    world = _native(peer, 3, exact=exact)
    assert isinstance(world, DeviceProcessGroup)
    dist.all_reduce(torch.ones(1, device="cuda"))
    torch.cuda.synchronize()
    peer.tell("ready")
    if peer.slot == 2:
        peer.hear()
    data = torch.ones(1 << 20, device="cuda")
    work = dist.all_reduce(data, async_op=True)
    assert work is not None
    peer.tell("in")
    torch.cuda.synchronize()  # blocked in CUDA: the doorbell has to release it
    with pytest.raises(EpochChanged):
        work.wait()
    peer.tell(peer.groups.device_facts())
    ranks = peer.open()
    peer.groups.edit_all(ranks, {2})
    peer.groups.settle(peer.hear())
    data = torch.full((1000,), float(peer.slot), device="cuda")
    dist.all_reduce(data)
    assert torch.all(data == 1.0)
    got = torch.zeros(4, device="cuda")
    mine = torch.full((4,), float(peer.slot), device="cuda")
    other = 1 - peer.slot
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, mine, other), dist.P2POp(dist.irecv, got, other)]
    ):
        work.wait()
    assert torch.all(got == float(other))


@three_gpus
@pytest.mark.parametrize("exact", [False, True])
def test_a_loss_in_the_middle_of_an_all_reduce(exact: bool) -> None:
    with Workers(3, partial(_lossy, exact)) as workers:
        workers.commit(1, range(3))
        workers.hear_all()
        survivors = (0, 1)
        assert [workers.hear(slot) for slot in survivors] == ["in"] * 2
        workers.kill(2)
        workers.interrupt(2, survivors)
        facts = {slot: workers.hear(slot) for slot in survivors}
        assert facts == {0: {}, 1: {}}  # it was in flight, so it is aborted
        workers.commit(2, survivors)
        for slot in survivors:
            workers.tell(slot, facts)
        workers.join()


def _in_order(peer: Peer) -> None:
    _native(peer, 3, exact=True)
    for dtype, numel in product((torch.float32, torch.bfloat16), (1, 3, 3_000, 30_000_000)):
        generator = torch.Generator().manual_seed(numel)
        terms = [torch.randn(numel, generator=generator).to(dtype) for _ in range(3)]
        expected = ((terms[0] + terms[1]) + terms[2]).cuda()
        for how in (False, True):
            data = terms[peer.slot].cuda()
            work = dist.all_reduce(data, async_op=how)
            if how:
                assert work is not None and work.wait()
            assert torch.equal(data, expected)
            if numel % 3 == 0:
                # As Megatron-Core: into the own part of what is summed.
                data = terms[peer.slot].cuda()
                piece = data.chunk(3)[peer.slot]
                work = dist.reduce_scatter_tensor(piece, data, async_op=how)
                if how:
                    assert work is not None and work.wait()
                assert torch.equal(piece, expected.chunk(3)[peer.slot])
    torch.cuda.synchronize()
    (held,) = peer.groups.device_facts().values()
    assert held.idle


@three_gpus
def test_sums_in_rank_order() -> None:
    """Alone and beside what the current stream does; large ones in several chunks."""
    with Workers(3, _in_order) as workers:
        workers.commit(1, range(3))
        workers.join()
