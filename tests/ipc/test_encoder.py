"""A message for many trainers is encoded once, and never taken for another one."""

from elaswave_plugin.ipc.frames import Propose
from elaswave_plugin.ipc.wire import Encoder, encode


def propose(epoch: int) -> Propose:
    """A proposal, made anew for each trainer."""
    return Propose(
        epoch=epoch, reason="worker 1 left", within_s=5.0, boundary=False, before_step=None
    )


def test_equal_messages_have_the_same_bytes_and_others_their_own() -> None:
    """Each trainer of a node has a message of its own that says the same; the next one differs."""
    encoded = Encoder()
    first = encoded(propose(2))
    assert encoded(propose(2)) is first == encode(propose(2))
    assert encoded(propose(3)) == encode(propose(3)) != first
    assert encoded(propose(2)) == first
