"""The store over our links: what one member sets, all others get, also from C++."""

from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from elaswave_plugin.communicator.device.communicator import LinkStore
from elaswave_plugin.errors import ConfigurationError, EpochChanged, LinkError
from tests.communicator.forked import Peer, Workers


def _talk(peer: Peer) -> None:
    ranks = peer.open()
    store = LinkStore(peer.links, "tp@1", ranks, timeout_s=20.0)
    through_c: Any = dist.PrefixStore("nccl", store)
    through_c.set(f"from {peer.slot}", bytes([peer.slot]) * 128)
    store.set(f"empty {peer.slot}", b"")
    store.set("text" if peer.slot == 0 else f"text {peer.slot}", "words")
    for other in reversed(ranks):
        assert through_c.get(f"from {other}") == bytes([other]) * 128
        assert store.get(f"empty {other}") == b""
    store.wait(["text", "text 1"], timedelta(seconds=20))
    assert store.check(["text", "nccl/from 1"]) and not store.check(["text", "nothing"])
    assert store.get("text") == b"words"
    with pytest.raises(LinkError, match=r"wait for \['never'\] .*store of tp@1.*timed out"):
        store.wait(["never"], timedelta(seconds=0.05))
    with pytest.raises(ConfigurationError, match="add"):
        store.add("n", 1)


def test_members_meet_in_the_store() -> None:
    with Workers(3, _talk) as workers:
        workers.commit(1, (0, 2, 1))
        workers.join()


def _follow(peer: Peer) -> None:
    store = LinkStore(peer.links, "tp@1", peer.open(), timeout_s=20.0)
    store.set(f"{peer.slot}", f"{peer.slot} in epoch 1")
    store.get("2")
    peer.tell("met")
    with pytest.raises(EpochChanged):
        store.get("nobody sets this")
    peer.tell("quiesced")
    store.follow(peer.open())
    assert store.get("2") == b"2 in epoch 1"
    store.set(f"again {peer.slot}", b"x")
    assert store.get("again 0") == store.get("again 1") == b"x"


def test_an_interruption_leaves_a_get_and_the_store_follows_its_members() -> None:
    with Workers(3, _follow) as workers:
        workers.commit(1, range(3))
        workers.hear_all()
        workers.kill(2)
        workers.interrupt(2, (0, 1))
        for slot in (0, 1):
            assert workers.hear(slot) == "quiesced"
        workers.commit(2, (0, 1))
        workers.join()
