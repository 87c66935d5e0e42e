"""Ids that an abort cuts off are ids: what a native call is to receive is zero until it arrives."""

from typing import Any

import pytest
import torch

from elaswave_plugin.communicator.device.calls import DeviceProcessGroup
from tests.communicator.native_groups import StartDetached, reduce

GARBAGE = 1 << 40


def options(kind: Any, root: int) -> Any:
    made = kind()
    made.rootRank = root
    return made


def ids() -> torch.Tensor:
    return torch.full((8,), GARBAGE)


@pytest.fixture
def group() -> Any:
    """Slot 0 of three, whose native calls never bring anything: as if each were aborted."""
    one = StartDetached()
    yield one.group("tp")
    one.links.close()


def test_ids_that_never_arrive_are_zero(group: DeviceProcessGroup) -> None:
    from torch.distributed import BroadcastOptions, ScatterOptions

    one, two, three, four = ids(), ids(), ids(), ids()
    group.broadcast([one], options(BroadcastOptions, 2))
    group.scatter([two], [], options(ScatterOptions, 1))
    group.recv([three], 1)
    group.recv_anysource([four], 0)
    for received in (one, two, three, four):
        assert not received.any()


def test_what_is_sent_and_what_are_no_ids_stay_as_they_are(group: DeviceProcessGroup) -> None:
    from torch.distributed import BroadcastOptions

    sent, numbers = ids(), torch.full((8,), 7.0)
    group.broadcast([sent], options(BroadcastOptions, 0))
    group.send([sent], 1)
    group.broadcast([numbers], options(BroadcastOptions, 2))
    reduce(group)
    assert sent.eq(GARBAGE).all() and numbers.eq(7.0).all()


def test_autograd_does_not_see_it(group: DeviceProcessGroup) -> None:
    """A look-up keeps its ids for the backward pass, and the call itself bumps no version."""
    from torch.distributed import BroadcastOptions

    table = torch.ones(4, 2, requires_grad=True)
    received = torch.zeros(3, dtype=torch.int64)
    looked_up = torch.nn.functional.embedding(received, table)
    group.broadcast([received], options(BroadcastOptions, 1))
    looked_up.sum().backward()
    assert table.grad is not None
