"""A peer that reads nothing for ever costs a bounded amount of memory, and its connection."""

import random
import socket
import threading

from elaswave_plugin.ipc.reactor import Reactor
from elaswave_plugin.ipc.wire import MOST_UNSENT_BYTES, Channel

MEBIBYTE = 1 << 20


def test_a_peer_that_does_not_read_is_lost() -> None:
    own, theirs = socket.socketpair()
    reactor, seen = Reactor(), list[str]()

    def lost(evidence: str) -> None:
        seen.append(evidence)
        reactor.stop()

    channel = Channel(reactor, own, on_frame=lambda frame: None, on_close=lost)
    frame = {"t": random.Random(0).randbytes(MEBIBYTE).hex()}  # compressed to half of it
    for _ in range(2 * MOST_UNSENT_BYTES // MEBIBYTE):
        channel.send(frame)
    assert len(channel._unsent) <= MOST_UNSENT_BYTES
    watchdog = threading.Timer(10.0, lambda: reactor.post(reactor.stop))
    watchdog.start()
    reactor.run()
    watchdog.cancel()
    assert len(seen) == 1 and seen[0].startswith("it does not read: 6")
    assert channel.closed
    theirs.close()
    reactor.close()


def test_one_long_frame_may_be_longer() -> None:
    own, theirs = socket.socketpair()
    reactor = Reactor()
    channel = Channel(reactor, own, on_frame=lambda frame: None, on_close=lambda evidence: None)
    channel.send_encoded(bytes(MOST_UNSENT_BYTES + MEBIBYTE))
    assert not channel.closed and len(channel._unsent) > MOST_UNSENT_BYTES - MEBIBYTE
    channel.close()
    theirs.close()
    reactor.close()
