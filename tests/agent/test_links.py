"""Links between agents: opened by the higher node, and opened again where they break."""

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from elaswave_plugin.agent.peers.links import LINK, Links
from elaswave_plugin.agent.snapshot_server import SnapshotServer, listen_for_data
from elaswave_plugin.core.codec import from_json
from elaswave_plugin.ipc.peer import Peer
from elaswave_plugin.ipc.reactor import Reactor
from elaswave_plugin.ipc.secret import Secret
from elaswave_plugin.ipc.wire import Frame, encode, send_frame
from tests.agent.serving import SlotStore
from tests.idle import within
from tests.job_secret import SECRET

LONG_S = 10.0
GRACE_S = 0.6


class Node:
    """A node's address, and the links of its agent, one life after the other."""

    def __init__(self, node: int, reactor: Reactor, secret: Secret = SECRET) -> None:
        self.node = node
        self.life = 0
        self.refuses: str | None = None
        self.heard: list[tuple[int, object]] = []
        self.opened: list[tuple[Peer, int]] = []
        self.gone: list[tuple[int, str]] = []
        self.epoch = 10 + node
        self._reactor = reactor
        self._secret = secret
        self.listeners = listen_for_data("127.0.0.1")
        server = SnapshotServer(
            SlotStore(node), self.listeners, takers={LINK: self._take}, secret=secret
        )
        server.start()
        self.address = server.address
        self.links = self._new_links()

    @property
    def own(self) -> Peer:
        return Peer(node=self.node, pid=1000 + self.life, life=self.life, data=self.address)

    def _new_links(self) -> Links:
        return Links(self._reactor, self.own, self, secret=self._secret, grace_s=GRACE_S)

    def _take(self, request: Frame, sock: socket.socket) -> None:
        def take() -> None:
            if self.refuses is not None:
                send_frame(sock, {"t": LINK, "error": self.refuses})
                sock.close()
                return
            send_frame(sock, {"t": "linked", "peer": self.own, "epoch": self.epoch})
            self.links.take(from_json(Peer, request["peer"]), sock, int(request["epoch"]))

        self._reactor.post(take)

    def next_life(self) -> None:
        """Its agent has died, and another one is there at once."""
        dead = self.links
        self.life += 1
        self.links = self._new_links()
        for channel in dead.channels.values():
            channel.close()

    def vanish(self) -> None:
        """Its guardian is dead: nobody listens, and its connections are closed."""
        for listener in self.listeners:
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        for channel in self.links.channels.values():
            channel.close()

    def say(self, to: int, words: str) -> None:
        self.links.channels[to].send_encoded(encode({"t": words}))

    # ---- what the links tell --------------------------------------------------------------

    def on_frame(self, node: int, frame: Frame) -> None:
        self.heard.append((node, frame["t"]))

    def on_bytes(self, node: int) -> None:
        pass

    def on_open(self, peer: Peer, epoch: int) -> None:
        self.opened.append((peer, epoch))

    def on_gone(self, node: int, evidence: str) -> None:
        self.gone.append((node, evidence))


class Case:
    """Two nodes on one reactor."""

    def __init__(self) -> None:
        self.reactor = Reactor()
        self.low, self.high = Node(0, self.reactor), Node(1, self.reactor)

    def want(self) -> None:
        """Have both keep a link with the other one."""
        self.low.links.want({1: self.high.address})
        self.high.links.want({0: self.low.address})

    def until(self, true: Callable[[], object], limit_s: float = LONG_S) -> float:
        """Run until it is so; how long that took."""
        began_s = time.monotonic()
        over = [False]

        def look() -> None:
            if true() or over[0]:
                self.reactor.stop()

        self.reactor.after_round = look
        self.reactor.after(limit_s, lambda: over.__setitem__(0, True))
        self.reactor.run()
        assert true(), (self.low.gone, self.high.gone, self.low.opened, self.high.opened)
        return time.monotonic() - began_s

    def run_for(self, seconds: float) -> None:
        end_s = time.monotonic() + seconds
        self.until(lambda: time.monotonic() >= end_s, seconds)

    def opened(self, count: int) -> Callable[[], bool]:
        return lambda: len(self.low.opened) >= count and len(self.high.opened) >= count


@pytest.fixture
def case() -> Iterator[Case]:
    with ExitStack() as stack:
        made = Case()
        stack.callback(made.reactor.close)
        yield made


