"""Every operation of ElasticProcessGroup, against native gloo and against an explicit fold."""

import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from itertools import permutations, product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp
from torch.distributed import _functional_collectives as funcol
from torch.distributed.distributed_c10d import _coalescing_manager as coalescing

from elaswave_plugin.communicator.groups.group_calls import ElasticProcessGroup
from elaswave_plugin.errors import ConfigurationError, EpochChanged, LinkError
from tests.communicator.forked import LIMIT_S, Peer, Workers, connected, run
from tests.communicator.operations import either, operations, options
from tests.communicator.samples import FOLDS, WORLD, folded, made, sample

SIZES = (0, 1, 3, 1000, 40_003, 600_011)
CHUNKED = ((2_500_003, torch.float32), (6_000_011, torch.bfloat16))
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
KINDS = (*FLOATS, *INTS, torch.bool)


@pytest.fixture
def made_before_the_fork() -> Iterator[None]:
    """Make what all workers share before the fork; it is let go at the end."""
    yield
    made.cache_clear()
    folded.cache_clear()


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal bit for bit, nan and signed zero included."""
    return left.dtype == right.dtype and torch.equal(
        left.contiguous().view(-1).view(torch.uint8), right.contiguous().view(-1).view(torch.uint8)
    )


def native_gloo(path: Path, rank: int) -> dist.ProcessGroup:
    """A gloo group of torch's own, beside ours."""
    store = dist.FileStore(str(path), WORLD)
    group: Any = dist.ProcessGroup(store, rank, WORLD)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    backend = dist.ProcessGroupGloo(store, rank, WORLD, timedelta(seconds=30))
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return group  # type: ignore[no-any-return]


def _fold_order(peer: Peer) -> None:
    rank = peer.slot
    for salt, numel in enumerate(SIZES):
        for dtype in KINDS:
            for name, (op, _) in FOLDS.items():
                expected = folded(numel, dtype, name, salt)
                data = sample(rank, numel, dtype, salt)
                dist.all_reduce(data, op)
                assert same_bits(data, expected), (numel, dtype, name)
                data = sample(rank, numel, dtype, salt)
                dist.reduce(data, 2, op)
                wanted = expected if rank == 2 else sample(rank, numel, dtype, salt)
                assert same_bits(data, wanted), (numel, dtype, name)
                if numel % WORLD == 0:
                    piece = torch.empty(numel // WORLD, dtype=dtype)
                    dist.reduce_scatter_tensor(piece, sample(rank, numel, dtype, salt), op)
                    assert same_bits(piece, expected.chunk(WORLD)[rank] if numel else piece)


@pytest.mark.timeout(120)
def test_reductions_are_a_left_to_right_fold_in_rank_order(made_before_the_fork: None) -> None:
    for (salt, numel), dtype, name in product(enumerate(SIZES), KINDS, FOLDS):
        folded(numel, dtype, name, salt)
    run(WORLD, _fold_order)


def _many_chunks(peer: Peer) -> None:
    for numel, dtype in CHUNKED:
        data, late = sample(peer.slot, numel, dtype), sample(peer.slot, numel, dtype, 1)
        works = [dist.all_reduce(data, async_op=True), dist.all_reduce(late, async_op=True)]
        for work in reversed(works):
            assert work is not None
            work.wait()
        assert same_bits(data, folded(numel, dtype, "SUM"))
        assert same_bits(late, folded(numel, dtype, "SUM", 1))


def test_a_large_all_reduce_in_many_chunks_is_the_same_fold(made_before_the_fork: None) -> None:
    for (numel, dtype), salt in product(CHUNKED, (0, 1)):
        folded(numel, dtype, "SUM", salt)
    run(WORLD, _many_chunks)


def _average(peer: Peer) -> None:
    for dtype in FLOATS:
        data = sample(peer.slot, 40_003, dtype)
        dist.all_reduce(data, ReduceOp.AVG)
        assert same_bits(data, folded(40_003, dtype, "SUM") / WORLD)
    bits = torch.tensor([1 << peer.slot, 3])
    dist.all_reduce(bits, ReduceOp.BOR)
    assert bits.tolist() == [15, 3]


def test_average_and_bitwise_reductions() -> None:
    run(WORLD, _average)


def _against_gloo(path: Path, peer: Peer) -> None:
    ours, gloo = dist.group.WORLD, native_gloo(path, peer.slot)
    for numel in (1, 17, 40_000):
        for dtype in (torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8):
            for name, call in operations(peer.slot, numel, dtype).items():
                for got, wanted in zip(call(ours), call(gloo), strict=True):
                    message = f"{name} of {numel} {dtype}"
                    if dtype.is_floating_point:
                        # Sums of numbers up to 1e4 cancel, so the absolute error counts too.
                        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-2, msg=message)
                    else:
                        assert torch.equal(got, wanted), message


