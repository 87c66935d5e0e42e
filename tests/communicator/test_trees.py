"""Large groups: small data goes over trees, with the same bits and few connections."""

import pytest
import torch
import torch.distributed as dist

from elaswave_plugin.communicator.groups.algorithms import TREE_ABOVE
from tests.communicator.forked import Peer, connected, run
from tests.communicator.test_process_group import same_bits, sample

LARGE_WORLD = 13  # neither a power of two nor small


def _over_trees(peer: Peer) -> None:
    assert LARGE_WORLD > TREE_ABOVE
    dist.barrier()
    for salt, (numel, dtype) in enumerate(
        ((0, torch.float32), (1, torch.float64), (1000, torch.float32), (333, torch.bfloat16))
    ):
        terms = [sample(rank, numel, dtype, salt) for rank in range(LARGE_WORLD)]
        total = terms[0].clone()
        for term in terms[1:]:
            total = total + term
        data = terms[peer.slot].clone()
        dist.all_reduce(data)
        assert same_bits(data, total), (numel, dtype)
        data = terms[peer.slot].clone()
        dist.all_reduce(data, dist.ReduceOp.AVG)
        assert same_bits(data, total / LARGE_WORLD), (numel, dtype)
        outs = [torch.zeros(numel, dtype=dtype) for _ in range(LARGE_WORLD)]
        dist.all_gather(outs, terms[peer.slot])
        assert all(same_bits(out, term) for out, term in zip(outs, terms, strict=True))
        whole = torch.zeros(numel * LARGE_WORLD, dtype=dtype)
        dist.all_gather_into_tensor(whole, terms[peer.slot])
        assert same_bits(whole, torch.cat(terms))
    # A dissemination barrier and the tree: not one connection for each other worker.
    assert len(connected(peer.links)) <= 10
    dist.barrier()
    for root in range(LARGE_WORLD):
        data = sample(peer.slot, 70_001, torch.float32)
        dist.broadcast(data, root)
        assert same_bits(data, sample(root, 70_001, torch.float32))
    gathered: list[object] = [None] * LARGE_WORLD
    dist.all_gather_object(gathered, "x" * peer.slot)
    assert gathered == ["x" * rank for rank in range(LARGE_WORLD)]
    uneven = [torch.zeros(rank + 1) for rank in range(LARGE_WORLD)]
    dist.all_gather(uneven, torch.full((peer.slot + 1,), float(peer.slot)))
    assert all(torch.all(out == rank) for rank, out in enumerate(uneven))


@pytest.mark.timeout(120)
def test_large_groups_fold_in_rank_order_over_few_connections() -> None:
    run(LARGE_WORLD, _over_trees)


def _over_trees_again(peer: Peer) -> None:
    for number in range(200):
        total = torch.tensor([float(peer.slot + number)])
        dist.all_reduce(total)
        assert total.item() == sum(slot + number for slot in range(LARGE_WORLD))


def test_rounds_of_a_tree_do_not_run_into_each_other() -> None:
    run(LARGE_WORLD, _over_trees_again)