def test_the_higher_node_opens_the_link_and_both_are_told_of_the_other(case: Case) -> None:
    case.want()
    case.until(case.opened(1))
    assert case.low.opened == [(case.high.own, 11)]
    assert case.high.opened == [(case.low.own, 10)]
    case.low.say(1, "down")
    case.high.say(0, "up")
    case.until(lambda: case.low.heard and case.high.heard)
    assert (case.low.heard, case.high.heard) == ([(1, "up")], [(0, "down")])
    case.want()  # it is there: nobody dials again
    case.run_for(2 * GRACE_S)
    assert len(case.low.opened) == len(case.high.opened) == 1
    assert not case.low.gone and not case.high.gone


@pytest.mark.parametrize("who", ["low", "high"])
def test_a_link_of_an_agent_that_died_is_opened_again_with_the_next_one(
    case: Case, who: str
) -> None:
    case.want()
    case.until(case.opened(1))
    dies = getattr(case, who)
    dies.next_life()
    case.want()
    with within(GRACE_S):
        case.until(case.opened(2))
    other = case.high if who == "low" else case.low
    assert [peer.life for peer, _ in other.opened] == [0, 1]
    case.low.say(1, "again")
    case.until(lambda: case.high.heard)
    case.run_for(2 * GRACE_S)
    assert not case.low.gone and not case.high.gone


def test_a_link_that_breaks_between_two_that_live_is_opened_again(case: Case) -> None:
    case.want()
    case.until(case.opened(1))
    case.high.links.channels[0]._sock.shutdown(socket.SHUT_RDWR)
    case.until(case.opened(2))
    case.high.say(0, "again")
    case.until(lambda: case.low.heard)
    assert not case.low.gone and not case.high.gone


@pytest.mark.parametrize("who", ["low", "high"])
def test_that_nobody_listens_any_more_is_told_at_once(case: Case, who: str) -> None:
    """By either end: the one that would wait to be dialled looks too."""
    case.want()
    case.until(case.opened(1))
    getattr(case, who).vanish()
    other = case.high if who == "low" else case.low
    with within(GRACE_S / 2):
        case.until(lambda: other.gone)
    ((node, evidence),) = other.gone
    assert node == (0 if who == "low" else 1)
    assert evidence.endswith(f"; nobody listens at {getattr(case, who).address} any more")


def test_one_that_counts_this_node_out_is_gone_after_the_grace(case: Case) -> None:
    case.low.refuses = "node 1 has no part in the job"
    began_s = time.monotonic()
    case.high.links.want({0: case.low.address})
    with within(GRACE_S + 0.5):
        case.until(lambda: case.high.gone)
    assert time.monotonic() - began_s >= GRACE_S
    assert case.high.gone[0] == (0, "node 1 has no part in the job")
    assert not case.high.opened


def test_one_that_has_not_heard_yet_of_this_node_is_asked_again(case: Case) -> None:
    case.low.refuses = "node 1 has no part in the job"
    case.high.links.want({0: case.low.address})
    case.run_for(GRACE_S / 2)
    case.low.refuses = None
    with within(GRACE_S / 2):
        case.until(lambda: case.high.opened)
    assert not case.high.gone


def test_whoever_opens_the_link_late_is_not_gone(case: Case) -> None:
    """It listens, so that it is not dead; and it is to open the link."""
    case.want()
    case.until(case.opened(1))
    case.high.links._wanted.clear()
    case.high.links.channels[0]._sock.shutdown(socket.SHUT_RDWR)
    case.run_for(2 * GRACE_S)
    assert len(case.low.opened) == 1 and not case.low.gone
    case.want()
    case.until(case.opened(2))
    assert not case.low.gone


def test_a_next_life_sees_that_one_which_should_come_is_dead(case: Case) -> None:
    """A guardian may die together with the agent of another node, which had the link."""
    case.want()
    case.until(case.opened(1))
    case.high.vanish()
    case.low.next_life()
    case.low.links.want({1: case.high.address})
    with within(GRACE_S + 0.5):
        assert case.until(lambda: case.low.gone) >= GRACE_S
    assert f"nobody listens at {case.high.address} any more" in case.low.gone[0][1]


def test_a_link_that_was_closed_is_not_opened_again(case: Case) -> None:
    case.want()
    case.until(case.opened(1))
    case.high.links.close(0)
    case.low.links.close(1)
    case.run_for(2 * GRACE_S)
    assert len(case.high.opened) == 1
    assert not case.low.gone and not case.high.gone


def test_one_with_another_secret_gets_no_link(case: Case) -> None:
    stranger = Node(2, case.reactor, Secret(b"8" * 64))
    stranger.links.want({0: case.low.address})
    case.until(lambda: "another secret" in stranger.links._down[0].evidence)
    assert not case.low.opened and not case.low.links.channels
    assert not stranger.gone