def test_every_operation_agrees_with_native_gloo(tmp_path: Path) -> None:
    run(WORLD, partial(_against_gloo, tmp_path / "store"))


def _newer_calls(peer: Peer) -> None:
    """Make the calls that torch makes from 2.15 on, as torch makes them."""
    rank, world = peer.slot, dist.group.WORLD
    assert isinstance(world, ElasticProcessGroup)
    to_2 = options(dist.GatherOptions, rootRank=2)
    out = torch.zeros(WORLD * 3, 2) if rank == 2 else torch.empty(0)
    world.gather_single(out, torch.full((3, 2), float(rank)), to_2).wait()
    if rank == 2:
        assert out[:, 1].tolist() == [r for r in range(WORLD) for _ in range(3)]
        with pytest.raises(ConfigurationError, match=r"gather_single .* got 3 elements in and 8"):
            world.gather_single(torch.zeros(8), torch.zeros(3), to_2)
    assert not (world.supports_reconfigure or world.supports_window or world.supports_abort_hooks)


def test_the_calls_that_torch_215_adds() -> None:
    run(WORLD, _newer_calls)


def _uneven(peer: Peer) -> None:
    rank = peer.slot
    sent = [(rank + other) % 3 for other in range(WORLD)]
    rows = torch.cat([torch.full((n, 2), 10.0 * rank + to) for to, n in enumerate(sent)])
    got = torch.zeros(sum(sent), 2)  # symmetric: what rank r sends to me is what I send to r
    dist.all_to_all_single(got, rows, sent, sent)
    wanted = torch.cat([torch.full((n, 2), 10.0 * frm + rank) for frm, n in enumerate(sent)])
    assert torch.equal(got, wanted)
    outputs = [torch.zeros(r + 1) for r in range(WORLD)]
    dist.all_gather(outputs, torch.full((rank + 1,), float(rank)))
    assert all(torch.all(out == r) for r, out in enumerate(outputs))
    lists = [torch.full((rank + to,), float(rank)) for to in range(WORLD)]
    outs = [torch.zeros(rank + frm) for frm in range(WORLD)]
    dist.all_to_all(outs, lists)
    assert all(torch.all(out == frm) for frm, out in enumerate(outs))


def test_uneven_sizes() -> None:
    run(WORLD, _uneven)


def _strided(peer: Peer) -> None:
    rank = peer.slot
    base = torch.arange(12.0).reshape(3, 4) * (rank + 1)
    dist.all_reduce(base.t())
    assert torch.equal(base, torch.arange(12.0).reshape(3, 4) * 10)
    column = torch.zeros(6, 3)
    dist.broadcast(column[:, 1] if rank else column[:, 1].fill_(5.0), 0)
    assert torch.equal(column, torch.tensor([[0.0, 5.0, 0.0]]).expand(6, 3))
    out = torch.zeros(WORLD, 5)
    dist.all_gather_into_tensor(out.t().contiguous().t().contiguous(), torch.ones(5))
    outs = [torch.zeros(2, 3).t() for _ in range(WORLD)]
    dist.all_gather(outs, torch.full((3, 2), float(rank)))
    assert all(torch.all(o == r) for r, o in enumerate(outs))
    if rank == 0:
        dist.send(torch.arange(10)[::2], 1)
    elif rank == 1:
        got = torch.zeros(10, dtype=torch.int64)
        dist.recv(got[1::2], 0)
        assert got.tolist() == [0, 0, 0, 2, 0, 4, 0, 6, 0, 8]
    scalar = torch.tensor(float(rank))
    dist.all_reduce(scalar)
    assert scalar.item() == 6.0
    leaf = torch.ones(3, requires_grad=True)
    dist.all_reduce(leaf.detach())
    assert leaf.tolist() == [4.0] * 3
    complex_one = torch.full((3,), 1.0 + 2.0j)
    dist.all_reduce(complex_one)
    assert torch.all(complex_one == 4.0 + 8.0j)


