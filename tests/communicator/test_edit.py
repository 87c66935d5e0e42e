"""Losing workers: interrupt, open the next epoch, edit every group, go on."""

import gc
import os
import signal
import time
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as funcol
from torch.distributed.distributed_c10d import _coalescing_manager as coalescing

from elaswave_plugin.communicator.process_group import check_growing_groups
from elaswave_plugin.errors import ConfigurationError, EpochChanged
from tests.communicator.forked import LIMIT_S, Peer, Workers, connected, run

LARGE = 4 << 20  # float32 elements: 16 MB


def check_all(peer: Peer) -> None:
    """All-reduce the slot numbers in every group, in two sizes."""
    for group in peer.groups.groups:
        for numel in (3, 300_001):
            data = torch.full((numel,), float(peer.slot + 1))
            dist.all_reduce(data, group=group)
            assert torch.all(data == sum(slot + 1 for slot in group.members)), group


def _reduce_until_interrupted(peer: Peer) -> None:
    world = peer.install()
    half = [slot for slot in world if slot % 2 == peer.slot % 2]
    for parity in (0, 1):
        dist.new_group([slot for slot in world if slot % 2 == parity])
    data = torch.ones(LARGE)
    spectator = torch.zeros(LARGE)
    late = peer.groups.create("late", world)

    def reduce_for_ever() -> None:
        while True:
            data.fill_(1.0)
            work = late.allreduce([spectator.fill_(0.0)])
            dist.all_reduce(data)
            work.wait()
            assert torch.all(data == len(world))
            peer.tell("reduced")

    with pytest.raises(EpochChanged) as change:
        reduce_for_ever()
    assert change.value.epoch == 2
    data.fill_(-7.0)
    spectator.fill_(-9.0)
    ranks = peer.recover()
    check_all(peer)
    assert dist.get_rank() == ranks.index(peer.slot)
    assert dist.get_world_size() == len(ranks)
    assert set(peer.groups.groups[1].members) <= {*half}
    # Nothing of the old epoch may have landed in the tensors of the interrupted operations.
    assert torch.all(data == -7.0)
    assert torch.all(spectator == -9.0)
    peer.tell("verified")


@pytest.mark.slow
def test_twenty_losses_in_the_middle_of_a_large_all_reduce() -> None:
    seconds = []
    for round_number in range(20):
        count = (4, 5, 6, 8)[round_number % 4]
        victim = round_number * 3 % count
        with Workers(count, _reduce_until_interrupted) as workers:
            workers.commit(1, range(count))
            workers.hear_all()
            rest = tuple(slot for slot in range(count) if slot != victim)
            time.sleep(0.003 * (round_number % 7))  # another moment of the next all-reduce
            killed_s = time.monotonic()
            workers.kill(victim)
            workers.interrupt(2, rest)
            for slot in rest:
                while workers.hear(slot) != "quiesced":
                    pass
            workers.commit(2, rest)
            assert set(workers.hear_all(rest).values()) == {"verified"}
            seconds.append(time.monotonic() - killed_s)
            workers.join()
    print(f"kill to every group verified, ms: {[round(1000 * s) for s in seconds]}")
    assert sorted(seconds)[10] < 2.0


def _one_apart(peer: Peer) -> None:
    peer.install()
    mine = torch.full((5,), float(peer.slot))
    dist.all_reduce(mine)
    if peer.slot == 0:
        dist.broadcast(torch.full((5,), 77.0), 0)  # nobody takes it in this epoch
        peer.tell("ahead")
    elif peer.slot == 1:
        peer.tell("behind")
        assert peer.hear() == "go on"
        # The doorbell comes by another way and may be later. Before it, this all-reduce would meet
        # the broadcast of slot 0, and say so: the members called different operations.
        limit_s = time.monotonic() + LIMIT_S
        while peer.links.interrupted is None:
            assert time.monotonic() < limit_s, "the doorbell never rang"
            os.sched_yield()
    else:
        peer.tell("stays out")
        peer.hear()
    with pytest.raises(EpochChanged) as change:
        dist.all_reduce(mine)
    assert (change.value.epoch, change.value.reason) == (2, "slot 2 is lost")
    peer.recover()
    got = torch.full((5,), 5.0 + peer.slot)
    dist.broadcast(got, 0)
    assert torch.all(got == 5.0), got
    check_all(peer)
    peer.tell("verified")


