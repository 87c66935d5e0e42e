"""Operations that a member does not come to in time: of a group's limit, and of a single call's."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elaswave_plugin.communicator.groups.group_calls import ElasticProcessGroup
from elaswave_plugin.errors import ConfigurationError, LinkError
from tests.communicator.forked import Peer, Workers


def _late_member(peer: Peer) -> None:
    peer.install()
    if peer.slot == 1:
        peer.tell("waits")
        peer.hear()
        return
    world = dist.group.WORLD
    assert isinstance(world, ElasticProcessGroup)
    world.set_timeout(timedelta(seconds=0.3))
    with pytest.raises(LinkError, match=r"all_reduce #0 .*timed out \(0.3 s.* slot 1 \(12 bytes"):
        dist.all_reduce(torch.ones(3))
    peer.tell("timed out")


def _late_for_a_call(peer: Peer) -> None:
    """The limit of one call counts, in whatever way c10d takes it."""
    peer.install()
    if peer.slot == 1:
        peer.tell("waits")
        peer.hear()
        return
    world: Any = dist.group.WORLD
    one, limit = torch.ones(2), timedelta(seconds=0.3)
    calls: tuple[Callable[[], Any], ...] = (
        lambda: world.allreduce([one], dist.ReduceOp.SUM, timeout=limit),
        lambda: world.reduce([one], 1, dist.ReduceOp.SUM, timeout=limit),
        lambda: world.broadcast([one], 1, timeout=limit),
        lambda: world.allgather([[one, one]], [one], timeout=limit),
        lambda: world.reduce_scatter([one], [[one, one]], dist.ReduceOp.SUM, timeout=limit),
        lambda: world.all_to_all_single(one, one, [], [], timeout=limit),
        lambda: world.gather([[one, one]], [one], 0, timeout=limit),
        lambda: world.scatter([one], [], 1, timeout=limit),
        lambda: world.barrier(timeout=limit),
    )
    for call in calls:
        with pytest.raises(LinkError, match=r"timed out \(0.3 s"):
            call().wait()
    with pytest.raises(ConfigurationError, match="no wait_all_ranks"):
        world.monitored_barrier(limit, wait_all_ranks=True)
    peer.tell("timed out")


def test_a_timeout_names_the_member_that_is_late() -> None:
    with Workers(2, _late_member) as workers:
        workers.commit(1, (0, 1))
        assert workers.hear_all() == {0: "timed out", 1: "waits"}


def test_the_limit_of_a_call_counts() -> None:
    with Workers(2, _late_for_a_call) as workers:
        workers.commit(1, (0, 1))
        assert workers.hear_all() == {0: "timed out", 1: "waits"}