def test_strided_scalar_and_complex_tensors() -> None:
    run(WORLD, _strided)


def _points(peer: Peer) -> None:
    rank = peer.slot
    if rank == 0:
        for tag in (7, 3):
            dist.send(torch.full((5,), float(tag)), 1, tag=tag)
        for number in range(10):
            dist.isend(torch.tensor([number]), 1)
        dist.send(torch.tensor([99]), 2)
    elif rank == 1:
        by_tag = torch.zeros(5)
        dist.recv(by_tag, 0, tag=3)
        assert torch.all(by_tag == 3.0)
        dist.recv(by_tag, 0, tag=7)
        assert torch.all(by_tag == 7.0)
        for number in range(10):
            got = torch.tensor([-1])
            dist.recv(got, 0)
            assert got.item() == number
        dist.send(torch.tensor([98]), 2)
    elif rank == 2:
        seen = {}
        for _ in range(2):
            got = torch.tensor([-1])
            source = dist.recv(got)
            seen[source] = got.item()
        assert seen == {0: 99, 1: 98}
    own = torch.tensor([0])
    received = dist.irecv(own, rank)
    dist.isend(torch.tensor([5]), rank)
    received.wait()
    assert own.item() == 5


def test_point_to_point_with_tags_any_source_and_self() -> None:
    run(WORLD, _points)


def _large_in_any_order(peer: Peer) -> None:
    """Everybody sends 8 MB to everybody before anybody receives."""
    rank, numel = peer.slot, 2 << 20
    sends = [dist.isend(torch.full((numel,), float(rank)), to) for to in range(WORLD) if to != rank]
    dist.barrier()
    for frm in range(WORLD):
        if frm != rank:
            got = torch.zeros(numel)
            dist.recv(got, frm)
            assert torch.all(got == frm)
    for work in sends:
        work.wait()
    works = []
    data = [torch.full((300_000,), float(rank + i)) for i in range(6)]
    order = range(6) if rank % 2 else reversed(range(6))
    for tensor in data:
        works.append(dist.all_reduce(tensor, async_op=True))
    for i in order:
        works[i].wait()
    assert all(torch.all(tensor == 6.0 + 4 * i) for i, tensor in enumerate(data))


def test_large_sends_never_deadlock() -> None:
    run(WORLD, _large_in_any_order)


def _objects_and_futures(peer: Peer) -> None:
    rank = peer.slot
    gathered: list[object] = [None] * WORLD
    dist.all_gather_object(gathered, {"rank": rank, "text": "x" * rank * 1000})
    assert [one["rank"] for one in gathered] == [0, 1, 2, 3]  # type: ignore[index]
    several = [f"from {rank}", rank]
    dist.broadcast_object_list(several, 2)
    assert several == ["from 2", 2]
    scattered: list[object] = [None]
    dist.scatter_object_list(scattered, [10, 11, 12, 13] if rank == 0 else None, 0)
    assert scattered == [10 + rank]
    data = torch.ones(5)
    work = dist.all_reduce(data, async_op=True)
    future = work.get_future().then(lambda done: done.value()[0] * 2)
    assert torch.all(future.wait() == 2.0 * WORLD)
    assert work.is_completed() and work.is_success() and work.result()[0] is data


def test_object_collectives_and_futures() -> None:
    run(WORLD, _objects_and_futures)


