"""Values of all workers reach each of them, of whatever lengths; what is refused names its rank."""

import os

import pytest
import torch
import torch.distributed as dist

from elaswave_plugin.errors import ConfigurationError, UnreadableValueError
from elaswave_plugin.step_state.moved_state import receive, send
from elaswave_plugin.values import plain
from elaswave_plugin.values import plain as module
from elaswave_plugin.values.plain import gathered, told_by
from tests.communicator.forked import Peer, run

WORLD = 3


def _of_several_lengths(peer: Peer) -> None:
    rank = peer.slot
    mine = {"rank": rank, "text": "x" * rank * 1000, ("a", rank): {rank}}
    assert gathered(mine) == [
        {"rank": one, "text": "x" * one * 1000, ("a", one): {one}} for one in range(WORLD)
    ]
    assert told_by(2, [rank, None]) == [2, None]
    assert told_by(0, os if rank else "of rank 0") == "of rank 0"
    with pytest.raises(ConfigurationError, match=r"a list\[0\] is of the class builtins.module"):
        gathered([os], "a list")
    assert gathered(None) == [None] * WORLD
    dist.barrier()


def test_values_of_several_lengths() -> None:
    run(WORLD, _of_several_lengths)


def _handed_over(peer: Peer) -> None:
    state = {"scale": torch.tensor(3.5), ("a", 1): [torch.ones(5)[::2], (None, 1 << 70)]}
    if peer.slot == 0:
        send(state, 2)
    elif peer.slot == 2:
        told = receive(0)
        assert list(told) == list(state) and told["scale"] == 3.5
        assert torch.equal(told["a", 1][0], torch.ones(3)) and told["a", 1][1] == (None, 1 << 70)


def test_a_state_with_tensors_is_handed_over() -> None:
    run(WORLD, _handed_over)


def _of_another_version(peer: Peer) -> None:
    if peer.slot == 1:
        plain.__version__ = "9.9"
    wanted = "rank 0.*'0.1.0'.*'9.9'" if peer.slot == 1 else "rank 1.*'9.9'.*'0.1.0'"
    with pytest.raises(UnreadableValueError, match=wanted):
        gathered(peer.slot)
    dist.barrier()


def test_another_version_is_named_with_its_rank() -> None:
    run(WORLD, _of_another_version)


def _too_long(peer: Peer) -> None:
    module._LONGEST = 1000
    mine = bytes(1001) if peer.slot == 1 else b""
    with pytest.raises(UnreadableValueError, match=r"has 10[0-9][0-9] bytes, wanted at most 1000"):
        gathered(mine)
    with pytest.raises(UnreadableValueError, match=r"has 10[0-9][0-9] bytes, wanted at most 1000"):
        told_by(1, mine)


def test_the_length_of_another_worker_is_checked_before_memory_is_taken() -> None:
    run(WORLD, _too_long)
