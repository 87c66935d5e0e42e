"""Sums of terms that members send one after the other: their bits, their order, their end."""

import torch
import torch.distributed as dist

from elaswave_plugin.communicator.groups import term_sums
from elaswave_plugin.errors import EpochChanged
from tests.communicator.forked import Peer, Workers, run
from tests.communicator.samples import sample
from tests.communicator.test_process_group import same_bits

WORLD = 3
# The rank and the tag of each term: ranks come again, and the adding one among them.
TERMS = ((1, 5), (0, 9), (2, 7), (1, 6), (0, 8))


def _term(tag: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return sample(tag, numel, dtype)


def _sum_of(numel: int, dtype: torch.dtype) -> torch.Tensor:
    total = _term(TERMS[0][1], numel, dtype)
    for _, tag in TERMS[1:]:
        total = total + _term(tag, numel, dtype)
    return total


def _added_up(peer: Peer) -> None:
    sizes = (1, term_sums.PART_BYTES // 4, 3 * term_sums.PART_BYTES // 4 + 5)
    for dtype in (torch.float32, torch.bfloat16):
        for round_, numel in enumerate(sizes):
            total, adding = torch.full((numel,), 7.0, dtype=dtype), None
            if peer.slot == 0 and round_ % 2:
                # Asked for before anything is sent; otherwise all terms wait for it.
                adding = term_sums.add_terms(total, dist.group.WORLD, terms=TERMS)
            mine = [tag for rank, tag in TERMS if rank == peer.slot]
            terms = [_term(tag, numel, dtype) for tag in mine]
            sent = [
                term_sums.send_term(term, dist.group.WORLD, rank=0, tag=tag)
                for term, tag in reversed(list(zip(terms, mine, strict=True)))
            ]
            for work in sent:
                work.wait()
            for term in terms:
                term.fill_(float("nan"))
            dist.barrier()
            if peer.slot == 0:
                adding = adding or term_sums.add_terms(total, dist.group.WORLD, terms=TERMS)
                adding.wait()
                assert same_bits(total, _sum_of(numel, dtype)), (numel, dtype)
            dist.barrier()


def test_terms_are_added_in_their_order_whichever_comes_first() -> None:
    run(WORLD, _added_up)


def _interrupted(peer: Peer) -> None:
    """A sum of which one term is missing ends with the view, and is written no more."""
    peer.install()
    numel = 2 * term_sums.PART_BYTES
    total = torch.zeros(numel)
    work = None
    if peer.slot == 0:
        work = term_sums.add_terms(total, dist.group.WORLD, terms=((1, 1), (2, 2)))
    if peer.slot == 1:
        term_sums.send_term(torch.ones(numel), dist.group.WORLD, rank=0, tag=1).wait()
    dist.barrier()
    peer.tell("waits")
    interrupted = False
    if work is not None:
        try:
            work.wait()
        except EpochChanged:
            interrupted = True
    peer.recover()
    dist.barrier()
    before = total.clone()
    # Late: of a sum that nobody wants any more.
    late = term_sums.send_term(torch.ones(numel), dist.group.WORLD, rank=0, tag=2)
    late.wait()
    dist.barrier()
    peer.tell((interrupted, torch.equal(total, before)))


def test_a_sum_ends_with_its_view() -> None:
    with Workers(WORLD, _interrupted) as workers:
        workers.commit(1, range(WORLD))
        assert [workers.hear(slot) for slot in range(WORLD)] == ["waits"] * WORLD
        workers.interrupt(2, range(WORLD), "a test")
        assert [workers.hear(slot) for slot in range(WORLD)] == ["quiesced"] * WORLD
        workers.commit(2, range(WORLD))
        answers = [workers.hear(slot) for slot in range(WORLD)]
        workers.join()
    assert answers == [(True, True), (False, True), (False, True)]