def _coalesced_and_functional(peer: Peer) -> None:
    rank = peer.slot
    shards = [torch.zeros(3), torch.zeros(1000)]
    with coalescing(async_ops=True) as block:
        for shard in shards:
            whole = torch.arange(WORLD).repeat_interleave(shard.numel()).float()
            dist.reduce_scatter_tensor(shard, whole, async_op=True)
    block.wait()
    assert all(torch.all(shard == WORLD * rank) for shard in shards)
    outs = [torch.zeros(WORLD * 2), torch.zeros(WORLD * 500)]
    with coalescing():
        for out in outs:
            dist.all_gather_into_tensor(out, torch.full((out.numel() // WORLD,), float(rank)))
    for out in outs:
        assert torch.equal(out, torch.arange(WORLD).repeat_interleave(out.numel() // WORLD).float())
    with coalescing(device=torch.device("cpu"), async_ops=True) as block:
        flags = [torch.tensor([rank + 1.0]), torch.tensor([2.0])]
        for flag in flags:
            dist.all_reduce(flag)
    block.wait()
    assert [flag.item() for flag in flags] == [10.0, 8.0]
    world = dist.group.WORLD
    assert world is not None
    total = funcol.wait_tensor(funcol.all_reduce(torch.ones(3), "avg", world))
    assert torch.all(total == 1.0)
    gathered = funcol.wait_tensor(
        either(funcol, "all_gather_single", "all_gather_tensor")(
            torch.full((2,), 1.0 * rank), 0, world
        )
    )
    assert gathered.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    piece = funcol.wait_tensor(
        either(funcol, "reduce_scatter_single", "reduce_scatter_tensor")(
            torch.ones(8), "sum", 0, world
        )
    )
    assert piece.tolist() == [4.0, 4.0]
    swapped = funcol.wait_tensor(
        funcol.all_to_all_single(torch.full((4,), 1.0 * rank), None, None, world)
    )
    assert swapped.tolist() == [0, 1, 2, 3]
    sent = funcol.wait_tensor(funcol.broadcast(torch.full((2,), 1.0 * rank), 3, world))
    assert sent.tolist() == [3.0, 3.0]


def test_coalescing_and_functional_collectives() -> None:
    run(WORLD, _coalesced_and_functional)


def _refusals(peer: Peer) -> None:
    world = dist.group.WORLD
    assert isinstance(world, ElasticProcessGroup)
    with pytest.raises(ConfigurationError, match=r"all_reduce in group '0' .*BAND of .*float32"):
        dist.all_reduce(torch.ones(2), ReduceOp.BAND)
    with pytest.raises(ConfigurationError, match=r"all_reduce.*float8_e5m2"):
        dist.all_reduce(torch.ones(2).to(torch.float8_e5m2))
    with pytest.raises(ConfigurationError, match=r"all_gather in group '0' .* 3 output tensors"):
        world.allgather([[torch.ones(1)] * 3], [torch.ones(1)])
    with pytest.raises(ConfigurationError, match="reduce_scatter in group"):
        dist.reduce_scatter_tensor(torch.ones(2), torch.ones(7))
    fp8 = torch.full((3,), float(peer.slot)).to(torch.float8_e4m3fn)
    dist.broadcast(fp8, 1)  # copies take any dtype
    assert fp8.float().tolist() == [1.0] * 3


def test_what_is_not_supported_is_refused_by_name() -> None:
    run(WORLD, _refusals)


def _unequal(peer: Peer) -> None:
    peer.install()
    numel = 5 if peer.slot == 1 else 4
    with pytest.raises(LinkError) as failure:
        dist.all_reduce(torch.ones(numel))
    text = str(failure.value)
    assert f"all_reduce #0 in group 'default_pg' (slots (0, 1), this is rank {peer.slot})" in text
    assert f"(slot {1 - peer.slot}) sends" in text and "16 bytes" in text and "20 bytes" in text
    peer.tell("refused")
    peer.hear()


def test_unequal_sizes_are_named() -> None:
    with Workers(2, _unequal) as workers:
        workers.commit(1, (0, 1))
        assert workers.hear_all() == {0: "refused", 1: "refused"}


def _unequal_dtypes(peer: Peer) -> None:
    peer.install()
    data = torch.ones(4, dtype=torch.int32 if peer.slot else torch.float32)
    with pytest.raises(LinkError, match=r"int32.*float32|float32.*int32"):
        dist.all_reduce(data)
    peer.tell("refused")
    peer.hear()


def test_unequal_dtypes_are_named() -> None:
    with Workers(2, _unequal_dtypes) as workers:
        workers.commit(1, (0, 1))
        assert workers.hear_all() == {0: "refused", 1: "refused"}


SYMMETRIC: dict[str, Callable[[], Any]] = {
    "barrier": dist.barrier,
    "all_reduce": lambda: dist.all_reduce(torch.ones(8)),
    "all_gather": lambda: dist.all_gather([torch.zeros(0) for _ in range(3)], torch.zeros(0)),
    "reduce_scatter": lambda: dist.reduce_scatter_tensor(torch.zeros(8), torch.ones(24)),
    "all_to_all": lambda: dist.all_to_all_single(torch.zeros(3), torch.ones(3)),
}


def _unlike(peer: Peer) -> None:
    peer.install()
    world = dist.group.WORLD
    assert isinstance(world, ElasticProcessGroup)
    peer.tell("ready")
    for epoch, (one, other) in enumerate(permutations(SYMMETRIC, 2), 2):
        peer.open()
        # The last slot begins when data of the others has come already.
        limit = time.monotonic() + LIMIT_S
        while peer.slot == 2 and not peer.links._mailbox._unexpected:
            assert time.monotonic() < limit, "no data came"
            time.sleep(0.001)
        call = SYMMETRIC[other if peer.slot == 2 else one]
        with pytest.raises(LinkError, match="same operations in the same order"):
            call()
        peer.tell((epoch, one, other))


def test_different_operations_are_named_by_everybody_and_nobody_hangs() -> None:
    with Workers(3, _unlike) as workers:
        workers.commit(1, range(3))
        workers.hear_all()
        for epoch, (one, other) in enumerate(permutations(SYMMETRIC, 2), 2):
            workers.commit(epoch, range(3))
            wanted = (epoch, one, other)
            assert workers.hear_all() == {0: wanted, 1: wanted, 2: wanted}


def _megatron(peer: Peer) -> None:
    from megatron.core import parallel_state as mpu

    mpu.initialize_model_parallel(tensor_model_parallel_size=2, create_gloo_process_groups=False)
    tables = dist.distributed_c10d._world
    assert len(tables.pg_map) > 5
    assert {type(group) for group in tables.pg_map} == {ElasticProcessGroup}
    assert len(peer.groups.groups) == len(tables.pg_map)
    total = torch.full((3,), float(peer.slot))
    dist.all_reduce(total, group=mpu.get_tensor_model_parallel_group())
    assert total[0].item() == {0: 1.0, 1: 1.0, 2: 5.0, 3: 5.0}[peer.slot]
    total = torch.full((3,), float(peer.slot))
    dist.all_reduce(total, group=mpu.get_data_parallel_group())
    assert total[0].item() == {0: 2.0, 2: 2.0, 1: 4.0, 3: 4.0}[peer.slot]


def test_megatron_builds_its_groups_out_of_ours() -> None:
    pytest.importorskip("megatron.core.parallel_state")
    run(4, _megatron)


def _detached(peer: Peer) -> None:
    peer.install()
    data = torch.arange(6.0)
    dist.all_reduce(data, ReduceOp.AVG)
    out = torch.zeros(6)
    dist.all_gather_into_tensor(out, data)
    assert torch.equal(out, torch.arange(6.0))
    dist.reduce_scatter_tensor(out, data * 2)
    assert torch.equal(out, data * 2)
    dist.barrier()
    assert connected(peer.links) == [] and peer.links.sent_bytes == 0
    peer.links.interrupt(2, "news")
    with pytest.raises(EpochChanged):
        dist.barrier()
    peer.links.open_epoch(2, {0: peer.links.address})
    dist.destroy_process_group()
    peer.groups.uninstall()
    peer.groups.uninstall()
    assert peer.groups.groups == ()
    with pytest.raises(AttributeError):
        _ = dist.Backend.ELASWAVE  # type: ignore[attr-defined]
    dist.init_process_group(**peer.groups.install((0,)))
    dist.destroy_process_group()
    peer.groups.uninstall()


def _compiler_asks_for_time(peer: Peer) -> None:
    """As torch.compile does where it finds a graph in its cache (torch/_inductor/codecache.py)."""
    dist.distributed_c10d._add_ephemeral_timeout_for_all_pgs(timedelta(seconds=1))
    group = dist.distributed_c10d._get_default_group()
    assert all(group._get_backend(device) is group for device in group._device_types)


def test_every_device_that_a_group_names_has_its_backend() -> None:
    run(2, _compiler_asks_for_time)


def test_a_group_of_one_does_not_communicate() -> None:
    with Workers(1, _detached) as workers:
        workers.commit(1, (0,))
        workers.join()


def _name_again(peer: Peer) -> None:
    """In one epoch a name passes from the group (0, 1) to the group (0, 1, 2)."""
    if peer.slot < 2:
        old = peer.groups.create("again", (0, 1))
        for _ in range(3):
            old.allreduce([torch.ones(1)]).wait()
        old.shutdown()
    total = torch.ones(1)
    peer.groups.create("again", range(3)).allreduce([total]).wait()
    assert total.item() == 3.0


def test_a_group_under_the_name_of_an_ended_one_begins_anew() -> None:
    run(3, _name_again)
