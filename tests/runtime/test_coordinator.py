"""Coordinators over real links: how long it takes until the loss of a whole node is known."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from elaswave_plugin.core.patience import Patience
from elaswave_plugin.runtime.coordinator import Coordinator, Heartbeat
from elaswave_plugin.runtime.reactor import Reactor
from elaswave_plugin.runtime.rendezvous import Meeting, Peer
from elaswave_plugin.tracking.events import EventLog

# A node of eight, and two of one worker each.
NODES = (0, 0, 0, 0, 0, 0, 0, 0, 1, 2)
BEAT = Heartbeat(every_s=0.1, timeout_s=0.6)
LONG_S = 10.0


class NoTrainer:
    """A supervisor whose trainer does nothing, and is asked for nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


class Links:
    """One socket pair for every two slots."""

    def __init__(self, stack: ExitStack, count: int) -> None:
        self.of: list[dict[int, socket.socket]] = [{} for _ in range(count)]
        for one in range(count):
            for other in range(one):
                ends = socket.socketpair()
                self.of[one][other], self.of[other][one] = map(stack.enter_context, ends)


class Member:
    """The coordinator of one slot, in a thread of its own."""

    def __init__(self, slot: int, links: dict[int, socket.socket]) -> None:
        self.slot = slot
        self.lost_s: dict[int, float] = {}
        self._reactor = Reactor()
        self._links = links
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self._ready.wait(LONG_S)

    def _run(self) -> None:
        peers = tuple(
            Peer(slot=slot, node=node, pid=1 << 22, control="", data="", machine="")
            for slot, node in enumerate(NODES)
        )
        trainer: Any = NoTrainer()
        coordinator = Coordinator(
            self._reactor,
            Meeting(peers=peers, links=self._links),
            slot=self.slot,
            patience=Patience(),
            heartbeat=BEAT,
            trainer_side=trainer,
            events=EventLog(None),
        )
        self.agreement = coordinator.agreement
        settle = self._reactor.after_round

        def after_round() -> None:
            settle()
            for slot in coordinator.lost:
                self.lost_s.setdefault(slot, time.monotonic())

        self._reactor.after_round = after_round
        self._ready.set()
        self._reactor.run()
        coordinator.finish(0.0)
        self._reactor.close()

    def until_it_lost(self, slots: set[int]) -> float:
        """When it had lost the last of them, on the monotonic clock."""
        deadline_s = time.monotonic() + LONG_S
        while not slots <= self.lost_s.keys():
            assert time.monotonic() < deadline_s, self.lost_s
            time.sleep(BEAT.every_s / 10)
        return max(self.lost_s[slot] for slot in slots)

    def end(self) -> None:
        """Stop the thread."""
        self._reactor.post(self._reactor.stop)
        self._thread.join(LONG_S)


@pytest.fixture
def start() -> Iterator[Callable[..., list[Member]]]:
    """Members of these slots; all the others are there and silent, as after a loss of power."""
    with ExitStack() as stack:
        links = Links(stack, len(NODES))

        def start_members(*slots: int) -> list[Member]:
            members = [Member(slot, links.of[slot]) for slot in slots]
            for member in members:
                stack.callback(member.end)
            return members

        yield start_members


def test_a_leaders_node_without_power_is_lost_within_one_timeout(
    start: Callable[..., list[Member]],
) -> None:
    """Not slot by slot, each after a timeout of its own."""
    began_s = time.monotonic()
    for member in start(8, 9):
        took_s = member.until_it_lost(set(range(8))) - began_s
        assert BEAT.timeout_s < took_s < 2 * BEAT.timeout_s
        assert member.agreement.leader == 8


def test_who_answers_beside_a_silent_leader_is_not_lost(
    start: Callable[..., list[Member]],
) -> None:
    members = start(2, 8, 9)
    for member in members:
        member.until_it_lost({0, 1})
    time.sleep(2 * BEAT.timeout_s)
    for member in members:
        assert set(member.lost_s) == {0, 1, 3, 4, 5, 6, 7}
        assert member.agreement.leader == 2
