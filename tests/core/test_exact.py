"""The canonical sum has one value, whoever computes which term."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elaswave_plugin.core.step.dataflow import deal, sample_ids
from elaswave_plugin.core.step.sum_order import fold_order


def fp32(value: float) -> float:
    """Round to float32, as every addition of gradients does."""
    return struct.unpack("<f", struct.pack("<f", value))[0]


def evaluate(placement: dict[int, tuple[int, ...]], gradients: list[float], replicas: int) -> float:
    """Run the contributions where they are placed and fold them at the owner."""
    total = None
    for term in fold_order(placement, num_replicas=replicas, num_microbatches=len(gradients)):
        chain = None
        for _, part in term.chain:
            accumulated = 0.0
            for k in part.microbatches:
                accumulated = fp32(accumulated + gradients[k])
            chain = accumulated if chain is None else fp32(chain + accumulated)
        assert chain is not None
        total = chain if total is None else fp32(total + chain)
    assert total is not None
    return total


@st.composite
def jobs(draw: st.DrawFn) -> tuple[int, list[float], list[int]]:
    replicas = draw(st.integers(1, 6))
    per_replica = draw(st.integers(1, 4))
    number = st.floats(-1e3, 1e3, width=32)
    gradients = [fp32(draw(number)) for _ in range(replicas * per_replica)]
    live = draw(st.lists(st.integers(0, replicas - 1), min_size=1, unique=True))
    return replicas, gradients, live


@given(jobs())
def test_fold_any_survivors_has_the_bits_of_the_healthy_sum(
    job: tuple[int, list[float], list[int]],
) -> None:
    replicas, gradients, live = job
    launch_slots = tuple(range(replicas))
    healthy = deal(num_microbatches=len(gradients), launch_slots=launch_slots, live=launch_slots)
    degraded = deal(num_microbatches=len(gradients), launch_slots=launch_slots, live=live)
    wanted = evaluate(dict(healthy.placement), gradients, replicas)
    found = evaluate(dict(degraded.placement), gradients, replicas)
    assert struct.pack("<f", found) == struct.pack("<f", wanted)


@given(jobs())
def test_a_whole_deal_has_every_replica_at_one_worker_in_its_own_order(
    job: tuple[int, list[float], list[int]],
) -> None:
    replicas, gradients, live = job
    launch_slots = tuple(range(replicas))
    flow = deal(num_microbatches=len(gradients), launch_slots=launch_slots, live=live, whole=True)
    parts = [(slot, part) for slot, _ in flow.placement for part in flow.contributions(slot)]
    assert all(part.whole for _, part in parts)
    assert sorted(part.replica for _, part in parts) == list(launch_slots)
    assert all(slot == part.replica for slot, part in parts if part.replica in live)
    counts = [len(ks) for _, ks in flow.placement]
    assert max(counts) - min(counts) <= len(gradients) // replicas


@given(jobs(), st.data())
def test_fold_of_a_grown_job_has_the_bits_of_the_healthy_sum(
    job: tuple[int, list[float], list[int]], data: st.DataObject
) -> None:
    """Workers beyond the launch take part, whoever of the launch is left."""
    replicas, gradients, live = job
    room = len(gradients) - len(live)
    beyond = data.draw(st.integers(0, min(3, room)))
    grown = [*live, *range(replicas, replicas + beyond)]
    launch_slots = tuple(range(replicas))
    healthy = deal(num_microbatches=len(gradients), launch_slots=launch_slots, live=launch_slots)
    flow = deal(num_microbatches=len(gradients), launch_slots=launch_slots, live=grown)
    wanted = evaluate(dict(healthy.placement), gradients, replicas)
    assert struct.pack("<f", evaluate(dict(flow.placement), gradients, replicas)) == struct.pack(
        "<f", wanted
    )
    loads = [len(ks) for _, ks in flow.placement]
    assert min(loads) >= 1 and max(loads) == -(-len(gradients) // len(grown))
    assert flow.is_healthy == (sorted(grown) == list(launch_slots))


def test_a_replica_at_another_rank_is_not_reduced_natively() -> None:
    """Each of these runs one whole replica, and in rank order they would be added otherwise."""
    flow = deal(num_microbatches=8, launch_slots=range(4), live=(1, 2, 3, 4))
    assert str(flow) == "w1: 1 5 | w2: 2 6 | w3: 3 7 | w4: 0 4"
    assert not flow.is_healthy
    assert [term.replica for term in flow.fold()] == [0, 1, 2, 3]


def test_fold_in_order_of_workers_would_differ() -> None:
    """Negative control: the order matters for these values."""
    gradients = [1.0, fp32(2.0**-24), fp32(2.0**-24), -1.0]
    assert evaluate({0: (0, 1, 2, 3)}, gradients, 1) != fp32(
        fp32(fp32(gradients[3] + gradients[0]) + gradients[1]) + gradients[2]
    )


@given(jobs())
def test_deal_places_every_microbatch_once_and_evenly(
    job: tuple[int, list[float], list[int]],
) -> None:
    replicas, gradients, live = job
    flow = deal(num_microbatches=len(gradients), launch_slots=range(replicas), live=live)
    placed = sorted(k for _, ks in flow.placement for k in ks)
    assert placed == list(range(len(gradients)))
    loads = [len(ks) for _, ks in flow.placement]
    assert max(loads) == -(-len(gradients) // len(live))
    assert flow.is_healthy == (len(live) == replicas)


def test_deal_twelve_over_five() -> None:
    flow = deal(num_microbatches=12, launch_slots=range(6), live=(0, 1, 2, 3, 5))
    assert str(flow) == "w0: 0 6 4 | w1: 1 7 10 | w2: 2 8 | w3: 3 9 | w5: 5 11"


def test_fold_order_refuses_a_lost_or_doubled_microbatch() -> None:
    with pytest.raises(ValueError, match="wanted each of 2 once"):
        fold_order({0: (0,)}, num_replicas=1, num_microbatches=2)
    with pytest.raises(ValueError, match="wanted each of 2 once"):
        fold_order({0: (0, 1), 1: (1,)}, num_replicas=1, num_microbatches=2)


def test_deal_refuses_more_workers_than_microbatches() -> None:
    with pytest.raises(ValueError, match="2 micro-batches for 3 workers"):
        deal(num_microbatches=2, launch_slots=range(2), live=(0, 1, 2))


def test_deal_refuses_an_empty_view_and_too_few_microbatches() -> None:
    with pytest.raises(ValueError, match="no live worker"):
        deal(num_microbatches=4, launch_slots=(0, 1), live=())
    with pytest.raises(ValueError, match="1 micro-batches for 2 replicas"):
        deal(num_microbatches=1, launch_slots=(0, 1), live=(0, 1))


def test_sample_ids_cover_a_run_once_in_order() -> None:
    ids = [
        one
        for step in range(3)
        for k in range(4)
        for one in sample_ids(step=step, microbatch=k, num_microbatches=4, size=2)
    ]
    assert ids == list(range(24))


@given(jobs(), st.data())
def test_replicas_that_are_left_out_change_no_bit_of_the_others(
    job: tuple[int, list[float], list[int]], data: st.DataObject
) -> None:
    """The sum is that of the replicas that are left, on whichever workers these run."""
    replicas, gradients, live = job
    left_out = data.draw(st.sets(st.integers(0, replicas - 1), max_size=replicas - 1))
    sums = set()
    for slots in (live, range(replicas)):
        flow = deal(num_microbatches=len(gradients), launch_slots=range(replicas), live=slots)
        placement = dict(flow.without(left_out).placement)
        assert not left_out & {k % replicas for ks in placement.values() for k in ks}
        sums.add(struct.pack("<f", evaluate(placement, gradients, replicas)))
    assert len(sums) == 1