def test_two_survivors_may_be_one_operation_apart() -> None:
    with Workers(3, _one_apart) as workers:
        workers.commit(1, range(3))
        workers.hear_all()
        workers.kill(2)
        workers.interrupt(2, (0, 1), "slot 2 is lost")
        assert workers.hear(0) == "quiesced"
        workers.tell(1, "go on")
        assert workers.hear(1) == "quiesced"
        workers.commit(2, (0, 1))
        assert workers.hear_all() == {0: "verified", 1: "verified"}
        workers.join()


def _early_and_late(peer: Peer) -> None:
    peer.install()
    dist.barrier()
    peer.recover()
    data = torch.full((LARGE // 8,), float(peer.slot + 1))
    if peer.slot == 0:
        small = dist.isend(torch.tensor([42]), 1)
        large = dist.all_reduce(data, async_op=True)
        assert small is not None and large is not None
        small.wait()
        peer.tell("sent")
        large.wait()
    else:
        got = torch.zeros(1, dtype=torch.int64)
        dist.recv(got, 0)
        assert got.item() == 42
        dist.all_reduce(data)
    assert torch.all(data == 3.0)


def test_frames_of_a_newer_epoch_wait_until_it_is_opened() -> None:
    with Workers(2, _early_and_late) as workers:
        workers.commit(1, (0, 1))
        assert workers.hear_all() == {0: "quiesced", 1: "quiesced"}
        workers.commit(5, (0, 1), to=(0,))
        assert workers.hear(0) == "sent"
        workers.commit(5, (0, 1), to=(1,))
        workers.join()


def _with_a_zombie(peer: Peer) -> None:
    peer.install()
    data = torch.ones(LARGE)
    dist.all_reduce(data)
    peer.tell("warm")
    try:
        while True:
            dist.all_reduce(data)
    except EpochChanged:
        data.fill_(-1.0)
    peer.recover()
    for number in range(200):
        check = torch.full((1000,), float(peer.slot + number))
        dist.all_reduce(check)
        assert torch.all(check == 1.0 + 2 * number)
        if number == 20:
            peer.tell("verified")
            assert peer.hear() == "the zombie runs"
    assert connected(peer.links) == [1 - peer.slot]
    assert torch.all(data == -1.0)
    peer.tell("still right")


def test_a_zombie_cannot_deliver_into_the_new_epoch() -> None:
    with Workers(3, _with_a_zombie) as workers:
        workers.commit(1, range(3))
        workers.hear_all()
        workers.stop(2)
        workers.interrupt(2, (0, 1))
        for slot in (0, 1):
            assert workers.hear(slot) == "quiesced"
        workers.commit(2, (0, 1))
        for slot in (0, 1):
            assert workers.hear(slot) == "verified"
        workers.signal(2, signal.SIGCONT)
        os.waitpid(workers.pids[2], os.WCONTINUED)
        for slot in (0, 1):
            workers.tell(slot, "the zombie runs")
        for slot in (0, 1):
            assert workers.hear(slot) == "still right"
        workers.kill(2)
        workers.join()


def _release(peer: Peer) -> None:
    peer.install()
    dist.barrier()
    if peer.slot == 1:
        peer.tell("ready")
        peer.hear()
        return
    peer.tell("ready")
    assert peer.hear() == "slot 1 has stopped"
    tensors = [torch.ones(LARGE) for _ in range(4)]  # more than the sockets hold
    references = [weakref.ref(tensor) for tensor in tensors]
    works = [
        dist.all_reduce(tensors[0], async_op=True),
        dist.isend(tensors[1], 1, tag=1),
        dist.irecv(tensors[2], 1, tag=2),
        dist.isend(tensors[3], 1, tag=3),
    ]
    peer.tell("posted")
    for work in works:
        with pytest.raises(EpochChanged):
            work.wait()
        assert work.is_completed() and not work.is_success()
        assert isinstance(work.exception(), EpochChanged)
    del tensors
    gc.collect()
    assert [reference() for reference in references] == [None] * 4
    peer.tell("released")


def test_an_interrupted_operation_lets_go_of_its_tensors() -> None:
    with Workers(2, _release) as workers:
        workers.commit(1, (0, 1))
        workers.hear_all()
        workers.stop(1)
        workers.tell(0, "slot 1 has stopped")
        assert workers.hear(0) == "posted"
        workers.interrupt(2, (0,))
        assert workers.hear(0) == "released"
        workers.kill(1)
        workers.join()


def _edited_job(peer: Peer) -> None:
    from megatron.core import parallel_state as mpu

    peer.install()
    mpu.initialize_model_parallel(1, create_gloo_process_groups=False)
    dp = mpu.get_data_parallel_group()
    assert dp.size() == 4
    try:
        if peer.slot == 1:
            peer.tell("victim")
        dist.all_reduce(torch.ones(1) if peer.slot != 1 else peer.hear(), group=dp)
    except EpochChanged:
        pass
    assert peer.recover() == (0, 2, 3)
    rank = {0: 0, 2: 1, 3: 2}[peer.slot]
    assert mpu.get_data_parallel_group() is dp
    assert (dist.get_rank(), dist.get_world_size()) == (rank, 3)
    assert (dist.get_rank(dp), dist.get_world_size(dp), dp.rank(), dp.size()) == (rank, 3, rank, 3)
    assert dist.get_process_group_ranks(dp) == [0, 1, 2]
    assert [dist.get_global_rank(dp, r) for r in range(3)] == [0, 1, 2]
    assert dp.members == (0, 2, 3)
    gathered: list[object] = [None] * 3
    dist.all_gather_object(gathered, {"slot": peer.slot}, group=dp)
    assert gathered == [{"slot": 0}, {"slot": 2}, {"slot": 3}]
    _neighbours(rank, dp)
    _functional(dp)
    _coalesced(rank, dp)
    check_all(peer)


def _neighbours(rank: int, dp: dist.ProcessGroup) -> None:
    got = torch.zeros(4)
    operations = [
        dist.P2POp(dist.isend, torch.full((4,), float(rank)), (rank + 1) % 3, dp),
        dist.P2POp(dist.irecv, got, (rank - 1) % 3, dp),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert torch.all(got == (rank - 1) % 3)


def _functional(dp: dist.ProcessGroup) -> None:
    total = funcol.all_reduce(torch.ones(6), "sum", dp)
    assert torch.all(funcol.wait_tensor(total) == 3.0)


def _coalesced(rank: int, dp: dist.ProcessGroup) -> None:
    shards = [torch.zeros(2), torch.zeros(5)]
    with coalescing(dp, async_ops=True) as block:
        for shard in shards:
            whole = torch.arange(3).repeat_interleave(shard.numel()).float()
            dist.reduce_scatter_tensor(shard, whole, group=dp, async_op=True)
    block.wait()
    assert all(torch.all(shard == 3.0 * rank) for shard in shards)


def test_a_data_parallel_job_goes_on_without_slot_1() -> None:
    pytest.importorskip("megatron.core.parallel_state")
    with Workers(4, _edited_job) as workers:
        workers.commit(1, range(4))
        assert workers.hear(1) == "victim"
        workers.kill(1)
        workers.interrupt(2, (0, 2, 3))
        for slot in (0, 2, 3):
            assert workers.hear(slot) == "quiesced"
        workers.commit(2, (0, 2, 3))
        workers.join()


class _Reduce(torch.autograd.Function):
    """Reduces the gradient in the backward pass, as data parallelism does."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(grad)
        return grad


def _through_torch(peer: Peer) -> None:
    peer.install()
    dist.barrier()
    peer.tell("ready")
    if peer.slot == 1:
        peer.hear()
    total = funcol.all_reduce(torch.ones(3), "sum", dist.group.WORLD)
    peer.tell("posted")
    with pytest.raises(EpochChanged):
        funcol.wait_tensor(total)
    loss = _Reduce.apply(torch.ones(3, requires_grad=True)).sum()
    with pytest.raises(EpochChanged):
        loss.backward()
    work = peer.groups.world.allreduce if peer.groups.world else None
    assert work is not None
    with pytest.raises(EpochChanged):
        work([torch.ones(1)])
    peer.recover()
    waiting = dist.irecv(torch.zeros(1), 0)
    assert waiting is not None
    future = waiting.get_future()
    peer.links.interrupt(3, "again")
    with pytest.raises(EpochChanged):
        future.wait()


def test_an_interruption_passes_through_torch_as_it_is() -> None:
    """Functional collectives, the backward pass and futures all run through C++."""
    with Workers(2, _through_torch) as workers:
        workers.commit(1, (0, 1))
        workers.hear_all()
        workers.kill(1)
        assert workers.hear(0) == "posted"
        workers.interrupt(2, (0,))
        assert workers.hear(0) == "quiesced"
        workers.commit(2, (0,))
        workers.join()


def _twice(peer: Peer) -> None:
    ranks = peer.install()
    data = torch.ones(LARGE // 4)
    peer.tell("in")
    while len(ranks) > 2:
        try:
            while True:
                dist.all_reduce(data)
        except EpochChanged:
            try:
                ranks = peer.recover()
            except EpochChanged:
                ranks = peer.recover()
    check_all(peer)


def test_a_loss_during_the_recovery_supersedes_it() -> None:
    with Workers(4, _twice) as workers:
        workers.commit(1, range(4))
        workers.hear_all()
        workers.kill(3)
        workers.interrupt(2, (0, 1, 2))
        for slot in (0, 1, 2):
            assert workers.hear(slot) == "quiesced"
        workers.commit(2, (0, 1, 2), to=(0, 2))  # slot 1 dies before it hears of it
        workers.kill(1)
        workers.interrupt(3, (0, 2))
        for slot in (0, 2):
            assert workers.hear(slot) == "quiesced"
        workers.commit(3, (0, 2))
        workers.join()


@pytest.mark.parametrize(
    ("native", "members", "wanted"),
    [
        (True, (0, 1, 2, 3), "not carried with NCCL: set gpu_engine to host"),
        (False, (0, 1), "the group 'mine' has 2 of 4 workers, and with --reserve a group is of"),
    ],
)
def test_groups_that_cannot_grow_are_refused(
    native: bool, members: tuple[int, ...], wanted: str
) -> None:
    def table(native: bool, **groups: tuple[int, ...]) -> Any:
        return SimpleNamespace(has_native_groups=native, launched=lambda: groups)

    with pytest.raises(ConfigurationError, match=wanted):
        check_growing_groups(table(native, mine=members), width=4)
    check_growing_groups(table(False, dp=(0, 1, 2, 3), tp=(0,)), width=4)


def _passes_over(peer: Peer) -> None:
    """One of two has calls of its own answered here; the next one is of both again."""
    dist.barrier()
    if peer.slot == 1:
        peer.links.detached = True
        for _ in range(3):
            dist.all_reduce(torch.ones(2))
        peer.links.detached = False
    total = torch.full((2,), float(peer.slot + 1))
    dist.all_reduce(total)
    assert torch.equal(total, torch.full((2,), 3.0))


def test_calls_that_are_answered_here_are_none_of_the_group() -> None:
    run(2, _passes_over)
