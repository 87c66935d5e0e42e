"""A message for many trainers is encoded once, and never taken for another one."""

from elaswave_plugin.core.agreement.messages import Ballot, Ring
from elaswave_plugin.ipc.wire import Encoder, encode


def propose(epoch: int) -> Ring:
    """A proposal, made anew for each trainer."""
    ballot = Ballot(term=0, leader=0, epoch=epoch)
    return Ring(ballot=ballot, reason="worker 1 left", within_s=5.0)


def test_equal_messages_have_the_same_bytes_and_others_their_own() -> None:
    """Each trainer of a node has a message of its own that says the same; the next one differs."""
    encoded = Encoder()
    first = encoded(propose(2))
    assert encoded(propose(2)) is first == encode(propose(2))
    assert encoded(propose(3)) == encode(propose(3)) != first
    assert encoded(propose(2)) == first
